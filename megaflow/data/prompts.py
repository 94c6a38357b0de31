"""From records to prompts in tokens: the model's chat template, or plain text."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import batched
from pathlib import Path
from typing import Any

from megaflow.config.schema import DataConfig
from megaflow.data.sources import Record
from megaflow.types import PreflightError, Prompt

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
BATCH = 1024  # records tokenised at once: the fast tokenizers work through a list in native code


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a Hugging Face folder; never asks the network. Raises PreflightError when the folder has none."""
    folder = Path(path)
    if not path or not folder.is_dir():
        raise PreflightError(f"model.path={path!r}: no such folder (seen from {Path.cwd()})")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise PreflightError(f"model.path={path!r}: no tokenizer in this folder; looked for {', '.join(TOKENIZER_FILES)}")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # many kinds of broken files, many kinds of exceptions
        raise PreflightError(f"model.path={path!r}: its tokenizer does not load: {type(error).__name__}: {error}") from error


def decoded(tokenizer: Any, rows: Sequence[Any]) -> list[str]:
    """Text of each row of tokens (tensors), without special tokens: what `tokenizer.decode` gives, of fast ones in native code."""
    tokens = [row.tolist() for row in rows]
    native = getattr(tokenizer, "backend_tokenizer", None)
    if native is None or tokenizer.clean_up_tokenization_spaces:  # that is done in Python
        return [tokenizer.decode(each, skip_special_tokens=True) for each in tokens]
    return native.decode_batch(tokens, skip_special_tokens=True)


def encode_records(records: Iterable[Record], tokenizer: Any, config: DataConfig) -> tuple[list[Prompt], dict[str, int]]:
    """Prompts that are neither empty nor longer than config.max_prompt_tokens, in order, and counts: read, empty, too_long, kept.

    Their tokens are kept as C int arrays: as lists, each of the numbers would take nine times the memory on every rank.
    """
    if config.template == "chat" and not tokenizer.chat_template:
        raise PreflightError("data.template=chat: the model's tokenizer has no chat template; set data.template=plain")
    prompts: list[Prompt] = []
    counts = {"read": 0, "empty": 0, "too_long": 0, "kept": 0}
    for batch in batched(records, BATCH):
        counts["read"] += len(batch)
        texts = [render(record, tokenizer, config) for record in batch]
        asked = [(record, text) for record, text in zip(batch, texts, strict=True) if text]
        # a chat template writes its own special tokens
        encoded = tokenizer([text for _, text in asked], add_special_tokens=config.template == "plain").input_ids if asked else []
        made = [_prompt(record, text, tokens) for (record, text), tokens in zip(asked, encoded, strict=True)]
        fitting = [prompt for prompt in made if len(prompt.tokens) <= config.max_prompt_tokens]
        counts["empty"] += len(batch) - len(asked)
        counts["too_long"] += len(asked) - len(fitting)
        prompts += fitting
    counts["kept"] = len(prompts)
    return prompts, counts


def _prompt(record: Record, text: str, tokens: list[int]) -> Prompt:
    compact: Any = array("i", tokens)
    return Prompt(record.id, compact, text, record.answer, record.meta, record.prompt)


def render(record: Record, tokenizer: Any, config: DataConfig) -> str:
    """The text that the model sees; "" for a prompt without content. Raises PreflightError that names the line."""
    if config.template == "plain" and not isinstance(record.prompt, str):
        kind = type(record.prompt).__name__
        raise PreflightError(f"{record.where}: data.template=plain takes a string, and this prompt is a {kind}; use data.template=chat")
    if not _is_question(record.prompt):
        raise PreflightError(f'{record.where}: the prompt is neither a string nor a list of messages {{"role": ..., "content": "..."}}')
    messages = messages_of(record.prompt, config)
    if not any(message["content"].strip() for message in messages if message["role"] != "system"):
        return ""
    if config.template == "plain":
        return record.prompt
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise PreflightError(f"{record.where}: the model's chat template refuses it: {error}") from error


def messages_of(prompt: str | list[dict[str, Any]], config: DataConfig) -> list[dict[str, Any]]:
    """The chat that a question is: a string comes after the system message, if there is one; a list is it already."""
    if isinstance(prompt, str):
        system = [{"role": "system", "content": config.system}] if config.system else []
        return [*system, {"role": "user", "content": prompt}]
    return prompt


def _is_question(prompt: Any) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and all(_is_message(message) for message in prompt))


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
