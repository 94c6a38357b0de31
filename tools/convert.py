"""Convert models between Hugging Face folders, folders cut for a Megatron layout, and training checkpoints; look at them; compare them.

    python tools/convert.py hf-to-megatron models/smollm2 models/smollm2-pp2 tp=1 pp=2
    python tools/convert.py megatron-to-hf models/smollm2-pp2 models/smollm2-again shard_gb=2
    python tools/convert.py megatron-to-hf runs/quickstart models/trained
    python tools/convert.py inspect runs/quickstart/checkpoints/step_000030
    python tools/convert.py verify models/smollm2 models/smollm2-pp2 --logits "What is 3 + 4?"
    torchrun --nproc-per-node 4 tools/convert.py hf-to-megatron models/large models/large-cut tp=8 pp=4 ep=8

key=value: tp, pp, vpp, ep, etp (hf-to-megatron); shard_gb, the size of a file at most (default 5); model, the Hugging Face folder that a
checkpoint's run started from (default: what the run's config.yaml says). Exit codes: 0, 1 a difference or a failed write, 2 a wrong
argument, 3 a missing or damaged file.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that a clone works without installation

from tqdm import tqdm

from megaflow.types import ConfigError, UserError

if TYPE_CHECKING:
    from megaflow.convert.sources import Source

PATHS = {"hf-to-megatron": 2, "megatron-to-hf": 2, "inspect": 1, "verify": 2}
AXES = ("tp", "pp", "vpp", "ep", "etp")
COMMON = ("model",)
KEYS = {"hf-to-megatron": (*AXES, "shard_gb", *COMMON), "megatron-to-hf": ("shard_gb", *COMMON), "inspect": COMMON, "verify": COMMON}
SHOWN = 10  # differences


def parse(action: str, words: list[str]) -> tuple[list[Path], dict[str, str]]:
    """Paths, and the values of key=value."""
    given = dict(word.split("=", 1) for word in words if "=" in word)
    paths = [Path(word) for word in words if "=" not in word]
    if len(paths) != PATHS[action]:
        raise ConfigError(f"{action} takes {PATHS[action]} path(s), {len(paths)} given: {' '.join(map(str, paths))}")
    for key in given.keys() - set(KEYS[action]):
        raise ConfigError(f"{key}={given[key]}: {action} has no {key}; it takes {', '.join(f'{k}=' for k in KEYS[action])}")
    return paths, given


def number(given: dict[str, str], key: str, default: float, kind: type) -> float:
    try:
        value = kind(given.get(key, default))
    except ValueError as e:
        raise ConfigError(f"{key}={given[key]} is not a number") from e
    if value <= 0:
        raise ConfigError(f"{key}={given[key]} must be more than 0")
    return value


def transform(action: str, paths: list[Path], given: dict[str, str]) -> None:
    from megaflow.convert.jobs import to_hugging_face, to_megatron
    from megaflow.convert.layout import Axes
    from megaflow.convert.run import Ranks, convert

    axes = Axes(**{axis: number(given, axis, 1, int) for axis in AXES})
    shard_bytes = int(number(given, "shard_gb", 5, float) * 1e9)
    if paths[1].exists():
        raise ConfigError(f"{paths[1]} exists and is not overwritten; remove it or give another name")
    source = opened(paths[0], given)
    target = to_megatron(source, axes, shard_bytes) if action == "hf-to-megatron" else to_hugging_face(source, shard_bytes)
    ranks = Ranks(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    say = print if ranks.rank == 0 else lambda _: None
    if left_out := source.left_out():
        say(f"{len(left_out)} tensors of {source.path} are no part of the model and are left out, e.g. {left_out[0]}")
    mine = sum(job.nbytes for job in target.jobs[ranks.rank :: ranks.world])
    with bar(mine, ranks.rank) as progress:
        kept = convert(source, target, paths[1], ranks, progress.update)
    say(f"{paths[1]}: {sum(len(job.files) for job in target.jobs)} files of weights, {sum(job.nbytes for job in target.jobs):,} bytes")
    if kept:
        say(f"{kept} of them were finished by an interrupted run and have the checksums that it noted")


def opened(path: Path, given: dict[str, str], needs_model: bool = True) -> Source:
    from megaflow.convert.sources import open_source

    return open_source(path, Path(given["model"]) if "model" in given else None, needs_model)


def bar(nbytes: int, rank: int = 0) -> tqdm:
    return tqdm(total=nbytes, unit="B", unit_scale=True, disable=rank > 0, file=sys.stderr)


def inspect(paths: list[Path], given: dict[str, str]) -> None:
    from megaflow.convert.compare import describe

    for line in describe(opened(paths[0], given, needs_model=False)):
        print(line)


def verify(paths: list[Path], given: dict[str, str], prompt: str) -> None:
    from megaflow.convert.compare import compare, size_of

    a, b = (opened(path, given) for path in paths)
    with bar(size_of(a)) as progress:
        found = compare(a, b, progress.update)
    if found.different:
        more = len(found.different) - SHOWN
        lines = [*found.different[:SHOWN], *([f"and {more} more"] if more > 0 else [])]
        raise UserError("\n".join([f"{len(found.different)} of {found.num_tensors} tensors differ:", *lines]))
    print(f"{found.num_tensors} tensors, {found.nbytes:,} bytes: equal bit for bit")
    if prompt:
        print(agreement(a, b, prompt))


def agreement(a: Source, b: Source, prompt: str) -> str:
    """Raises UserError when the logits differ by more than rounding, or their largest is another."""
    from megaflow.convert.logits import compare_logits

    found = compare_logits(a, b, prompt)
    say = f"logits over {found.num_tokens} tokens, {found.programs[0]} and {found.programs[1]}"
    gap = "equal" if found.gap == 0 else f"differ by {found.gap:.2g} at most (largest logit: {found.largest:.3g})"
    if not found.good:
        raise UserError(f"{say}: {gap}, more than rounding explains; next tokens: {found.words[0]!r} and {found.words[1]!r}")
    return f"{say}: {gap}; next token: {found.words[0]!r}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=list(PATHS))
    parser.add_argument("words", nargs="+", metavar="PATH | key=value")
    parser.add_argument("--logits", default="", metavar="PROMPT", help="verify: also compare what the models compute for it")
    args = parser.parse_args(argv)
    try:
        if args.logits and args.action != "verify":
            raise ConfigError(f"--logits is for verify, not for {args.action}")
        paths, given = parse(args.action, args.words)
        if args.action == "inspect":
            inspect(paths, given)
        elif args.action == "verify":
            verify(paths, given, args.logits)
        else:
            transform(args.action, paths, given)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # piped into head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)
