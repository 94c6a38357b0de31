"""Make a small language model from nothing: HF folder, tokenizer, chat template, and (half-)taught two-digit addition.

    python tools/make_tiny_model.py --out models/tiny --data data/addition

A short supervised warm-up teaches it on purpose only until it knows the right answer but often says another: about a third of the
*sampled* answers are right. That is enough for reinforcement learning to find them, and leaves plenty to gain. --steps 0 leaves
the weights random, which is what most tests want.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # --help answers without loading torch
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

FAMILIES = ("qwen2", "llama", "mistral", "qwen3")
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
SHARED = {"shared_expert_intermediate_size": 96}
LATENT = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
MIXTURES = {  # families with experts: the keys of config.json beside those that all have
    "qwen3_moe": {**ROUTED, "num_experts": 4, "norm_topk_prob": True},
    "qwen2_moe": {**ROUTED, **SHARED, "num_experts": 4, "norm_topk_prob": False, "decoder_sparse_step": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **ROUTED, **LATENT, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
    },
}  # fmt: skip
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SMALLEST_VOCAB = 256 + len(SPECIAL_TOKENS)  # every byte, so that any text can be said
# ChatML, as Qwen2 has it, without its default system message.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What the merges of the tokenizer are learned from. Digits stay apart: arithmetic is easier on digits.
CORPUS = [
    "user\n", "assistant\n", "system\n", "What is 47 + 38?", "What is the sum of the numbers?", "The answer is",
    "You are a helpful assistant", "Answer with a number", "because", "question", "think about it", "first second third",
]  # fmt: skip
MAX_ANSWER = 4  # tokens: three digits and the end
NUM_EVAL = 256  # held-out problems, of the 8,100 that there are
IGNORE = -100  # cross_entropy's mark of positions that do not count
NUM_THREADS = 1  # fixed, as another number sums in another order and gives another model; a second one would gain a fifth
BATCH = 64
LR = 2e-3
LEARNED = 0.75  # part of the sampled answers that is right when the careless teacher takes over
WRONG = 0.75  # part of that teacher's answers that are wrong, each by a slip
PROBE_EVERY = 20
SLIPS = (-10, 10, -1, 1)  # a carry forgotten or invented, a miscount


def make(
    out: str | Path,
    *,
    family: str = "qwen2",
    layers: int = 2,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 307,
    tied: bool = True,
    steps: int = 0,
    target: float = 0.35,
    seed: int = 0,
    data: str | Path | None = None,
) -> dict[str, float]:
    """Write the model to `out` (and the problems to `data`); return what was measured ({} for random weights).

    vocab is deliberately not a multiple of 64, so that padding of the embedding is exercised. Raises ValueError on sizes that
    do not fit together.
    """
    import torch

    tokenizer = make_tokenizer(vocab)
    random_state = torch.get_rng_state()  # a caller's own random numbers go on as if nothing had been drawn
    torch.manual_seed(seed)
    model = make_model(tokenizer, family, layers, hidden, heads, kv_heads, vocab, tied)
    train, held_out = problems(seed)
    if steps:
        measured = warm_up(model, tokenizer, train, held_out, steps, target)
    else:
        measured = {}
        _perturb(model)
    torch.set_rng_state(random_state)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    if data is not None:
        write_jsonl(Path(data) / "train.jsonl", train)
        write_jsonl(Path(data) / "eval.jsonl", held_out)
    return measured


def make_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with at most `vocab` tokens; ends a turn with <|im_end|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab < SMALLEST_VOCAB:
        raise ValueError(f"--vocab {vocab}: needs at least {SMALLEST_VOCAB} (256 bytes and {len(SPECIAL_TOKENS)} special tokens)")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, special_tokens=SPECIAL_TOKENS, show_progress=False)
    bpe.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def make_model(
    tokenizer: PreTrainedTokenizerFast, family: str, layers: int, hidden: int, heads: int, kv_heads: int, vocab: int, tied: bool
) -> PreTrainedModel:
    """A randomly initialised fp32 model of the family, from torch's current seed."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    if family not in (*FAMILIES, *MIXTURES):
        raise ValueError(f"--family {family}: one of {', '.join((*FAMILIES, *MIXTURES))}")
    if hidden % heads or heads % kv_heads:
        raise ValueError(f"--hidden {hidden}, --heads {heads}, --kv-heads {kv_heads}: each must be a multiple of the next")
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    mixture = MIXTURES.get(family, {})
    latent = "kv_lora_rank" in mixture  # its heads' dimensions are its own, and it has no key-value heads to share
    config = AutoConfig.for_model(
        family,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads if latent else kv_heads,
        **({} if latent else {"head_dim": hidden // heads}),
        **mixture,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        initializer_range=0.06,  # with transformers' 0.02 the warm-up takes two to five times as many steps, or stalls
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
        dtype="float32",
    )
    model = AutoModelForCausalLM.from_config(config).float()
    model.generation_config = GenerationConfig(eos_token_id=[eos], pad_token_id=pad, do_sample=True, temperature=1.0)
    return model


def _perturb(model: PreTrainedModel) -> None:
    """Give random weights a size, and norms and biases values, at which a mistake with any of them shows in the output."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(1.5)  # logits then differ clearly between tokens
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))


def problems(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """All two-digit additions in random order: those to train on, and NUM_EVAL held out (47 + 38 apart also means 38 + 47 apart)."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    held_out = set(pairs[:NUM_EVAL])
    train = [pair for pair in pairs if pair not in held_out and pair[::-1] not in held_out]
    return [_problem(*pair) for pair in train], [_problem(*pair) for pair in pairs[:NUM_EVAL]]


def _problem(a: int, b: int) -> dict[str, str]:
    return {"prompt": f"What is {a} + {b}?", "answer": str(a + b)}


def write_jsonl(path: Path, lines: list[dict[str, Any]]) -> None:
    """One JSON object a line; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def encode(tokenizer: PreTrainedTokenizerFast, lines: list[dict[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts [n, P] and answers with their end token [n, MAX_ANSWER], right-padded with IGNORE. All prompts have the same length."""
    import torch

    chats = [[{"role": "user", "content": line["prompt"]}] for line in lines]
    prompts = tokenizer(tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False))["input_ids"]
    return torch.tensor(prompts), encode_answers(tokenizer, [line["answer"] for line in lines])


def encode_answers(tokenizer: PreTrainedTokenizerFast, answers: list[str]) -> torch.Tensor:
    """Answers with their end token, right-padded with IGNORE, [n, MAX_ANSWER]."""
    import torch

    rows = [tokens + [tokenizer.eos_token_id] for tokens in tokenizer(answers)["input_ids"]]
    return torch.tensor([row + [IGNORE] * (MAX_ANSWER - len(row)) for row in rows])


def warm_up(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, train: list, held_out: list, steps: int, target: float) -> dict:
    """Supervised training on the answers, at most `steps` steps: first on right ones until LEARNED of the answers sampled for a probe
    would be right, then on a careless teacher's until it is only `target`. Without the second part the model does not know what it
    gets wrong, and reinforcement learning, which can only choose among what is sampled, gains slowly."""
    import torch

    start = time.perf_counter()
    prompts, answers = encode(tokenizer, train)
    slipped = torch.stack([encode_answers(tokenizer, [str(int(line["answer"]) + by) for line in train]) for by in SLIPS])  # [4, n, A]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, betas=(0.9, 0.98))
    careless = False
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = LR * (0.3 if careless else min(1.0, step / 50))  # slow enough to stop near the target
        rows = torch.randint(len(prompts), (BATCH,))
        taught = answers[rows]
        if careless:
            wrong = slipped[torch.randint(len(SLIPS), (BATCH,)), rows]
            taught = torch.where(torch.rand(BATCH, 1) < WRONG, wrong, taught)
        _train_on(model, optimizer, prompts[rows], taught)
        if step % (2 if careless else PROBE_EVERY) == 0:
            probe = accuracy(model, prompts[:NUM_EVAL], answers[:NUM_EVAL])
            print(f"warm-up step {step}: sampled answers right {probe['sampled']:.3f}", flush=True)
            if careless and probe["sampled"] <= target:
                break
            careless = careless or probe["sampled"] >= LEARNED
    return accuracy(model, *encode(tokenizer, held_out)) | {"steps": step, "seconds": time.perf_counter() - start}


def _train_on(model: PreTrainedModel, optimizer: torch.optim.Optimizer, prompts: torch.Tensor, answers: torch.Tensor) -> None:
    """One optimizer step on the mean cross-entropy of the answers' tokens."""
    import torch

    token_logp, real, _ = answer_logp(model, prompts, answers)
    loss = -token_logp.sum() / real.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def answer_logp(model: PreTrainedModel, prompts: torch.Tensor, answers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each answer token: its log-probability (0 where padded), whether it is real, whether it is the likeliest; all [B, A]."""
    import torch

    real = answers != IGNORE
    tokens = torch.cat([prompts, answers.clamp(min=0)], dim=1)
    logits = model(tokens[:, :-1], logits_to_keep=answers.shape[1]).logits  # [B, A, V]
    token_logp = -torch.nn.functional.cross_entropy(logits.transpose(1, 2), answers, ignore_index=IGNORE, reduction="none")
    return token_logp, real, logits.argmax(-1) == answers


def accuracy(model: PreTrainedModel, prompts: torch.Tensor, answers: torch.Tensor) -> dict[str, float]:
    """Part of the answers that are right, end token included: expected at temperature 1 (the mean probability of the right answer,
    so without sampling noise), and greedy (right when every token of the right answer is the likeliest one)."""
    import torch

    with torch.no_grad():
        token_logp, real, likeliest = answer_logp(model, prompts, answers)
    return {"sampled": token_logp.sum(1).exp().mean().item(), "greedy": (likeliest | ~real).all(1).float().mean().item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="the folder of the model")
    parser.add_argument("--data", help="a folder for train.jsonl and eval.jsonl (disjoint)")
    parser.add_argument("--family", default="qwen2", choices=(*FAMILIES, *MIXTURES))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=307, help="size of the embedding; not a multiple of 64, to exercise padding")
    parser.add_argument("--tied", action=argparse.BooleanOptionalAction, default=True, help="output layer = embedding")
    parser.add_argument("--steps", type=int, default=1500, help="most warm-up steps; 0: random weights")
    parser.add_argument("--target", type=float, default=0.35, help="part of the sampled answers that is right when the warm-up stops")
    parser.add_argument("--seed", type=int, default=0)
    arguments = vars(parser.parse_args())
    import torch

    torch.set_num_threads(NUM_THREADS)
    try:
        measured = make(**arguments)
    except ValueError as error:
        parser.error(str(error))
    if measured:
        print(
            f"{arguments['out']}: after {measured['steps']} steps ({measured['seconds']:.0f} s) of warm-up, on held-out problems: "
            f"sampled {measured['sampled']:.3f}, greedy {measured['greedy']:.3f}"
        )


if __name__ == "__main__":
    main()
