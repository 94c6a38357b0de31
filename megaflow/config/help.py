"""--help, the reference docs/config.md, yaml/base/grpo.yaml and yaml/base/ppo.yaml: all written from the schema, so none falls behind it.

    python -m megaflow.config.help reference > docs/config.md
    python -m megaflow.config.help base > yaml/base/grpo.yaml
    python -m megaflow.config.help base-ppo > yaml/base/ppo.yaml
"""

from __future__ import annotations

import dataclasses
import sys
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megaflow.config.nodes import flow, types_of
from megaflow.config.schema import Config

EXIT_CODES = {
    0: "done",
    1: "crash: a traceback says where",
    2: "configuration: nothing was started",
    3: "preflight: the configuration is sound, but model, data or machine do not fit it",
    4: "diverged: training left the region where going on makes sense",
    75: "stopped (STOP file or SIGTERM) after saving: start again to go on",
}
SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True)
class Key:
    """One key of the schema."""

    name: str  # without its section
    kind: Any
    default: Any
    doc: str
    limits: dict[str, float]

    def type_text(self) -> str:
        """`int >= 1`, `chat | plain`, `list of SourceConfig`."""
        if typing.get_origin(self.kind) is typing.Literal:
            return " | ".join(typing.get_args(self.kind))
        if typing.get_origin(self.kind) is list:
            return f"list of {typing.get_args(self.kind)[0].__name__}"
        if typing.get_origin(self.kind) is dict:
            return "mapping"
        return " ".join([self.kind.__name__, *(f"{SIGNS[name]} {limit}" for name, limit in self.limits.items())])


def sections(kind: Any = Config, prefix: str = "") -> Iterator[tuple[str, Any, list[Key]]]:
    """(dotted section, its dataclass, its keys) in the schema's order, nested sections after their parent."""
    types, keys, nested = types_of(kind), [], []
    for each in dataclasses.fields(kind):
        if dataclasses.is_dataclass(types[each.name]):
            nested.append(each.name)
            continue
        default = each.default_factory() if each.default is dataclasses.MISSING else each.default  # type: ignore[misc]
        limits = {name: each.metadata[name] for name in SIGNS if name in each.metadata}
        keys.append(Key(each.name, types[each.name], default, each.metadata.get("doc", ""), limits))
    if keys:
        yield prefix, kind, keys
    for name in nested:
        yield from sections(types[name], f"{prefix}.{name}" if prefix else name)


def item_sections() -> list[tuple[str, Any, list[Key]]]:
    """The dataclasses that are items of a list, as ("data.train[], data.eval[]", dataclass, keys)."""
    places: dict[Any, list[str]] = {}
    for section, _, keys in sections():
        for key in keys:
            item = typing.get_args(key.kind)[0] if typing.get_origin(key.kind) is list else None
            if dataclasses.is_dataclass(item):
                places.setdefault(item, []).append(f"{section}.{key.name}[]")
    return [(", ".join(where), item, next(sections(item, "item"))[2]) for item, where in places.items()]


def help_text(program_doc: str, plans: bool = True) -> str:
    """What --help prints. plans: the program has --plan."""
    lines = [program_doc.strip(), "", USAGE if plans else _without_plan(USAGE), "", "Keys (type, default, meaning):"]
    for section, _, keys in [*sections(), *item_sections()]:
        lines += ["", f"{section}"]
        for key in keys:
            lines.append(f"  {key.name}: {key.type_text()} = {flow(key.default)}")
            lines += textwrap.wrap(key.doc, 110, initial_indent="      ", subsequent_indent="      ")
    lines += ["", "Exit codes (under torchrun every failure becomes 1; <run>/status.json has the true one):"]
    lines += [f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items()]
    return "\n".join(lines)


USAGE = """\
Usage: SCRIPT --config FILE [section.key=value ...] [--print-config] [--dry-run] [--plan] [--world-size N] [--help]

  --config FILE       YAML; `base: other.yaml` at its top inherits (a file or a list, relative to the one that says so)
  section.key=value   overrides the file; the value is YAML: data.train.0.path=x.jsonl  sampling.stop=[a, b]  algo.kl={where: loss}
  --print-config      print the resolved configuration and where each value was set, and exit
  --dry-run           check all that can be checked without allocating (files, tokenizer, divisibility), print it, and exit
  --plan              memory of each phase, bytes of a sync, seconds of a step, what to change; needs config.json alone; code 3: too large
  --device NAME       with --plan: h200 (default), h100, a100
  --world-size N      with --print-config, --dry-run or --plan: for so many ranks (default: WORLD_SIZE, or 1)"""


def _without_plan(usage: str) -> str:
    lines = [line for line in usage.splitlines() if not line.startswith(("  --plan ", "  --device "))]
    return "\n".join(lines).replace(" [--plan]", "").replace("--print-config, --dry-run or --plan:", "--print-config or --dry-run:")


REFERENCE_HEAD = """\
# Configuration reference

Written by `python -m megaflow.config.help reference > docs/config.md`; a test keeps it up to date.

Order: defaults, then `base:` files, then the file, then `section.key=value` arguments. A list, or a mapping such as `options`,
replaces the one before it as a whole. `${oc.env:NAME}` is an environment variable; a literal `${` is written `\\${`."""


def reference() -> str:
    """docs/config.md."""
    lines = REFERENCE_HEAD.splitlines()
    for section, kind, keys in [*sections(), *item_sections()]:
        lines += ["", f"## {section}", ""]
        if section.endswith("[]") and kind.__doc__ and not kind.__doc__.startswith(kind.__name__):
            lines += [kind.__doc__, ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        lines += [f"| `{key.name}` | {_cell(key.type_text())} | `{flow(key.default)}` | {_cell(key.doc)} |" for key in keys]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")


# What PPO has otherwise than GRPO: a critic stands in for the comparison with other samples of the same prompt.
PPO = {"rollout.prompts_per_step": 256, "rollout.samples_per_prompt": 1, "algo.advantage": "gae"}


def base_yaml() -> str:
    """yaml/base/grpo.yaml: every key, its default, and what it means."""
    head = "# Every key and its default. Start your own file with `base: base/grpo.yaml` and write only what differs."
    return _base(head, "base > yaml/base/grpo.yaml", {})


def base_ppo_yaml() -> str:
    """yaml/base/ppo.yaml: the same with the values of PPO."""
    head = f"# Every key as PPO wants it: the default but for {', '.join(PPO)}. Start your own file with `base: base/ppo.yaml`."
    return _base(head, "base-ppo > yaml/base/ppo.yaml", PPO)


def _base(head: str, command: str, changed: dict[str, Any]) -> str:
    lines = [head, f"# Written by `python -m megaflow.config.help {command}`; a test keeps it up to date."]
    for section, _, keys in sections():
        depth = section.count(".")
        lines += [""] if depth == 0 else []
        lines.append(f"{'  ' * depth}{section.rpartition('.')[2]}:")
        for key in keys:
            value = changed.get(f"{section}.{key.name}", key.default)
            lines += _base_key(dataclasses.replace(key, default=value), "  " * (depth + 1))
    return "\n".join(lines) + "\n"


def _base_key(key: Key, indent: str) -> list[str]:
    choices = f"{key.type_text()}: " if typing.get_origin(key.kind) is typing.Literal else ""
    setting = f"{indent}{key.name}: {flow(key.default)}"
    lines = [f"{setting:<40}  # {choices}{key.doc}".rstrip(" #")]
    item = typing.get_args(key.kind)[0] if typing.get_origin(key.kind) is list else None
    if dataclasses.is_dataclass(item):
        for number, each in enumerate(next(sections(item, "item"))[2]):
            setting = f"{indent}#   {'  ' if number else '- '}{each.name}: {flow(each.default)}"
            lines.append(f"{setting:<40}  # {each.doc}")
    return lines


if __name__ == "__main__":
    pages = {"reference": reference, "base": base_yaml, "base-ppo": base_ppo_yaml}
    sys.stdout.write(pages[sys.argv[1] if len(sys.argv) > 1 else "reference"]())
