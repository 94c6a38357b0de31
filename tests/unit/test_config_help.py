"""What is written from the schema is complete and up to date."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaflow.config.help import PPO, base_ppo_yaml, base_yaml, help_text, reference
from megaflow.config.loading import load
from megaflow.config.schema import Config, RewardFunctionConfig, SourceConfig

ROOT = Path(__file__).parents[2]


def flat(section: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> default, read straight from the dataclasses."""
    out: dict[str, Any] = {}
    for each in dataclasses.fields(section):
        value = getattr(section, each.name)
        out |= flat(value, f"{prefix}{each.name}.") if dataclasses.is_dataclass(value) else {prefix + each.name: value}
    return out


def flat_yaml(node: dict[str, Any], sections: set[str], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in node.items():
        key = prefix + name
        out |= flat_yaml(value, sections, f"{key}.") if key in sections else {key: value}
    return out


DEFAULTS = flat(Config())


def test_base_file_has_every_key_and_its_default() -> None:
    sections = {key.rsplit(".", n)[0] for key in DEFAULTS for n in range(1, key.count(".") + 1)}
    written = flat_yaml(yaml.safe_load((ROOT / "yaml/base/grpo.yaml").read_text()), sections)
    assert written == DEFAULTS


def test_base_file_is_the_schema_and_says_where() -> None:
    loaded = load(str(ROOT / "yaml/base/grpo.yaml"), [])
    assert loaded.config == Config()
    assert all(loaded.where(key).startswith(str(ROOT / "yaml/base/grpo.yaml:")) for key in DEFAULTS)


WRITTEN = [("yaml/base/grpo.yaml", base_yaml), ("yaml/base/ppo.yaml", base_ppo_yaml), ("docs/config.md", reference)]


def test_base_file_of_ppo_says_what_it_has_otherwise() -> None:
    found, default = flat(load(str(ROOT / "yaml/base/ppo.yaml"), []).config), DEFAULTS
    assert {key: value for key, value in found.items() if value != default[key]} == PPO


@pytest.mark.parametrize(("path", "text"), WRITTEN)
def test_written_files_are_up_to_date(path: str, text: Any) -> None:
    assert (ROOT / path).read_text() == text(), f"write {path} anew: see megaflow/config/help.py"


def test_help_and_reference_name_every_key_with_its_doc() -> None:
    text, table = help_text("What it does."), reference()
    for section in (Config(), SourceConfig(), RewardFunctionConfig()):
        for key in flat(section):
            assert f"  {key.rpartition('.')[2]}: " in text and f"| `{key.rpartition('.')[2]}` |" in table, key
    assert text.startswith("What it does.") and "seconds without any finished sample" in text and "lr: float > 0 = 1.0e-06" in text
    assert "offload: none | optimizer | all | auto = none" in text


def test_help_lists_the_exit_codes_of_the_documentation() -> None:
    documented = (ROOT / "docs/running.md").read_text()
    for code in (0, 1, 2, 3, 4, 75):
        assert f"\n  {code:>3}  " in help_text("") and f"| {code} |" in documented


def test_every_key_is_documented() -> None:
    def walk(kind: Any) -> None:
        for each in dataclasses.fields(kind):
            if "doc" in each.metadata:
                assert each.metadata["doc"], f"{kind.__name__}.{each.name} has no doc"
            else:
                assert dataclasses.is_dataclass(each.default_factory), f"{kind.__name__}.{each.name}"
                walk(each.default_factory)

    walk(Config)


@pytest.mark.parametrize("path", sorted(str(path.relative_to(ROOT)) for path in (ROOT / "yaml").rglob("*.yaml")))
def test_every_config_file_of_the_repository_loads(path: str) -> None:
    load(str(ROOT / path), [])
