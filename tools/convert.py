"""Convert models between Hugging Face folders, folders cut for a Megatron layout, and training checkpoints; look at them; compare them.

    python tools/convert.py hf-to-megatron models/smollm2 models/smollm2-pp2 tp=1 pp=2
    python tools/convert.py megatron-to-hf models/smollm2-pp2 models/smollm2-again shard_gb=2
    python tools/convert.py megatron-to-hf runs/quickstart models/trained
    python tools/convert.py inspect runs/quickstart/checkpoints/step_000030
    python tools/convert.py verify models/smollm2 models/smollm2-pp2 --logits "What is 3 + 4?"
    torchrun --nproc-per-node 4 tools/convert.py hf-to-megatron models/large models/large-cut tp=8 pp=4 ep=8

key=value: tp, pp, vpp, ep, etp (hf-to-megatron); shard_gb, the size of a file at most (default 5); model, the Hugging Face folder that a
checkpoint's run started from (default: what the run's config.yaml says). Exit codes: 0, 1 a difference or a failed write, 2 a wrong
argument, 3 a file that is missing, damaged or of another model. torchrun turns every failure into 1; inspect and verify work on one rank.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that a clone works without installation

from tqdm import tqdm

from megaflow.types import ConfigError, PreflightError, UserError

if TYPE_CHECKING:
    from megaflow.convert.sources import Source

PATHS = {"hf-to-megatron": 2, "megatron-to-hf": 2, "inspect": 1, "verify": 2}
AXES = ("tp", "pp", "vpp", "ep", "etp")
ALONE = ("inspect", "verify")  # one process does it, whatever number was started
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
    if not 0 < value < math.inf:  # nor NaN
        raise ConfigError(f"{key}={given[key]} must be more than 0 and finite")
    return value


def transform(action: str, paths: list[Path], given: dict[str, str]) -> None:
    from megaflow.convert.jobs import to_hugging_face, to_megatron
    from megaflow.convert.layout import Axes
    from megaflow.convert.run import Ranks, check_free, convert

    axes = Axes(**{axis: number(given, axis, 1, int) for axis in AXES})
    shard_bytes = int(number(given, "shard_gb", 5, float) * 1e9)
    check_free(paths[1])
    source = opened(paths[0], given)
    target = to_megatron(source, axes, shard_bytes) if action == "hf-to-megatron" else to_hugging_face(source, shard_bytes)
    ranks = Ranks(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    say = print if ranks.rank == 0 else lambda _: None
    for line in left_out(source):
        say(line)
    mine = sum(job.nbytes for job in target.jobs[ranks.rank :: ranks.world])
    with bar(mine, ranks.rank) as progress:
        kept = convert(source, target, paths[1], ranks, progress.update)
    say(f"{paths[1]}: {sum(len(job.files) for job in target.jobs)} files of weights, {sum(job.nbytes for job in target.jobs):,} bytes")
    if kept:
        say(f"{kept} of them were finished by an interrupted run and have the checksums that it noted")


def left_out(*sources: Source) -> Iterator[str]:
    for source in sources:
        if names := source.left_out():
            yield f"{len(names)} tensors of {source.path} are no part of the model and are left out, e.g. {names[0]}"


def opened(path: Path, given: dict[str, str], needs_model: bool = True) -> Source:
    from megaflow.convert.sources import open_source

    return open_source(path, Path(given["model"]) if "model" in given else None, needs_model)


def bar(nbytes: int, rank: int = 0) -> tqdm:
    return tqdm(total=nbytes, unit="B", unit_scale=True, disable=rank > 0, file=sys.stderr)


def inspect(paths: list[Path], given: dict[str, str], is_checked: bool) -> None:
    from megaflow.convert.compare import describe

    for line in describe(opened(paths[0], given, needs_model=False), is_checked):
        print(line)


def verify(paths: list[Path], given: dict[str, str], prompts: list[str]) -> None:
    from megaflow.convert.compare import compare, size_of

    a, b = (opened(path, given) for path in paths)
    with bar(size_of(a)) as progress:
        found = compare(a, b, progress.update)
    for line in left_out(a, b):
        print(line)
    wrong = []
    if found.settings:
        wrong += ["config.json of the two differs, so they are not the same model:", *found.settings]
    if found.different:
        more = len(found.different) - SHOWN
        wrong += [f"{len(found.different)} of {found.num_tensors} tensors differ:", *found.different[:SHOWN]]
        wrong += [f"and {more} more"] if more > 0 else []
    else:
        print(f"{found.num_tensors} tensors, {found.nbytes:,} bytes: equal bit for bit")
        wrong += disagreements(a, b, prompts) if prompts else []
    if wrong:
        raise UserError("\n".join(wrong))


def disagreements(a: Source, b: Source, prompts: list[str]) -> list[str]:
    """Sentences on the prompts whose logits differ by more than rounding; prints one on each of the others."""
    from megaflow.convert.logits import compare_logits

    wrong = []
    for found in compare_logits(a, b, prompts):
        who = " and ".join(f"{source.path} in {program}" for source, program in zip((a, b), found.programs, strict=True))
        say = f"logits over {found.num_tokens} tokens of {found.prompt!r}, {who}"
        gap = "equal" if found.gap == 0 else f"differ by {found.gap:.2g} at most (largest logit: {found.largest:.3g})"
        if found.good:
            print(f"{say}: {gap}; next token: {found.words[0]!r}")
        else:
            wrong.append(f"{say}: {gap}, more than rounding explains; next tokens: {found.words[0]!r} and {found.words[1]!r}")
    return wrong


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=list(PATHS))
    parser.add_argument("words", nargs="+", metavar="PATH | key=value")
    more = "verify: also compare what the models compute for it; may be given several times"
    parser.add_argument("--logits", action="append", default=[], metavar="PROMPT", help=more)
    parser.add_argument("--checksums", action="store_true", help="inspect: read every file that has a checksum, and check it")
    args = parser.parse_args(argv)
    try:
        if args.logits and args.action != "verify":
            raise ConfigError(f"--logits is for verify, not for {args.action}")
        if args.checksums and args.action != "inspect":
            raise ConfigError(f"--checksums is for inspect, not for {args.action}: it verifies checksums before it uses a file")
        paths, given = parse(args.action, args.words)
        if args.action in ALONE and not is_alone():
            return 0
        if args.action == "inspect":
            inspect(paths, given, args.checksums)
        elif args.action == "verify":
            verify(paths, given, args.logits)
        else:
            transform(args.action, paths, given)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        raise
    except OSError as error:  # reading: what a failed write means is said where it is done
        print(f"{error.filename or error.__class__.__name__}: {error.strerror or error}", file=sys.stderr)
        return PreflightError.exit_code
    return 0


def is_alone() -> bool:
    """Whether this process does the work of an action that is not shared out: of several ranks the first, as if it were the only one."""
    if os.environ.get("RANK", "0") != "0":
        return False
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)  # --logits starts a rank of Megatron's, which would wait for the others
    return True


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # piped into head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)
