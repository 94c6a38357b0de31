"""YAML text -> nodes that know their line, and from nodes to assignments `a.b = value` checked against the schema."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import yaml

from megaflow.config.schema import Config
from megaflow.registry import nearest


class _Loader(yaml.SafeLoader):
    """YAML 1.1, but 1e-6 is a number (PyYAML takes it for a string) and dates are strings."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that _Loader would take for numbers."""


for _each in (_Loader, _Dumper):
    _each.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))


@dataclass(frozen=True)
class Assignment:
    """One leaf that a file or an argument sets. `value` of a list of sections is that many empty ones; their keys follow by themselves."""

    key: str
    value: Any
    where: str
    kind: Any = None  # the type that the schema gives it; None for a section, which only has a place


class Source:
    """One file or one argument: turns its nodes into assignments and collects what is wrong with them in `errors`."""

    def __init__(self, name: str, errors: list[str], has_lines: bool) -> None:
        self.name = name
        self.errors = errors
        self.has_lines = has_lines

    def where(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}" if self.has_lines else self.name

    def parse(self, text: str) -> yaml.Node | None:
        """The root node; None for empty text. A syntax error is collected, and then the root is None too."""
        try:
            root = yaml.compose(text, Loader=_Loader)
            if root is not None:
                construct(root)  # unknown tags and unhashable keys show only now
            return root
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f":{mark.line + 1}" if mark is not None and self.has_lines else ""
            problem = getattr(error, "problem", None) or str(error).splitlines()[0]
            hint = "; indent with spaces" if "\\t" in problem else ""
            self.errors.append(f"{self.name}{line}: not valid YAML: {problem}{hint}")
            return None

    def pairs(self, node: yaml.MappingNode, prefix: str = "") -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        """(key, key's node, value's node); a key given twice is collected as an error."""
        seen: dict[str, str] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            if key in seen:
                self.errors.append(f"{self.where(key_node)}: {prefix}{key} is given twice, first at {seen[key]}")
                continue
            seen[key] = self.where(key_node)
            yield key, key_node, value_node

    def walk(self, key: str, kind: Any, node: yaml.Node, where: str) -> Iterator[Assignment]:
        """Assignments in the order in which they must be made (a list before its items)."""
        if dataclasses.is_dataclass(kind):
            yield from self._walk_section(key, kind, node, where)
        elif typing.get_origin(kind) is list:
            yield from self._walk_list(key, kind, node, where)
        elif typing.get_origin(kind) is dict:
            yield from self._walk_dict(key, kind, node, where)
        elif not isinstance(node, yaml.ScalarNode):
            self.errors.append(f"{where}: {key} must be {describe(kind)}, not a {shape(node)}")
        else:
            yield Assignment(key, scalar(node, kind), where, kind)

    def _walk_section(self, key: str, kind: Any, node: yaml.Node, where: str) -> Iterator[Assignment]:
        if is_null(node):  # a section whose keys are all commented out
            return
        if not isinstance(node, yaml.MappingNode):
            self.errors.append(f"{where}: {key} must be a section with keys ({', '.join(types_of(kind))}), not a {shape(node)}")
            return
        if key:
            yield Assignment(key, None, where)
        prefix = f"{key}." if key else ""
        types = types_of(kind)
        for name, key_node, value_node in self.pairs(node, prefix):
            if name in types:
                yield from self.walk(prefix + name, types[name], value_node, self.where(key_node))
            else:
                self.errors.append(f"{self.where(key_node)}: {unknown(prefix + name, name, key, kind)}")

    def _walk_list(self, key: str, kind: Any, node: yaml.Node, where: str) -> Iterator[Assignment]:
        if not isinstance(node, yaml.SequenceNode):
            self.errors.append(f"{where}: {key} must be {describe(kind)}, not a {shape(node)}")
            return
        (item,) = typing.get_args(kind)
        if not dataclasses.is_dataclass(item):
            yield Assignment(key, [scalar(each, item) for each in node.value], where, kind)
            return
        yield Assignment(key, [{} for _ in node.value], where, kind)
        for number, each in enumerate(node.value):
            yield from self.walk(f"{key}.{number}", item, each, self.where(each))

    def _walk_dict(self, key: str, kind: Any, node: yaml.Node, where: str) -> Iterator[Assignment]:
        if is_null(node):
            yield Assignment(key, {}, where, kind)
        elif isinstance(node, yaml.MappingNode):
            for _ in self.pairs(node, f"{key}."):
                pass  # only for keys given twice
            yield Assignment(key, construct(node), where, kind)
        else:
            self.errors.append(f"{where}: {key} must be {describe(kind)}, not a {shape(node)}")


def unknown(full: str, name: str, section: str, kind: Any) -> str:
    """What to say of a key that the schema does not have; the name may exist in another section."""
    types = types_of(kind)
    text = f"{full} is not a key{nearest(name, types)}"
    elsewhere = [f"{other}.{name}" for other, its_kind in types_of(Config).items() if name in types_of(its_kind) and other != section]
    if elsewhere:
        text += f" (there is {' and '.join(elsewhere)})"
    return f"{text}; {section or 'the top level'} has {', '.join(types)}"


def types_of(kind: Any) -> dict[str, Any]:
    """Name -> resolved type of a dataclass's fields."""
    return typing.get_type_hints(kind)


def describe(kind: Any) -> str:
    """A type in words."""
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(typing.get_args(kind))
    if typing.get_origin(kind) is list:
        (item,) = typing.get_args(kind)
        return f"a list of {'strings' if item is str else 'numbers' if item is float else 'sections with ' + ', '.join(types_of(item))}"
    if typing.get_origin(kind) is dict:
        return "a mapping (name: value)"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[kind]


def shape(node: yaml.Node) -> str:
    return {"mapping": "mapping", "sequence": "list", "scalar": "single value"}[node.id]


def is_null(node: yaml.Node) -> bool:
    return node.tag == "tag:yaml.org,2002:null"


def scalar(node: yaml.Node, kind: Any) -> Any:
    """The Python value. Where a string is wanted the text as written: `name: 1e5`, `sleep_level: 2`, `offload: off` mean their letters."""
    wants_text = kind is str or typing.get_origin(kind) is typing.Literal
    if wants_text and isinstance(node, yaml.ScalarNode) and not is_null(node):
        return node.value
    return construct(node)


def construct(node: yaml.Node) -> Any:
    """The plain Python value of a node."""
    loader = _Loader("")
    try:
        return loader.construct_document(node)
    finally:
        loader.dispose()


def flow(value: Any) -> str:
    """A value as one line of YAML."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**9, sort_keys=False, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
