"""Which checkpoint is the newest whole one, and what is deleted."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from megaflow.checkpoint import directory, manifest
from megaflow.checkpoint.directory import find, name_of


def make(path: Path, step: int) -> Path:
    """A whole checkpoint of two files."""
    path.mkdir(parents=True)
    (path / "a.bin").write_bytes(b"a" * 1000)
    (path / "b.bin").write_bytes(step.to_bytes(10))
    files = {name: manifest.measure(path / name) for name in ("a.bin", "b.bin")}
    manifest.write(path, manifest.Manifest(manifest.FORMAT, step, {"world": 1}, {}, {}, files))
    return path


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    return make(tmp_path / name_of(9), 9), make(tmp_path / name_of(10), 10)


def test_finds_the_newest_by_number_not_by_name(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    assert find(tmp_path / "absent") is None
    make(tmp_path / "step_999999", 999_999)
    newest = make(tmp_path / "step_1000000", 1_000_000)
    assert find(tmp_path) == (1_000_000, newest)


def test_a_path_may_be_the_checkpoint_itself_under_any_name(tmp_path: Path) -> None:
    mine = make(tmp_path / "best-of-april", 7)
    assert find(mine) == (7, mine)
    (mine / "b.bin").unlink()
    assert find(mine) is None


HARMS = ["missing file", "short file", "no manifest", "cut manifest", "changed manifest", "empty manifest", "a list"]


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_not_whole_is_passed_over(tmp_path: Path, two: tuple[Path, Path], harm: str) -> None:
    earlier, newest = two
    text = (newest / "manifest.json").read_text()
    match harm:
        case "missing file":
            (newest / "a.bin").unlink()
        case "short file":
            (newest / "a.bin").write_bytes(b"a" * 999)
        case "no manifest":
            (newest / "manifest.json").unlink()
        case "cut manifest":
            (newest / "manifest.json").write_text(text[: len(text) // 2])
        case "changed manifest":
            (newest / "manifest.json").write_text(text.replace('"step": 10', '"step": 11'))
        case "empty manifest":
            (newest / "manifest.json").write_text("")
        case "a list":
            (newest / "manifest.json").write_text("[1]")
    assert find(tmp_path) == (9, earlier)


def test_half_written_and_half_deleted_ones_do_not_count(tmp_path: Path) -> None:
    make(tmp_path / "step_000003.part", 3)
    make(tmp_path / "step_x", 4)
    (tmp_path / "step_000005").write_text("a file")
    assert find(tmp_path) is None
    last = make(tmp_path / "step_000002.trash", 2)  # killed after moving it away for its successor of the same step
    assert find(tmp_path) == (2, last)
    (last / "b.bin").unlink()
    assert find(tmp_path) is None


def test_checksums_are_zlib_crc32_and_name_the_damaged_file(tmp_path: Path, two: tuple[Path, Path]) -> None:
    _, newest = two
    written = json.loads((newest / "manifest.json").read_text())["files"]["a.bin"]
    assert written == {"bytes": 1000, "crc32": f"{zlib.crc32(b'a' * 1000):08x}"}
    content = manifest.read(newest)
    assert manifest.damaged(newest, content) == []
    (newest / "a.bin").write_bytes(b"a" * 999 + b"b")
    assert find(tmp_path) == (10, newest)  # cheap: sizes only
    (text,) = manifest.damaged(newest, content)
    assert str(newest / "a.bin") in text


def test_the_way_back_passes_over_damaged_ones(tmp_path: Path, two: tuple[Path, Path]) -> None:
    earlier, newest = two
    oldest = make(tmp_path / name_of(3), 3)
    assert directory.previous(newest) == earlier
    (earlier / "a.bin").write_bytes(b"b" * 1000)
    assert directory.previous(newest) == oldest
    assert directory.previous(oldest) is None


def test_rotation_keeps_the_newest_and_spares_later_ones(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8, 30):
        make(tmp_path / name_of(step), step)
    make(tmp_path / "step_000001.trash", 1)
    directory.rotate(tmp_path, 8, directory.Retention(keep_last=2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000006", "step_000008", "step_000030"]


def test_beginning_sweeps_what_kills_left(tmp_path: Path, two: tuple[Path, Path]) -> None:
    make(tmp_path / "step_000011.part", 11)
    directory.begin(tmp_path / "step_000012.part")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000009", "step_000010", "step_000012.part"]
    assert list((tmp_path / "step_000012.part").iterdir()) == []


def test_publishing_replaces_an_earlier_one_of_the_same_step(tmp_path: Path, two: tuple[Path, Path]) -> None:
    part = make(tmp_path / "step_000010.part", 10)
    (part / "new").touch()
    assert directory.publish(part, 10) == tmp_path / "step_000010"
    assert (tmp_path / "step_000010" / "new").exists()
    assert find(tmp_path) == (10, tmp_path / "step_000010")


def test_a_manifest_of_a_later_format_says_so(tmp_path: Path, two: tuple[Path, Path]) -> None:
    _, newest = two
    manifest.write(newest, manifest.Manifest(**{**vars(manifest.read(newest)), "format": 2}))
    with pytest.raises(manifest.BadManifest, match="format 2; this version of megaflow reads format 1"):
        manifest.read(newest)


def scored(directory_: Path, scores: dict[int, float | None]) -> None:
    for step, value in scores.items():
        path = make(directory_ / name_of(step), step)
        content = vars(manifest.read(path)) | {"scores": {} if value is None else {"eval/sums/accuracy": value}}
        manifest.write(path, manifest.Manifest(**content))


def kept(path: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step_")) for p in path.iterdir())


@pytest.mark.parametrize(
    ("mode", "keep_best", "left", "best"),
    [
        ("max", 1, [2, 6], 2),  # 2 and 4 are equal: the earlier
        ("max", 2, [2, 4, 6], 2),
        ("min", 1, [1, 6], 1),
        ("max", 9, [1, 2, 4, 6], 2),  # 3 has no score and 5 none that counts
        ("max", 0, [6], None),
    ],
)
def test_the_best_stay_besides_the_last(tmp_path: Path, mode: str, keep_best: int, left: list[int], best: int | None) -> None:
    scored(tmp_path, {1: 0.25, 2: 0.75, 3: None, 4: 0.75, 5: float("nan"), 6: 0.5})
    found = directory.rotate(tmp_path, 6, directory.Retention(1, keep_best, "eval/sums/accuracy", mode))
    assert kept(tmp_path) == left
    assert (found and (found.step, found.path)) == (best and (best, tmp_path / name_of(best)))
    assert find(tmp_path) == (6, tmp_path / name_of(6)), "a run goes on from the newest"


def test_the_best_of_many_saves_is_never_deleted(tmp_path: Path) -> None:
    """Rotated after each, as a run does it: a better one takes the place of the one before."""
    seen = []
    for step, value in enumerate([0.1, 0.9, 0.2, 0.3, 0.95, 0.4], start=1):
        scored(tmp_path, {step: value})
        best = directory.rotate(tmp_path, step, directory.Retention(1, 1, "eval/sums/accuracy", "max"))
        seen.append((best.step, kept(tmp_path)))
    assert seen == [(1, [1]), (2, [2]), (2, [2, 3]), (2, [2, 4]), (5, [5]), (5, [5, 6])]


def test_a_manifest_with_what_this_version_does_not_know_says_who_wrote_it(tmp_path: Path, two: tuple[Path, Path]) -> None:
    _, newest = two
    content = json.loads((newest / "manifest.json").read_text()) | {"colour": "red", "versions": {"megaflow": "9.1"}}
    content.pop("crc32")
    (newest / "manifest.json").write_text(json.dumps({"crc32": manifest._digest(content), **content}))
    with pytest.raises(manifest.BadManifest, match=r"another version of megaflow \(9.1\): it has colour"):
        manifest.read(newest)
    content.pop("colour"), content.pop("scores")  # written before there were scores
    (newest / "manifest.json").write_text(json.dumps({"crc32": manifest._digest(content), **content}))
    assert manifest.read(newest).scores == {}
