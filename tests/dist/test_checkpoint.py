"""A run that goes on from a checkpoint is the undisturbed one, bit for bit; and no way to end it leaves it without one."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megaflow.checkpoint import manifest
from megaflow.checkpoint.directory import find
from tests.ranks import PROGRAMS, ROOT, clean_env, run_ranks
from tools.make_tiny_model import make

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    make(path, hidden=32)  # tied embeddings: under PP the last stage has a copy
    return str(path)


def train(ranks: int, tp: int, pp: int, *jobs: dict, **axes: int) -> list[dict]:
    return run_ranks("checkpoint_train", ranks, str(tp), str(pp), json.dumps(jobs), json.dumps(axes), timeout=280)


def stages(*each: tuple[int, dict, list[dict]]) -> list[list[dict]]:
    """For each (ranks, axes, jobs) what its ranks report; one after another."""
    wanted = [{"ranks": ranks, "axes": axes, "jobs": jobs} for ranks, axes, jobs in each]
    return run_ranks("checkpoint_stages", 1, json.dumps(wanted), timeout=280)[0]["stages"]


def assert_goes_on(straight: dict, saved: dict, resumed: dict) -> None:
    assert resumed["lrs"] == straight["lrs"][2:]
    assert resumed["next_lr"] == straight["next_lr"]
    assert resumed["norms"] == straight["norms"][2:]
    assert resumed["state"] == straight["state"]
    assert saved["state"] != straight["state"]
    assert all(resumed["state"][name] == "4.0" for name in resumed["state"] if name.endswith(".step"))
    assert resumed["draws"] == saved["draws"]  # although the two processes were seeded differently
    assert (resumed["extra"], saved["skipped"]) == ({"cursor": 2, "text": "é"}, 1)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (1, 1)], ids=["tp2", "pp2", "dp2"])
def test_resumed_equals_undisturbed(model: str, tmp_path: Path, tp: int, pp: int) -> None:
    """fp32, the distributed optimizer, two ranks: parameters, Adam's state, learning rates and gradient norms after 4 steps.

    The checkpoint is written after a further step has changed all that it holds (`async`).
    """
    first = train(2, tp, pp, {"model": model, "steps": 4}, {"model": model, "save": str(tmp_path), "async": True})
    second = train(2, tp, pp, {"model": model, "load": str(tmp_path / "step_000002"), "first_step": 2, "seed": 7})
    for before, after in zip(first, second, strict=True):
        assert_goes_on(*before["jobs"], after["jobs"][0])
        assert not after["log"]
        assert before["jobs"][1]["early"] == before["jobs"][1]["then"] == [] and before["jobs"][1]["left"] == ["step_000002"]
        print("seconds:", {"save": before["jobs"][1]["save_s"], "load": after["jobs"][0]["load_s"]})


def test_resumed_equals_undisturbed_in_16_bits_and_without_the_distributed_optimizer(model: str, tmp_path: Path) -> None:
    """In bf16 the fp32 main parameters hold more than the parameters: rounding them anew would show."""
    kinds = [
        {"model": model, "dtype": "bfloat16"},
        {"model": model, "dtype": "bfloat16", "distributed": False},
        {"model": model, "distributed": False},
    ]
    saves = [{**kind, "save": str(tmp_path / str(i)), "async": True} for i, kind in enumerate(kinds)]
    jobs = [job for kind, save in zip(kinds, saves, strict=True) for job in ({**kind, "steps": 4}, save)]
    first = train(1, 1, 1, *jobs)[0]["jobs"]
    loads = [{**kind, "load": str(tmp_path / str(i) / "step_000002"), "first_step": 2, "seed": 7} for i, kind in enumerate(kinds)]
    second = train(1, 1, 1, *loads)[0]["jobs"]
    for i, resumed in enumerate(second):
        assert_goes_on(first[2 * i], first[2 * i + 1], resumed)
    assert any("bfloat16" in text for text in second[0]["state"].values())
    assert any(name.endswith(".param") and "float32" in text for name, text in second[0]["state"].items())


def test_a_resumed_run_may_change_its_learning_rate_and_length(model: str, tmp_path: Path) -> None:
    """The schedule goes on at its step with the present settings: warm-up over 2 steps to 2e-3, cosine down to 1e-5 at step 20."""
    kinds = [{"model": model, "distributed": distributed} for distributed in (True, False)]
    train(1, 1, 1, *({**kind, "save": str(tmp_path / str(i))} for i, kind in enumerate(kinds)))
    loads = [{**kind, "load": str(tmp_path / str(i) / "step_000002"), "lr": 2e-3, "total": 20} for i, kind in enumerate(kinds)]
    for resumed in train(1, 1, 1, *loads)[0]["jobs"]:
        third = 1e-5 + 0.5 * (1 + math.cos(math.pi * 1 / 18)) * (2e-3 - 1e-5)
        fourth = 1e-5 + 0.5 * (1 + math.cos(math.pi * 2 / 18)) * (2e-3 - 1e-5)
        assert [*resumed["lrs"], resumed["next_lr"]] == pytest.approx([2e-3, third, fourth], rel=1e-12)


def test_experts_go_on_where_they_were_and_elsewhere(tmp_path: Path) -> None:
    """EP=2 bitwise on two ranks; then on one rank, where Megatron has one optimizer for experts and the rest instead of two, and where
    the experts are computed in one product, for which their parameters are in another order."""
    path = tmp_path / "model"
    make(path, family="qwen3_moe", hidden=32, tied=False)
    job, places = {"model": str(path)}, [tmp_path / name for name in ("ep2", "ep1", "tp2")]
    ep2, ep1, tp2 = ({**job, "load": str(place / "step_000002"), "first_step": 2, "seed": 7} for place in places)
    keep = {"steps": 0, "save": str(places[1])}
    first, one, by_tensors, again = stages(
        (2, {"ep": 2}, [{**job, "steps": 4}, {**job, "save": str(places[0]), "async": True}, ep2]),
        (1, {}, [{**ep2, **keep}, {**ep2, "experts": "grouped"}]),
        (2, {"tp": 2, "sp": True}, [{**ep2, "steps": 0, "save": str(places[2])}, ep2]),
        (2, {"ep": 2}, [ep1, tp2]),
    )
    for rank in first:
        assert_goes_on(*rank["jobs"])
    straight = first[0]["jobs"][0]
    for name, alike in {"EP1": one[0]["jobs"][1], "TP2": by_tensors[0]["jobs"][1]}.items():
        print(name, deviations(straight, alike))
        assert alike["norms"] == pytest.approx(straight["norms"][2:], rel=1e-4)
        assert alike["losses"] == pytest.approx(straight["losses"][2:], abs=1e-5)
        assert all(text == "4.0" for text_of, text in alike["state"].items() if text_of.endswith(".step"))
    for rank, before in zip(again, first, strict=True):  # by way of EP=1 or TP=2 nothing has changed but random states
        for back in rank["jobs"]:
            assert back["norms"] == straight["norms"][2:] and back["state"] == before["jobs"][0]["state"]


def deviations(straight: dict, other: dict) -> dict[str, float]:
    return {name: max(abs(a - b) for a, b in zip(straight[name][2:], other[name], strict=True)) for name in ("norms", "losses")}


EMBEDDING = "embedding.word_embeddings.weight"


def test_megatron_still_needs_its_mends(model: str, tmp_path: Path) -> None:
    """Without them: optimizer state behind a padded bucket is saved shifted, and after loading all parameters count one common step."""
    save = {"model": model, "save": str(tmp_path / "good")}
    train(2, 1, 2, save, {**save, "save": str(tmp_path / "shifted"), "unmended": "gathered_to"})
    good, shifted = (tensors_of(tmp_path / name / "step_000002") for name in ("good", "shifted"))
    assert torch.equal(good[f"optimizer.state.param.{EMBEDDING}"], good[EMBEDDING])
    assert not torch.equal(shifted[f"optimizer.state.param.{EMBEDDING}"], shifted[EMBEDDING])
    load = {"model": model, "load": str(tmp_path / "good" / "step_000002"), "steps": 1, "unmended": "separate_steps"}
    state = train(1, 1, 1, load)[0]["jobs"][0]["state"]
    assert {float(text) for name, text in state.items() if name.endswith(".step")} != {3.0}


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, as PyTorch's own reader sees it."""
    reader = dcp.FileSystemReader(path)
    entries = reader.read_metadata().state_dict_metadata
    wanted = {k: torch.empty(e.size, dtype=e.properties.dtype) for k, e in entries.items() if hasattr(e, "properties")}
    dcp.load(wanted, storage_reader=reader, no_dist=True)
    return wanted


def test_another_layout_reads_the_same_values(model: str, tmp_path: Path) -> None:
    """TP=2 -> PP=2 -> DP=2 -> one rank: each loads and saves again; then PP=2 and the last train on as the first would have."""
    chain = {"model": model, "first_step": 2, "steps": 0}
    load = [{**chain, "load": str(tmp_path / name / "step_000002")} for name in ("tp2", "pp2", "dp2")]
    first, pp2, _, one = stages(
        (2, {"tp": 2}, [{"model": model, "steps": 4}, {"model": model, "save": str(tmp_path / "tp2")}]),
        (2, {"pp": 2}, [{**load[0], "save": str(tmp_path / "pp2")}, {**load[0], "steps": 2}]),
        (2, {}, [{**load[1], "save": str(tmp_path / "dp2")}]),
        (1, {}, [{**load[2], "save": str(tmp_path / "one")}, {**load[2], "steps": 2}]),
    )
    straight, alone, staged = first[0]["jobs"][0], one[0]["jobs"][1], pp2[0]["jobs"][1]
    assert any("random states are seeded from the step" in text for text in pp2[0]["log"])
    expected = tensors_of(tmp_path / "tp2/step_000002")
    assert sum("exp_avg_sq" in name for name in expected) == sum(not name.startswith("optimizer") for name in expected) > 5
    for other in ("pp2", "dp2", "one"):
        found = tensors_of(tmp_path / other / "step_000002")
        assert found.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    for other in (alone, staged):
        assert other["lrs"] == straight["lrs"][2:]
        assert other["norms"] == pytest.approx(straight["norms"][2:], rel=1e-5)  # sums in another order
        assert other["losses"] == pytest.approx(straight["losses"][2:], abs=1e-5)


def test_a_full_disk_is_an_error_on_every_rank_and_costs_nothing(model: str, tmp_path: Path) -> None:
    """The last rank's files may not pass 20 kB; a later save, with room, succeeds. So in the background, where the directory may go too."""
    job = {"model": model, "steps": 1, "save": str(tmp_path)}
    late = {**job, "async": True}
    at_once = (job, {**job, "steps": 2, "limit_bytes": 20_000}, {**job, "steps": 2, "free_bytes": 500_000})
    at_once += ({**job, "steps": 2, "away": True}, {**job, "steps": 3})
    meanwhile = ({**late, "steps": 4, "limit_bytes": 20_000}, {**late, "steps": 5, "vanish": True}, {**late, "steps": 6})
    ranks = train(2, 2, 1, *at_once, *meanwhile)
    expected = sum(t.nbytes for t in tensors_of(tmp_path / "step_000003").values())
    for rank in ranks:
        good, full, foreseen, away, later, late_full, vanished, last = (j["error"] for j in rank["jobs"])
        assert last is None and [j["left"] for j in rank["jobs"][5:7]] == [["step_000001", "step_000003"]] * 2
        assert "step_000004.part: writing the checkpoint failed after" in late_full and "earlier checkpoints are untouched" in late_full
        assert "step_000005.part: writing the checkpoint failed after 0 of" in vanished and "No such file or directory" in vanished
        assert f"step_000002.part: a checkpoint needs 0.00 GB ({expected:,} bytes), 0.00 GB (500,000 bytes) are free" in foreseen
        assert "step_000002.part: writing the checkpoint failed after 0" in away and "No such file or directory" in away
        assert good is None and later is None
        assert f"{tmp_path}/step_000002.part: writing the checkpoint failed after" in full
        assert "File too large" in full or "a write came up short" in full
        assert "earlier checkpoints are untouched" in full
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000003", "step_000006"]
    assert all(not manifest.damaged(p, manifest.read(p)) for p in tmp_path.iterdir())


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def assert_any_harm_is_found(good: Path, copy: Path) -> None:
    """Every file, missing, cut short by one byte, or with one bit of any byte flipped: named, and no other."""
    kinds = {"__0_0.distcp", ".metadata", "metadata.json", "meta.json", "rng_0.pt"}
    content = manifest.read(good)
    assert content.files.keys() == kinds
    shutil.copytree(good, copy)
    assert manifest.damaged(copy, content) == manifest.missing(copy, content) == []
    rng = random.Random(1)
    for name in sorted(kinds):
        data = (good / name).read_bytes()
        place = rng.randrange(len(data))
        for harmed in (None, data[:-1], data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]):
            (copy / name).unlink() if harmed is None else (copy / name).write_bytes(harmed)
            (text,) = manifest.damaged(copy, content)
            assert text.startswith(f"{copy / name} ")
            is_cheap = harmed is None or len(harmed) < len(data)
            assert [t.split()[0] for t in manifest.missing(copy, content)] == ([str(copy / name)] if is_cheap else [])
        (copy / name).write_bytes(data)


def test_what_cannot_be_loaded_is_refused_with_the_way_out(model: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make(other, hidden=64, layers=1, vocab=500, tied=False, family="llama")
    runs = tmp_path / "checkpoints"
    train(1, 1, 1, *({"model": model, "steps": n, "save": str(runs)} for n in (1, 2)))
    good, last = runs / "step_000001", runs / "step_000002"
    cases = {name: shutil.copytree(last, tmp_path / name / "step_000002") for name in ("cut", "absent", "manifest", "foreign", "future")}
    shutil.copytree(good, cases["cut"].parent / "step_000001")
    assert_any_harm_is_found(last, tmp_path / "harmed" / "step_000002")
    flip(last / "__0_0.distcp", 5000)
    (cases["cut"] / "rng_0.pt").write_bytes(b"")
    (cases["absent"] / ".metadata").unlink()
    flip(cases["manifest"] / "manifest.json", 100)
    (cases["foreign"] / "manifest.json").unlink()
    manifest.write(cases["future"], manifest.Manifest(**{**vars(manifest.read(cases["future"])), "format": 9}))
    before = {"flipped": last, **cases, "nowhere": tmp_path / "nowhere"}
    jobs = [{"model": model, "load": str(path), "steps": 0} for path in before.values()]
    jobs.append({"model": str(other), "load": str(good), "steps": 0})
    found = train(1, 1, 1, *jobs)[0]["jobs"]
    assert {j["type"] for j in found} == {"PreflightError"}
    said = dict(zip([*before, "other model"], (j["error"] for j in found), strict=True))
    assert f"{last}/__0_0.distcp is damaged" in said["flipped"] and f"rm -r {last}" in said["flipped"]
    assert f"run.resume={good}" in said["flipped"]
    assert "rng_0.pt is damaged" in said["cut"] and f"run.resume={cases['cut'].parent}/step_000001" in said["cut"]
    assert ".metadata cannot be read: No such file" in said["absent"] and "no earlier whole checkpoint" in said["absent"]
    assert "manifest.json" in said["manifest"]
    assert "megaflow did not write" in said["foreign"]
    assert "format 9" in said["future"]
    assert "no such checkpoint" in said["nowhere"]
    for text in ("num_layers: 2 in the checkpoint, 1 here", "hidden_size: 32", "vocab_size: 320", "tied_embeddings"):
        assert text in said["other model"]


def test_at_every_moment_of_a_save_there_is_a_whole_checkpoint(model: str, tmp_path: Path) -> None:
    """Looked at before every operation on files, for a second, a repeated and a third save, each with the deletion of the one before."""
    found = run_ranks("checkpoint_moments", 1, model, str(tmp_path / "c"), timeout=280)[0]
    moments = found["moments"]
    assert [m for m in moments if m[2]] == []
    steps = [m[1] for m in moments]
    assert steps == sorted(steps) and set(steps) == {1, 2, 3}
    kinds = {m[0] for m in moments}
    assert {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"} <= kinds, kinds
    assert found["left"] == ["step_000003"]


def test_kill_9_while_saving_leaves_the_last_good_one(model: str, tmp_path: Path) -> None:
    """Killed at random moments of a loop that does nothing but save; each life goes on from what the one before left."""
    rng = random.Random(os.urandom(8))
    reached = 0
    for _ in range(3):
        command = [sys.executable, str(PROGRAMS / "checkpoint_loop.py"), model, str(tmp_path)]
        process = subprocess.Popen(command, cwd=ROOT, env=clean_env(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert int(process.stdout.readline()) == reached, "it did not go on from the checkpoint that was found"
            while int(process.stdout.readline()) < reached + 2:
                pass
            time.sleep(rng.random() * 0.5)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        step, path = find(tmp_path)
        assert step >= reached + 2
        assert manifest.damaged(path, manifest.read(path)) == []
        reached = step


def test_killed_ten_times_while_saving_in_the_background_it_ends_as_the_undisturbed_run(model: str, tmp_path: Path) -> None:
    """Two ranks, one of which dies at a drawn moment of the writing; the other is killed with it. Bitwise, random states included."""
    found = run_ranks("checkpoint_killed", 1, model, str(tmp_path), "10", timeout=280)[0]
    deaths = found["deaths"]
    assert [death["code"] for death in deaths] == [-signal.SIGKILL] * 10
    left = [death["left"] for death in deaths]
    assert left == sorted(left) and len(set(left)) > 2, f"what was saved stays, and the run gets on: {left}"
    assert [death["damaged"] for death in deaths] == [[]] * 10
    assert sum(death["how"].startswith("tensor in checkpoint") for death in deaths) >= 5, deaths
    assert found["killed"] == found["straight"]
