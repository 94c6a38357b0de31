"""A Megatron layout on disk: which ranks share files, and which parameters a rank's files hold.

A rank (tp t, pp p) reads the files `pp{p}_tp{t}-*`, and with experts also those of its place (etp x, ep e), `pp{p}_ep{e}_etp{x}-*`:
data-, context- and expert-parallel ranks hold the same attention, so it is written once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megaflow.shape import ModelShape
from megaflow.types import ConfigError
from megaflow.weights.kinds import QKV, Vocab
from megaflow.weights.table import Row, table

EMBEDDING = "embedding.word_embeddings.weight"
TIED_COPY = "output_layer.weight"  # of the embedding, on the last of several stages


def original(name: str, shape: ModelShape) -> str:
    """The parameter that has the values of `name`: of a tied model's output layer the embedding, which every form holds."""
    return EMBEDDING if name == TIED_COPY and shape.tied else name


@dataclass(frozen=True)
class Axes:
    """Sizes of the axes that cut a model; vpp is the number of virtual chunks of a stage."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1

    def check(self, shape: ModelShape, model: str) -> None:
        """Raises ConfigError when the model cannot be cut so."""
        count, experts = shape.num_layers, shape.experts
        if odd := _uncut(sizes := _cut_sizes(shape), self.tp):
            usable = _usable(shape.num_heads, lambda n: not _uncut(sizes, n))
            raise ConfigError(f"tp={self.tp} does not divide {odd} of {model}; use {usable}")
        if count % self.pp:
            raise ConfigError(f"pp={self.pp} does not divide the {count} layers of {model}; use {_usable(count, lambda n: count % n == 0)}")
        if (here := count // self.pp) % self.vpp:
            raise ConfigError(f"vpp={self.vpp} does not divide the {here} layers of a stage; use {_usable(here, lambda n: here % n == 0)}")
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(f"vpp={self.vpp} needs pp > 1: virtual chunks are parts of a pipeline stage")
        for name, size in (("ep", self.ep), ("etp", self.etp)):
            if experts is None and size > 1:
                raise ConfigError(f"{name}={size} divides experts, and {model} has none; use 1")
        if experts and experts.count % self.ep:
            usable = _usable(experts.count, lambda n: experts.count % n == 0)
            raise ConfigError(f"ep={self.ep} does not divide the {experts.count} experts of {model}; use {usable}")
        if experts and experts.ffn_size % self.etp:
            raise ConfigError(f"etp={self.etp} does not divide the experts' size {experts.ffn_size} of {model}")

    def __str__(self) -> str:
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self))


def _cut_sizes(shape: ModelShape) -> dict[str, int]:
    """What tp must divide. The vocabulary is padded and never in the way."""
    sizes = {"num_attention_heads": shape.num_heads}
    if shape.latent is None:
        sizes["num_key_value_heads"] = shape.num_kv_heads
    for row in table(shape):
        if row.expert < 0 and row.kind.dim is not None and not isinstance(row.kind, Vocab | QKV):
            sizes[".".join(row.hf[0].split(".")[-2:])] = row.sizes[0][row.kind.dim]
    return sizes


def _uncut(sizes: dict[str, int], tp: int) -> str:
    return " and ".join(f"{name}={size}" for name, size in sizes.items() if size % tp)


def _usable(most: int, is_right: Callable[[int], bool]) -> str:
    return ", ".join(str(n) for n in range(1, most + 1) if is_right(n))


@dataclass(frozen=True)
class Group:
    """The parameters of the ranks that lie beside each other on the tensor axis: each has one of `parts` of each row, in the same order."""

    stems: tuple[str, ...]  # of the files, by part
    rows: tuple[Row, ...]

    @property
    def parts(self) -> int:
        return len(self.stems)


def groups(shape: ModelShape, axes: Axes) -> Iterator[Group]:
    rows = table(shape)
    for stage in range(axes.pp):
        here = [row for row in rows if row.stage(axes.pp, shape.num_layers, axes.vpp) == stage]
        dense = [row for row in here if row.expert < 0]
        if shape.tied and axes.pp > 1 and stage == axes.pp - 1:
            dense.append(dataclasses.replace(rows[0], megatron=TIED_COPY, layer=shape.num_layers))
        yield Group(tuple(f"pp{stage}_tp{t}" for t in range(axes.tp)), tuple(dense))
        for ep in range(axes.ep if shape.experts else 0):
            own = tuple(row for row in here if row.expert >= 0 and row.expert * axes.ep // shape.experts.count == ep)
            if own:
                yield Group(tuple(f"pp{stage}_ep{ep}_etp{x}" for x in range(axes.etp)), own)
