"""Models between Hugging Face folders and files cut for a Megatron layout: the bits, the memory, and what an interruption leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaflow.checkpoint.manifest import measure
from megaflow.convert.exporting import Live, export
from megaflow.convert.jobs import to_hugging_face, to_megatron
from megaflow.convert.layout import Axes
from megaflow.convert.run import Ranks, convert
from megaflow.convert.sharded import Sharded
from megaflow.convert.sources import open_source
from megaflow.convert.tensorfile import Spec, TensorFile, Writer
from megaflow.shape import read_shape
from megaflow.trainer.loading import load_converted
from megaflow.types import PreflightError
from megaflow.weights import folder as hf_folder
from megaflow.weights.plan import shard_shape
from megaflow.weights.table import table
from tests import tiny
from tests.ranks import ROOT, clean_env
from tools import convert as tool

DENSE = (("qwen2", True), ("qwen3", False), ("llama", False), ("mistral", True))
LAYOUTS = (("tp=2",), ("tp=2", "pp=2", "vpp=2", "ep=2"), ("pp=4", "ep=2", "etp=2"))  # without ep and etp where there are no experts


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Callable[..., Path]:
    base = tmp_path_factory.mktemp("models")
    return lambda family="qwen2", tied=True: Path(tiny.model_folder(base / f"{family}-{tied}", family, tied))


def call(*words: object) -> None:
    assert tool.main([str(word) for word in words]) == 0


def weights(path: Path) -> dict[str, torch.Tensor]:
    """As the safetensors library reads them."""
    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(t.dtype == b[name].dtype and torch.equal(t, b[name]) for name, t in a.items())


@pytest.mark.parametrize(("family", "tied"), DENSE + tiny.MIXTURES)
def test_there_and_back_is_bitwise(folder, tmp_path: Path, family: str, tied: bool) -> None:
    """Through every layout that the family has; read back by the safetensors library, configuration and tokenizer byte for byte."""
    source = folder(family, tied)
    for i, layout in enumerate(LAYOUTS):
        axes = [axis for axis in layout if (family, tied) in tiny.MIXTURES or not axis.startswith("e")]
        there, back = tmp_path / f"there{i}", tmp_path / f"back{i}"
        call("hf-to-megatron", source, there, *axes, "shard_gb=0.0004")
        call("megatron-to-hf", there, back, "shard_gb=0.0005")
        assert_same(weights(back), weights(source))
        for file in source.iterdir():
            if file.suffix != ".safetensors":
                assert (back / file.name).read_bytes() == file.read_bytes()
        index = json.loads((back / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights(source).values())
        assert index["weight_map"] == {name: file.name for file in back.glob("*.safetensors") for name in load_file(file)}
        assert {p.name for p in back.iterdir()} == {p.name for p in source.iterdir()} - {"model.safetensors"} | {
            "model.safetensors.index.json", *index["weight_map"].values()
        }  # fmt: skip
        call("verify", source, there)


def test_a_ranks_files_are_its_slices_cut_by_hand(folder, tmp_path: Path) -> None:
    source = folder("qwen2", True)
    hf = weights(source)
    call("hf-to-megatron", source, tmp_path / "cut", "tp=2", "pp=2")
    last = {name: t for file in (tmp_path / "cut").glob("pp1_tp1-*.safetensors") for name, t in load_file(file).items()}
    theirs, ours = "model.layers.3.", "decoder.layers.3."
    gate, up = hf[theirs + "mlp.gate_proj.weight"], hf[theirs + "mlp.up_proj.weight"]
    q, k, v = (hf[f"{theirs}self_attn.{x}_proj.weight"] for x in "qkv")  # 4 heads and 2 key-value heads of 32
    assert torch.equal(last[ours + "mlp.linear_fc1.weight"], torch.cat([gate.chunk(2)[1], up.chunk(2)[1]]))
    assert torch.equal(last[ours + "mlp.linear_fc2.weight"], hf[theirs + "mlp.down_proj.weight"].chunk(2, 1)[1])
    assert torch.equal(last[ours + "self_attention.linear_qkv.weight"], torch.cat([q[64:], k[32:], v[32:]]))
    assert torch.equal(last[ours + "input_layernorm.weight"], hf[theirs + "input_layernorm.weight"])
    padded = torch.zeros(320, 128)
    padded[: len(hf["model.embed_tokens.weight"])] = hf["model.embed_tokens.weight"]
    assert torch.equal(last["output_layer.weight"], padded[160:])  # the last stage's copy of a tied embedding
    assert {int(name.split(".")[2]) for name in last if name.startswith("decoder.layers.")} == {2, 3}
    assert "embedding.word_embeddings.weight" not in last


@pytest.mark.parametrize(
    ("family", "tied", "axes"), [("qwen2", True, ["tp=2", "pp=2"]), ("qwen3_moe", False, ["tp=2", "pp=2", "vpp=2", "ep=2", "etp=2"])]
)
def test_a_rank_loads_the_same_bits_from_a_converted_folder(folder, tmp_path: Path, family: str, tied: bool, axes: list[str]) -> None:
    """As from the Hugging Face folder, on each tensor rank of the layout that it is cut for and of others."""
    source = folder(family, tied)
    call("hf-to-megatron", source, tmp_path / "cut", *axes, "shard_gb=0.0004")
    shape, cut = read_shape(source), Sharded(tmp_path / "cut")
    cut.check_complete()
    for tp, etp in ((1, 1), (2, 2), (2, 1)):
        sizes = {row.megatron: shard_shape(row, shape, tp if row.expert < 0 else etp) for row in table(shape)}
        sizes["output_layer.weight"] = sizes["embedding.word_embeddings.weight"]  # tied: the copy of a last stage
        for rank in range(tp):
            ours, theirs = ({name: torch.full(size, torch.nan) for name, size in sizes.items()} for _ in range(2))
            load_converted(cut, shape, ours, (tp, rank), (etp, rank % etp))
            hf_folder.load(source, shape, theirs, tp, rank, etp, rank % etp)
            assert_same(ours, theirs)
    with pytest.raises(PreflightError, match="gives a shard of .* asks for"):
        load_converted(cut, shape, {"decoder.final_layernorm.weight": torch.empty(3)}, (1, 0), (1, 0))


def test_a_model_that_megatron_computes_otherwise_is_found(folder, tmp_path: Path) -> None:
    """Equal tensors and another base of the rotary embedding, which turns nothing at the first position: a prompt of one token agrees.
    Neither folder is Hugging Face's, so one is built in transformers. In a process of its own, as it starts a rank; and as the first of
    two of torchrun's. (From a Hugging Face folder: tests/e2e/test_smollm2.py.)"""
    source = folder("qwen3_moe", False)
    call("hf-to-megatron", source, tmp_path / "a", "pp=2", "ep=2")
    call("hf-to-megatron", source, tmp_path / "b", "tp=2")
    config = json.loads((tmp_path / "b/config.json").read_text())
    config["rope_parameters"]["rope_theta"] /= 2
    (tmp_path / "b/config.json").write_text(json.dumps(config))
    command = [sys.executable, str(ROOT / "tools/convert.py"), "verify", *(str(tmp_path / name) for name in "ab")]
    command += ["--logits", "12 + 34 = ", "--logits", "7"]
    ranks = {"RANK": "0", "WORLD_SIZE": "2"}
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, env=clean_env() | ranks)
    assert found.returncode == 1 and "equal bit for bit" in found.stdout, found.stderr[-2000:]
    assert "rope_theta: 10000.0 and 5000.0\n" in found.stderr
    programs = r"\S+/a in transformers and \S+/b in Megatron"
    assert re.search(rf"logits over \d+ tokens of '12 \+ 34 = ', {programs}: differ by .* more than rounding explains", found.stderr)
    assert re.search(rf"logits over 1 tokens of '7', {programs}: (equal|differ by \S+ at most)", found.stdout), found.stdout


@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("qwen3_moe", False)])
def test_a_model_in_memory_is_written_in_shards_that_transformers_loads(folder, tmp_path: Path, family: str, tied: bool) -> None:
    """As a run's export writes it; into one file with the default size, over what an earlier one left."""
    from transformers import AutoModelForCausalLM

    source, target = folder(family, tied), tmp_path / "hf"
    hf, live = weights(source), Live(read_shape(source), torch.float32)
    names = [name for row in table(live.shape) for name in row.hf]
    (tmp_path / "hf.part").mkdir()
    export(((name, hf[name]) for name in names), live, source, target, shard_bytes=700_000)
    files = sorted(file.name for file in target.glob("*.safetensors"))
    assert len(files) > 3 and files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    assert all(file.stat().st_size < 720_000 for file in target.glob("*.safetensors")) and not (tmp_path / "hf.part").exists()
    a, b = (AutoModelForCausalLM.from_pretrained(path, dtype="auto").state_dict() for path in (source, target))
    assert_same(a, b)
    assert_same(weights(target), hf)
    export(((name, hf[name]) for name in names), live, source, target)
    assert [file.name for file in target.glob("model*")] == ["model.safetensors"]
    assert_same(weights(target), hf)


def test_a_changed_value_is_found_and_named(folder, tmp_path: Path, capsys) -> None:
    source = folder("qwen2", True)
    call("megatron-to-hf", source, tmp_path / "changed")
    changed = weights(tmp_path / "changed")
    name = "model.layers.2.mlp.down_proj.weight"
    changed[name][3, 5] += 0.5
    save_file(changed, tmp_path / "changed/model.safetensors")
    assert tool.main(["verify", str(source), str(tmp_path / "changed")]) == 1
    assert f"1 of {len(changed)} tensors differ:\n{name}: 1 of 49,152 values differ, by 0.5 at most" in capsys.readouterr().err


# --- interruption ----------------------------------------------------------------------------------------------------------------


def killed_after(nbytes: int, source: Path, target: Path) -> None:
    """A process that is killed once so many bytes are written."""
    child = os.fork()
    if child == 0:
        done = 0

        def progress(count: int) -> None:
            nonlocal done
            done += count
            if done >= nbytes:
                os.kill(os.getpid(), signal.SIGKILL)

        opened = open_source(source)
        convert(opened, to_megatron(opened, Axes(tp=2, pp=2), 400_000), target, Ranks(), progress)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_killed_and_started_again(folder, tmp_path: Path, capsys) -> None:
    """What was finished stays, unless it was damaged since; the result is that of an undisturbed conversion; other options are refused."""
    source, target, straight = folder("qwen2", True), tmp_path / "target", tmp_path / "straight"
    options = ["tp=2", "pp=2", "shard_gb=0.0004"]
    call("hf-to-megatron", source, straight, *options)
    killed_after(2_000_000, source, target)
    part = tmp_path / "target.partial"
    assert not target.exists()
    finished = [name for note in sorted((part / ".convert").glob("job_*.json")) for name in json.loads(note.read_text())]
    assert 4 <= len(finished) < len(list(straight.glob("*.safetensors")))
    before = {name: (part / name).stat().st_mtime_ns for name in finished}
    with (part / finished[0]).open("r+b") as f:  # same size, one byte changed
        f.seek(-1, os.SEEK_END)
        last = f.read(1)
        f.seek(-1, os.SEEK_END)
        f.write(bytes([last[0] ^ 1]))

    assert tool.main(["hf-to-megatron", str(source), str(target), "tp=1", "pp=2", "shard_gb=0.0004"]) == 2
    assert "target.partial is of an interrupted conversion with another layout" in capsys.readouterr().err
    call("hf-to-megatron", source, target, *options)
    assert f"{len(finished) - 2} of them were finished" in capsys.readouterr().out  # the damaged file's neighbour is written anew, too
    assert all((target / name).stat().st_mtime_ns == before[name] for name in finished[2:])
    assert {p.name: p.read_bytes() for p in target.iterdir()} == {p.name: p.read_bytes() for p in straight.iterdir()}
    assert not part.exists()


def test_several_processes_share_the_files_out(folder, tmp_path: Path, monkeypatch) -> None:
    """As under torchrun: the same folder as by one. The second begins before rank 0 does, beside what killed ones said of themselves."""
    source, both, alone = folder("qwen3", False), tmp_path / "both", tmp_path / "alone"
    notes = tmp_path / "both.partial/.convert"
    notes.mkdir(parents=True)
    (notes / "done_1").write_text("{}")
    options = ["tp=2", "pp=4", "shard_gb=0.0004"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    children = []
    for rank in "10":
        monkeypatch.setenv("RANK", rank)
        children.append(os.fork())
        if children[-1] == 0:
            os._exit(tool.main(["hf-to-megatron", str(source), str(both), *options]))
        time.sleep(0.3)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    monkeypatch.undo()
    call("hf-to-megatron", source, alone, *options)
    assert {p.name: p.read_bytes() for p in both.iterdir()} == {p.name: p.read_bytes() for p in alone.iterdir()}


def test_a_second_process_on_the_same_target_is_refused(folder, tmp_path: Path, capsys) -> None:
    source, target = folder("qwen2", True), tmp_path / "target"
    opened = open_source(source)

    def meanwhile(_: int) -> None:
        if not codes:
            codes.append(tool.main(["megatron-to-hf", str(source), str(target), "shard_gb=1"]))

    codes: list[int] = []
    convert(opened, to_hugging_face(opened, 10**9), target, Ranks(), meanwhile)
    assert codes == [2] and "another process is at work" in capsys.readouterr().err
    assert_same(weights(target), weights(source))


# --- what people get wrong -------------------------------------------------------------------------------------------------------


def test_a_target_that_exists_is_left_alone(folder, tmp_path: Path, capsys) -> None:
    (tmp_path / "there").mkdir()
    assert tool.main(["hf-to-megatron", str(folder()), str(tmp_path / "there")]) == 2
    assert "exists and is not overwritten" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "there"] and not list((tmp_path / "there").iterdir())


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["tp=4"], 2, "tp=4 does not divide num_key_value_heads=2 of"),
        (["tp=4"], 2, "use 1, 2"),
        (["pp=3"], 2, "pp=3 does not divide the 4 layers of"),
        (["pp=2", "vpp=3"], 2, "vpp=3 does not divide the 2 layers of a stage; use 1, 2"),
        (["ep=2"], 2, "has none; use 1"),
        (["tp=two"], 2, "tp=two is not a number"),
        (["tp=0"], 2, "tp=0 must be more than 0"),
        (["cp=2"], 2, "hf-to-megatron has no cp; it takes tp="),
        (["more"], 2, "takes 2 path(s), 3 given"),
    ],
)
def test_a_wrong_argument_says_what_is_right(folder, tmp_path: Path, capsys, words, code, message) -> None:
    assert tool.main(["hf-to-megatron", str(folder()), str(tmp_path / "x"), *words]) == code
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_is_named(folder, tmp_path: Path, capsys) -> None:
    def says(code: int, message: str) -> None:
        assert tool.main(["megatron-to-hf", str(cut), str(tmp_path / "back")]) == code
        assert message in capsys.readouterr().err
        assert not (tmp_path / "back").exists()

    cut = tmp_path / "cut"
    call("hf-to-megatron", folder(), cut, "tp=2")
    file = cut / "pp0_tp1-00001-of-00001.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    says(3, f"{file} is damaged: its checksum differs")
    file.write_bytes(whole[:-100])
    says(3, f"{file} is damaged: {len(whole) - 100:,} bytes, written were {len(whole):,}")
    file.unlink()
    says(3, f"{file} is missing")
    (cut / "megatron.index.json").write_text("{")
    says(3, "megatron.index.json is damaged")
    cut = tmp_path / "hf"
    call("megatron-to-hf", folder(), cut)
    with (cut / "model.safetensors").open("r+b") as f:
        f.truncate(1000)
    says(3, "model.safetensors: not a whole safetensors file")
    cut = tmp_path / "nothing"
    says(3, "nothing: no such folder")
    cut.mkdir()
    says(3, "is no Hugging Face folder (config.json), no converted folder (megatron.index.json) and has no whole checkpoint")


@pytest.mark.parametrize(("name", "stem"), [("decoder.layers.1.input_layernorm.weight", "pp0_tp1"), ("output_layer.weight", "pp1_tp0")])
def test_copies_that_differ_between_ranks_are_refused(folder, tmp_path: Path, capsys, name: str, stem: str) -> None:
    """With checksums that fit: a norm that every tensor rank has, and the last stage's copy of a tied embedding."""
    cut = tmp_path / "cut"
    call("hf-to-megatron", folder("qwen2", True), cut, "tp=2", "pp=2")
    file = cut / f"{stem}-00001-of-00001.safetensors"
    tensors = load_file(file)
    tensors[name].view(-1)[7] += 1
    save_file(tensors, file)
    index = json.loads((cut / "megatron.index.json").read_text())
    index["files"][file.name] = vars(measure(file))
    (cut / "megatron.index.json").write_text(json.dumps(index))
    assert tool.main(["megatron-to-hf", str(cut), str(tmp_path / "back")]) == 3
    original = "embedding.word_embeddings.weight" if name == "output_layer.weight" else name
    assert f"the copies of {original} in the files of different ranks differ" in capsys.readouterr().err


def test_inspect_says_what_there_is(folder, tmp_path: Path, capsys) -> None:
    source = folder("qwen3_moe", False)
    call("hf-to-megatron", source, tmp_path / "cut", "tp=2", "pp=2", "ep=2")
    call("inspect", tmp_path / "cut")
    said = capsys.readouterr().out
    assert re.search(r"F32 +160x128 +embedding.word_embeddings.weight   pp0_tp1-00001-of-00001.safetensors", said)
    assert "layout: tp=2 pp=2 vpp=1 ep=2 etp=1" in said and "family: qwen3_moe, 4 layers" in said
    assert f"parameters: {sum(t.numel() for t in weights(source).values()):,}" in said


# --- files and memory ------------------------------------------------------------------------------------------------------------


def test_files_are_those_of_the_library(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)
    tensors = {f"t{i}": (torch.randn(3, 5 + i, generator=g) * 9).to(dtype) for i, dtype in enumerate(dtypes)}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4)}
    writer = Writer(tmp_path / "ours.safetensors", [Spec(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()])
    for t in tensors.values():
        writer.add(t)
    writer.close()
    assert_same(load_file(tmp_path / "ours.safetensors"), tensors)
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    theirs = TensorFile(tmp_path / "theirs.safetensors")
    assert_same({name: theirs.read(name) for name in theirs.specs}, tensors)


LAYERS, HIDDEN, VOCAB = 16, 256, 512
PEAK = """
import sys
from pathlib import Path
from tools.convert import main

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

model, small, base = sys.argv[1:]
for source, name in ((small, "small"), (model, "large")):  # the small one first: it loads what is loaded once
    cut = f"{base}/{name}-cut"
    for words in (["hf-to-megatron", source, cut, "tp=2", "pp=2"], ["megatron-to-hf", cut, f"{base}/{name}"]):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is in memory now
        before = status("VmRSS")
        assert main([*words, "shard_gb=0.005"]) == 0
        print("peak", status("VmHWM") - before)
"""


def random_model(path: Path, hidden: int) -> Path:
    """A Llama of 16 * hidden^2 parameters a layer (4.2 MB with 256), all in one file, without transformers."""
    path.mkdir()
    sizes = dict(hidden_size=hidden, intermediate_size=4 * hidden, num_attention_heads=4, num_key_value_heads=4, vocab_size=VOCAB)
    config = {"model_type": "llama", "num_hidden_layers": LAYERS, "rms_norm_eps": 1e-6, "max_position_embeddings": 64, **sizes}
    (path / "config.json").write_text(json.dumps(config))
    square, wide = (hidden, hidden), (4 * hidden, hidden)
    layer = {f"self_attn.{x}_proj": square for x in "qkvo"} | {"mlp.gate_proj": wide, "mlp.up_proj": wide, "mlp.down_proj": wide[::-1]}
    layer |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    shapes = {f"model.layers.{i}.{name}.weight": size for i in range(LAYERS) for name, size in layer.items()}
    shapes |= {"model.embed_tokens.weight": (VOCAB, hidden), "lm_head.weight": (VOCAB, hidden), "model.norm.weight": (hidden,)}
    save_file({name: torch.randn(size) for name, size in shapes.items()}, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_memory_stays_under_two_layers_and_a_shard(tmp_path: Path) -> None:
    """68 MB of weights in one file, cut and joined again, after a model of 0.3 MB."""
    model, small = random_model(tmp_path / "model", HIDDEN), random_model(tmp_path / "first", 16)
    command = [sys.executable, "-c", PEAK, str(model), str(small), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=clean_env(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    peaks = [int(peak) for peak in re.findall(r"peak (\d+)", done.stdout)][2:]
    print("bytes above what the process had before:", peaks)
    layer, shard = 4 * (16 * HIDDEN**2 + 2 * HIDDEN), 5_000_000
    assert len(peaks) == 2 and max(peaks) < 2 * layer + shard < LAYERS * layer / 4
    call("verify", model, tmp_path / "large")
