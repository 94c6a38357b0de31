"""What a Hugging Face folder answers, greedily, in SGLang's own engine and in transformers: FOLDER QUESTION ...

Nothing of megaflow's rollout takes part: the folder must do by itself.
"""

from __future__ import annotations

import os
import sys

import torch

from tests.ranks import report

NEW_TOKENS = 12


def main() -> None:
    folder, questions = sys.argv[1], sys.argv[2:]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = [tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True)["input_ids"] for q in questions]
    sglang, transformers = in_sglang(folder, asked), in_transformers(folder, asked)
    report(sglang=sglang, transformers=transformers, text=[tokenizer.decode(tokens) for tokens in transformers])


def in_sglang(folder: str, asked: list[list[int]]) -> list[list[int]]:
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    import sglang

    engine = sglang.Engine(
        model_path=folder, dtype="float32", device="cpu", attention_backend="torch_native", disable_cuda_graph=True,
        sampling_backend="pytorch", grammar_backend="none", max_total_tokens=2048, mem_fraction_static=0.1, log_level="error",
        skip_tokenizer_init=True, skip_server_warmup=True,
    )  # fmt: skip
    found = engine.generate(input_ids=asked, sampling_params={"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True})
    engine.shutdown()
    return [one["output_ids"] for one in found]


@torch.no_grad()
def in_transformers(folder: str, asked: list[list[int]]) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for tokens in asked:
        ids = torch.tensor([tokens])
        for _ in range(NEW_TOKENS):
            ids = torch.cat([ids, model(input_ids=ids, logits_to_keep=1).logits[:, -1:].argmax(-1)], 1)
        found.append(ids[0, len(tokens) :].tolist())
    return found


if __name__ == "__main__":  # the engine's processes import this file
    main()
