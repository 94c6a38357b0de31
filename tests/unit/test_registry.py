"""Names resolve lazily, and a mistake says what is known and what is near."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megaflow.registry import Registry
from megaflow.types import ConfigError


@pytest.fixture
def losses() -> Registry:
    registry = Registry("loss")
    registry.register("ppo_clip", "textwrap:dedent")
    registry.register("broken", "no_such_package_of_ours.losses:f")
    return registry


def test_listing_and_checking_a_name_import_nothing(losses: Registry) -> None:
    assert losses.names() == ["broken", "ppo_clip"]
    losses.validate("broken")
    losses.validate("not_there_at_all:f")
    assert "no_such_package_of_ours" not in sys.modules


def test_get_imports_the_registered_object(losses: Registry) -> None:
    import textwrap

    assert losses.get("ppo_clip") is textwrap.dedent


def test_get_takes_module_and_nested_attribute(losses: Registry) -> None:
    import collections

    assert losses.get("collections:OrderedDict.fromkeys") == collections.OrderedDict.fromkeys


def test_decorator_registers_under_its_name(losses: Registry) -> None:
    @losses.register("mine")
    def mine() -> int:
        return 7

    assert losses.get("mine") is mine and mine() == 7
    assert "mine" in losses.names()


def test_a_name_cannot_be_registered_twice(losses: Registry) -> None:
    with pytest.raises(AssertionError, match="loss 'ppo_clip' is registered twice"):
        losses.register("ppo_clip", "math:sqrt")


def test_file_function(losses: Registry, tmp_path: Path) -> None:
    file = tmp_path / "score.py"
    file.write_text("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int = 4\ndef f():\n    return P().x\n")
    assert losses.get(f"{file}:f")() == 4
    assert losses.get(f"{file}:f") is losses.get(f"{file}:f"), "loaded once"


def test_files_of_the_same_name_do_not_collide(losses: Registry, tmp_path: Path) -> None:
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "score.py").write_text(f"def f():\n    return {value}\n")
    assert [losses.get(f"{tmp_path}/{folder}/score.py:f")() for folder in "ab"] == [1, 2]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("ppo_clp", ["no loss 'ppo_clp'", "did you mean 'ppo_clip'?", "known are broken, ppo_clip", "file.py:function"]),
        ("zzz", ["no loss 'zzz'", "known are broken, ppo_clip"]),
        ("module:", ["'module:' is neither package.module:function nor file.py:function"]),
        (":f", ["':f' is neither"]),
        ("module:not-a-name", ["'module:not-a-name' is neither"]),
        ("nowhere.py:f", ["loss 'nowhere.py:f'", "no file nowhere.py", "looked in"]),
        ("no_such_module_here:f", ["cannot import no_such_module_here", "ModuleNotFoundError"]),
        ("broken", ["loss 'broken'", "cannot import no_such_package_of_ours.losses"]),
        ("textwrap:dedant", ["textwrap has no 'dedant'", "did you mean 'dedent'?"]),
        ("textwrap:dedent.nothing", ["textwrap has no 'nothing'"]),
    ],
)
def test_mistakes(losses: Registry, name: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        losses.get(name)
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("def f(:\n", ["line 1", "SyntaxError"]),
        ("import math\n\nx = math.sqrt(-1)\n", ["line 3 of bad.py", "ValueError"]),
        ("import no_such_thing_at_all\n", ["ModuleNotFoundError", "no_such_thing_at_all"]),
        ("def g():\n    pass\n", ["bad.py has no 'f'"]),
    ],
)
def test_a_users_file_that_fails_names_file_and_reason(losses: Registry, tmp_path: Path, text: str, parts: list[str]) -> None:
    file = tmp_path / "bad.py"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        losses.get(f"{file}:f")
    assert all(part in str(caught.value) for part in ["bad.py", *parts]), caught.value


def test_a_file_that_failed_is_tried_again_once_mended(losses: Registry, tmp_path: Path) -> None:
    file = tmp_path / "mended.py"
    file.write_text("raise RuntimeError('not yet')\n")
    with pytest.raises(ConfigError, match="not yet"):
        losses.get(f"{file}:f")
    file.write_text("def f():\n    return 'now, and longer than before'\n")
    assert losses.get(f"{file}:f")() == "now, and longer than before"
