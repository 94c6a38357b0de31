"""Files and procedural tasks: what is read, and what a user is told about a bad line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaflow.config.schema import SourceConfig
from megaflow.data.sources import check_answers, read_source, source_name
from megaflow.types import ConfigError, PreflightError


def write(path: Path, *lines: object) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def read(source: SourceConfig, prompt_key: str = "prompt", answer_key: str = "answer"):
    return list(check_answers(read_source(source, "data.train[0]", prompt_key, answer_key), answer_key))


def message(kind: type[Exception], source: SourceConfig, **keys: str) -> str:
    with pytest.raises(kind) as caught:
        read(source, **keys)
    return str(caught.value)


def test_jsonl_keeps_line_numbers_and_the_rest_of_the_line(tmp_path: Path):
    path = write(tmp_path / "sums.jsonl", {"prompt": "1+1", "answer": 2, "level": "easy"}, "", {"prompt": "2+2", "answer": 4})
    first, second = read(SourceConfig(path=path))
    assert (first.id, first.prompt, first.answer, first.meta) == ("sums:1", "1+1", 2, {"level": "easy"})
    assert (second.id, second.where) == ("sums:3", f"{path}:3")  # a blank line counts as a line of the file, not as a prompt
    assert [record.id for record in read(SourceConfig(path=path, limit=1, name="mine"))] == ["mine:1"]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ('{"prompt": "a"', "not JSON: Expecting ',' delimiter at column"),
        ("[1, 2]", "a list, where an object with named columns is expected"),
        ("{'prompt': 1}", "not JSON"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: str, wanted: str):
    path = write(tmp_path / "bad.jsonl", {"prompt": "fine"}, line)
    text = message(PreflightError, SourceConfig(path=path))
    assert text.startswith(f"{path}:2: ") and wanted in text


def test_wrong_encoding_is_named(tmp_path: Path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "ok"}\n{"prompt": "caf\xe9"}\n')
    assert message(PreflightError, SourceConfig(path=str(path))) == f"{path}:2: not UTF-8 (byte 16 of the line)"


def test_missing_prompt_key_names_keys_and_nearest(tmp_path: Path):
    path = write(tmp_path / "q.jsonl", {"prompts": "1+1", "answer": 2})
    text = message(PreflightError, SourceConfig(path=path))
    assert text == f"{path}:1: no key 'prompt' (data.prompt_key); its keys are prompts, answer; did you mean 'prompts'?"


def test_answers_on_all_lines_or_on_none(tmp_path: Path):
    none = write(tmp_path / "none.jsonl", {"prompt": "a"}, {"prompt": "b"})
    assert [record.answer for record in read(SourceConfig(path=none))] == [None, None]
    null = write(tmp_path / "null.jsonl", {"prompt": "a", "answer": None}, {"prompt": "b", "answer": 1})
    assert [record.answer for record in read(SourceConfig(path=null))] == [None, 1]
    some = write(tmp_path / "some.jsonl", {"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 1}, {"prompt": "c"})
    assert message(PreflightError, SourceConfig(path=some)).startswith(f"{some}:3: no key 'answer' (data.answer_key), which {some}:2 has")


def test_files_that_are_not_there(tmp_path: Path):
    assert "no such file" in message(PreflightError, SourceConfig(path=str(tmp_path / "x.jsonl")))
    assert "neither a .jsonl or .parquet" in message(ConfigError, SourceConfig(path=str(tmp_path / "x.csv")))


def test_parquet_reads_like_jsonl(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"q": [{"role": "user", "content": f"{i}+1"}], "answer": str(i + 1), "level": i} for i in range(3)]
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    records = read(SourceConfig(path=str(path), limit=2), prompt_key="q")
    wanted = [(f"p:{i + 1}", rows[i]["q"], str(i + 1), {"level": i}) for i in range(2)]
    assert [(r.id, r.prompt, r.answer, r.meta) for r in records] == wanted
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"no parquet at all")
    assert "not a readable parquet file" in message(PreflightError, SourceConfig(path=str(broken)))


def test_procedural_task_is_the_librarys(tmp_path: Path):
    import reasoning_gym

    source = SourceConfig(path="reasoning-gym:chain_sum", limit=3, seed=7, options={"min_terms": 2, "max_terms": 2})
    wanted = reasoning_gym.create_dataset("chain_sum", size=3, seed=7, min_terms=2, max_terms=2)
    records = read(source, prompt_key="other", answer_key="names")  # those are of the files beside it
    assert source_name(source) == "chain_sum"
    assert [(r.prompt, r.answer, r.meta["metadata"]) for r in records] == [(e["question"], e["answer"], e["metadata"]) for e in wanted]


def test_procedural_mistakes():
    text = message(ConfigError, SourceConfig(path="reasoning-gym:chain_sums", limit=1))
    assert text.startswith("data.train[0].path='reasoning-gym:chain_sums': reasoning-gym has no task 'chain_sums'; nearest: chain_sum")
    assert "data.train[0].limit=0" in message(ConfigError, SourceConfig(path="reasoning-gym:chain_sum"))
    text = message(ConfigError, SourceConfig(path="reasoning-gym:chain_sum", limit=1, options={"terms": 2}))
    assert "data.train[0].options={'terms': 2}" in text and "max_terms, min_digits" in text
    text = message(ConfigError, SourceConfig(path="reasoning-gym:chain_sum", limit=1, options={"min_terms": 5, "max_terms": 2}))
    assert "max_terms must be >= min_terms" in text
