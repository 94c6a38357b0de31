"""What the preflight looks at beside plan/preflight.py: weights that are cut for a Megatron layout, and for --dry-run the bytes of what
a start would read: the converted folder's files, the checkpoint that it would go on from. A start compares those checksums itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from megaflow.plan.preflight import GIB, Inspection
from megaflow.plan.safetensors import is_converted
from megaflow.types import ConfigError, PreflightError

MOST_READ = 20e9  # bytes that a dry run reads to compare checksums: a minute at most from a slow disk

Check = Callable[[Inspection], Iterator[str]]


def converted_weights(found: Inspection, reads_all: bool = False) -> Iterator[str]:
    """All tensors there, in their sizes; with reads_all also the checksums."""
    cfg = found.config
    if cfg.reward.model.path and is_converted(cfg.reward.model.path):
        message = "cut for a Megatron layout by tools/convert.py, which leaves a reward model's head out; give the Hugging Face folder"
        found.fail(f"{cfg.reward.model.path}: {message}", "reward.model.path")
    for key, path in (("model.path", cfg.model.path), ("critic.path", cfg.critic.path)):
        if not path or not is_converted(path):
            continue
        from megaflow.convert.sharded import Sharded  # torch, which a Hugging Face folder's checks do without

        with found.collecting(key):
            source = Sharded(Path(path))
            source.check_complete()
            files = source.identity()
            size = sum(each["bytes"] for each in files.values())
            sums = _compared(size, source.damaged) if reads_all else "checksums are compared at the start"
            yield f"{key}: converted for {source.axes}, {len(files)} file(s), {size / GIB:.3f} GiB, {sums}"


def _compared(size: int, damaged: Callable[[], list[str]]) -> str:
    """Raises PreflightError that names the damaged files."""
    if size > MOST_READ:
        return f"NOT read: checksums of {size / GIB:.0f} GiB; the start compares them"
    if wrong := damaged():
        raise PreflightError("\n".join(wrong))
    return "checksums right"


def resume_point(found: Inspection, purpose: str) -> Iterator[str]:
    """Where the run would begin: as the start decides it, with the checkpoint's manifest, sizes and checksums.

    That it is of this model is seen only when the model has been built.
    """
    from megaflow.checkpoint import directory, manifest
    from megaflow.trainer.rundir import decide

    run = found.config.run
    with found.collecting("run.resume"):
        if purpose in ("train", "offline"):
            checkpoint = decide(found.config, Path(run.root) / run.name, directory.find).checkpoint
        elif run.resume in ("auto", "never"):
            checkpoint = None
        elif (whole := directory.find(Path(run.resume))) is None:
            raise ConfigError(f"run.resume={run.resume}: there is no complete checkpoint there")
        else:
            checkpoint = whole[1]
        if checkpoint is None:
            return
        content = manifest.read(checkpoint)
        size = sum(entry.bytes for entry in content.files.values())
        sums = _compared(size, lambda: manifest.damaged(checkpoint, content))
        yield f"run.resume: {checkpoint}, step {content.step}, {len(content.files)} file(s), {size / GIB:.3f} GiB, {sums}"


def of_a_start() -> list[Check]:
    return [converted_weights]


def of_a_dry_run(purpose: str) -> list[Check]:
    return [lambda found: converted_weights(found, reads_all=True), lambda found: resume_point(found, purpose)]
