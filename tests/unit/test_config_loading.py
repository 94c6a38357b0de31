"""Files, bases and arguments are merged in order, every value knows where it was set, and every mistake names its line."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from megaflow.config.loading import load
from megaflow.config.printing import as_yaml
from megaflow.config.schema import Config, RewardFunctionConfig, SourceConfig
from megaflow.types import ConfigError


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, text: str) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return name


def test_nothing_given_is_the_schema() -> None:
    loaded = load(None, [])
    assert loaded.config == Config()
    assert loaded.where("actor.lr") == "default"


def test_order_is_defaults_base_file_arguments() -> None:
    write("base/b.yaml", "actor:\n  lr: 1e-4\n  eps: 1e-7\n  clip_grad: 2\nrun:\n  name: b\n")
    path = write("x.yaml", "base: base/b.yaml\nactor:\n  lr: 1e-5\n  eps: 1e-6\n")
    loaded = load(path, ["actor.lr=3e-5"])
    assert (loaded.config.actor.lr, loaded.config.actor.eps, loaded.config.actor.clip_grad) == (3e-5, 1e-6, 2.0)
    assert loaded.config.actor.betas == [0.9, 0.999] and loaded.config.run.name == "b"
    assert [loaded.where(f"actor.{key}") for key in ("lr", "eps", "clip_grad", "betas")] == [
        "argument actor.lr=3e-5",
        "x.yaml:4",
        "base/b.yaml:4",
        "default",
    ]


def test_several_bases_later_ones_win_and_bases_have_bases() -> None:
    write("a.yaml", "run: {seed: 1, steps: 1, name: a}\n")
    write("b.yaml", "base: a.yaml\nrun: {seed: 2, steps: 2}\n")
    write("c.yaml", "run: {seed: 3}\n")
    run = load(write("x.yaml", "base: [b.yaml, c.yaml]\n"), []).config.run
    assert (run.seed, run.steps, run.name) == (3, 2, "a")


def test_a_base_may_be_inherited_twice_without_being_a_circle() -> None:
    write("a.yaml", "run: {seed: 1}\n")
    write("b.yaml", "base: a.yaml\n")
    write("c.yaml", "base: a.yaml\n")
    assert load(write("x.yaml", "base: [b.yaml, c.yaml]\n"), []).config.run.seed == 1


def test_everything_is_plain_and_frozen() -> None:
    path = write(
        "x.yaml",
        "data:\n  train:\n  - path: t.jsonl\n  - {path: 'reasoning-gym:x', limit: 3, options: {max: [1, 2]}}\n"
        "reward:\n  functions:\n  - {name: exact, weight: 2}\nsampling:\n  stop: [a, b]\n",
    )
    config = load(path, []).config
    assert config.data.train == [SourceConfig("t.jsonl"), SourceConfig("reasoning-gym:x", limit=3, options={"max": [1, 2]})]
    assert config.reward.functions == [RewardFunctionConfig("exact", 2.0)]
    plain = (config.data.train, config.sampling.stop, config.data.train[1].options["max"])
    assert [type(each) for each in plain] == [list, list, list] and type(config.data.train[1].options) is dict
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run.name = "other"  # type: ignore[misc]


def test_text_is_taken_as_written_and_numbers_as_numbers() -> None:
    text = "run: {name: 1e5}\nrollout: {sleep_level: 1}\nactor: {lr: 1e-5, clip_grad: 1, betas: [0, .5]}\nsampling: {stop: [on, 7]}\n"
    path = write("x.yaml", text)
    config = load(path, ["data.system=Answer: yes, [or] no", "model.path='quoted'"]).config
    assert (config.run.name, config.rollout.sleep_level, config.actor.lr, config.actor.clip_grad) == ("1e5", "1", 1e-5, 1.0)
    assert (config.actor.betas, config.sampling.stop) == ([0.0, 0.5], ["on", "7"])
    assert (config.data.system, config.model.path) == ("Answer: yes, [or] no", "quoted")


def test_arguments_reach_lists_mappings_and_sections() -> None:
    path = write("x.yaml", "data:\n  train:\n  - path: a\n  - path: b\n")
    loaded = load(path, ["data.train.1.path=c", "algo.kl={where: loss, coef: 0.1}", "data.train.0.options={k: {x: 1}}", "data.system="])
    assert [each.path for each in loaded.config.data.train] == ["a", "c"]
    assert (loaded.config.algo.kl.where, loaded.config.algo.kl.coef, loaded.config.algo.kl.estimator) == ("loss", 0.1, "k3")
    assert loaded.config.data.train[0].options == {"k": {"x": 1}} and loaded.config.data.system == ""
    assert loaded.where("data.train.1.path") == "argument data.train.1.path=c" and loaded.where("data.train.0.path") == "x.yaml:3"
    assert loaded.where("algo.kl.coef") == "argument algo.kl={where: loss, coef: 0.1}"


def test_a_list_replaces_the_one_before_and_its_places() -> None:
    write("b.yaml", "data:\n  train:\n  - {path: a, limit: 3}\n  - path: b\n")
    loaded = load(write("x.yaml", "base: b.yaml\ndata:\n  train:\n  - path: c\n"), [])
    assert loaded.config.data.train == [SourceConfig("c")]
    assert loaded.where("data.train.0.limit") == "default" and loaded.where("data.train.1.path") == "default"


def test_an_empty_section_sets_nothing() -> None:
    assert load(write("x.yaml", "actor:\n  # lr: 1\nrun:\n"), []).config == Config()


def test_an_empty_file_is_the_schema() -> None:
    assert load(write("x.yaml", "# nothing yet\n"), []).config == Config()


def test_environment_variables_and_literal_dollar_brace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH_OF_TEST", "/big")
    config = load(write("x.yaml", "run: {root: '${oc.env:SCRATCH_OF_TEST}/runs'}\ndata: {system: 'a \\${b}'}\n"), []).config
    assert (config.run.root, config.data.system) == ("/big/runs", "a ${b}")


def test_blame_names_every_place_once() -> None:
    loaded = load(write("x.yaml", "run: {seed: 1, steps: 2}\n"), ["actor.lr=1"])
    assert loaded.blame("run.seed", "run.steps", "actor.lr", "actor.eps") == "x.yaml:1 and argument actor.lr=1"
    assert loaded.blame("actor.eps") == "x.yaml"


def test_what_is_printed_is_read_back_the_same() -> None:
    path = write(
        "x.yaml",
        "run: {name: '1e5'}\nrollout: {sleep_level: 1}\ndata:\n  system: 'a \\${b}: \"c\" # d'\n"
        "  train: [{path: x, options: {s: 'on', e: '1e5', t: [1.5, null]}}]\n"
        "sampling: {stop: [\"\\n\", 'null']}\n",
    )
    loaded = load(path, ["algo.kl.where=loss"])
    for text in (as_yaml(loaded), as_yaml(loaded.config)):
        assert load(write("again.yaml", text), []).config == loaded.config
    assert "where: loss  # argument algo.kl.where=loss" in as_yaml(loaded) and "name: '1e5'" in as_yaml(loaded)


BAD_FILES = {
    "unknown key": ("run:\n  steps: 1\nactor:\n  mini_bach: 3\n", ["x.yaml:4: actor.mini_bach is not a key", "did you mean 'mini_batch'?"]),
    "unknown section": ("acto:\n  lr: 1\n", ["x.yaml:1: acto is not a key", "did you mean 'actor'?"]),
    "key of another section": ("run:\n  lr: 1\n", ["x.yaml:2: run.lr is not a key", "there is actor.lr"]),
    "key at the top": ("steps: 3\n", ["x.yaml:1: steps is not a key", "there is run.steps"]),
    "key of a list's item": ("data:\n  train:\n  - path: a\n    limt: 3\n", ["x.yaml:4: data.train.0.limt", "did you mean 'limit'?"]),
    "word for a number": ("actor:\n  lr: fast\n", ["x.yaml:2: actor.lr=fast is not a number"]),
    "fraction for an integer": ("run:\n  steps: 1.5\n", ["x.yaml:2: run.steps=1.5 is not an integer"]),
    "flag for an integer": ("run:\n  steps: true\n", ["x.yaml:2: run.steps=true is not an integer"]),
    "number for a flag": ("run:\n  save_final: 3\n", ["x.yaml:2: run.save_final=3 is not true or false"]),
    "null": ("run:\n  name: null\n", ["x.yaml:2: run.name=null is not a string"]),
    "list for a value": ("run:\n  name: [a]\n", ["x.yaml:2: run.name must be a string, not a list"]),
    "value for a list": ("sampling:\n  stop: a\n", ["x.yaml:2: sampling.stop must be a list of strings, not a single value"]),
    "word in a list of numbers": ("actor:\n  betas: [1, x]\n", ["x.yaml:2: actor.betas=[1, x] is not a list of numbers"]),
    "item of a list is no section": ("data:\n  train: [a.jsonl]\n", ["x.yaml:2: data.train.0 must be a section with keys (path,"]),
    "value for a section": ("actor: 3\n", ["x.yaml:1: actor must be a section with keys (lr,"]),
    "value for a mapping": ("data:\n  train:\n  - options: 3\n", ["x.yaml:3: data.train.0.options must be a mapping"]),
    "bad choice": ("algo:\n  kl:\n    where: los\n", ["x.yaml:3: algo.kl.where=los is not one of none, loss, reward"]),
    "below a limit": ("run:\n  steps: 0\n", ["x.yaml:2: run.steps=0 must be >= 1"]),
    "outside two limits": ("rollout:\n  mem_fraction: 1.0\n", ["x.yaml:2: rollout.mem_fraction=1.0 must be > 0 and < 1"]),
    "limit of a list's item": ("data:\n  train:\n  - path: a\n    limit: -1\n", ["x.yaml:4: data.train.0.limit=-1 must be >= 0"]),
    "not finite": ("actor:\n  lr: .nan\n", ["x.yaml:2: actor.lr=.nan must be finite"]),
    "key twice": ("actor:\n  lr: 1\n  eps: 1\n  lr: 2\n", ["x.yaml:4: actor.lr is given twice, first at x.yaml:2"]),
    "section twice": ("run:\n  seed: 1\nrun:\n  steps: 2\n", ["x.yaml:3: run is given twice, first at x.yaml:1"]),
    "key twice in a mapping": ("data:\n  train:\n  - options:\n      a: 1\n      a: 2\n", ["x.yaml:5: data.train.0.options.a is given"]),
    "syntax": ("run:\n  name: [a\nactor:\n", ["x.yaml:3: not valid YAML"]),
    "tab": ("run:\n\tseed: 1\n", ["x.yaml:2: not valid YAML", "indent with spaces"]),
    "tag": ("run:\n  seed: !!python/object:os.system 1\n", ["x.yaml:2: not valid YAML", "could not determine a constructor"]),
    "not sections": ("- a\n- b\n", ["x.yaml: must be sections"]),
    "missing base": ("base: base/grop.yaml\n", ["x.yaml:1: base: no file base/grop.yaml", "did you mean 'grpo.yaml'?"]),
    "base of another kind": ("run: {seed: 1}\nbase: {a: b}\n", ["x.yaml:2: base must be a file or a list of files"]),
    "base is itself": ("base: x.yaml\n", ["x.yaml:1: base files inherit each other in a circle: x.yaml -> x.yaml"]),
    "base in a circle": ("base: base/circle.yaml\n", ["base/circle.yaml:1: base files", "x.yaml -> base/circle.yaml -> x.yaml"]),
    "mistake in a base": ("base: base/wrong.yaml\n", ["base/wrong.yaml:2: run.seed=x is not an integer"]),
    "environment variable": ("run:\n  root: ${oc.env:NO_SUCH_VARIABLE}\n", ["x.yaml:2: run.root", "NO_SUCH_VARIABLE"]),
    "interpolated value of a wrong type": ("actor:\n  lr: ${run.name}\n", ["x.yaml:2: actor.lr", "could not be converted to Float"]),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file(case: str) -> None:
    write("base/grpo.yaml", "run: {seed: 1}\n")
    write("base/circle.yaml", "base: ../x.yaml\n")
    write("base/wrong.yaml", "run:\n  seed: x\n")
    text, parts = BAD_FILES[case]
    with pytest.raises(ConfigError) as caught:
        load(write("x.yaml", text), [])
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert len(message.splitlines()) == 1, "one mistake, one line"


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("actor.lr", ["argument actor.lr: an override has the form section.key=value"]),
        ("=3", ["argument =3: an override has the form"]),
        ("actor.lrr=1", ["argument actor.lrr=1: actor.lrr is not a key", "did you mean 'lr'?"]),
        ("lr=1", ["argument lr=1: lr is not a key", "there is actor.lr"]),
        ("actor.lr=fast", ["argument actor.lr=fast: actor.lr=fast is not a number"]),
        ("actor.lr=", ["argument actor.lr=: actor.lr=null is not a number"]),
        ("actor.lr.x=1", ["argument actor.lr.x=1: actor.lr is a number and has no key x"]),
        ("actor=3", ["argument actor=3: actor must be a section"]),
        ("run.steps=-1", ["argument run.steps=-1: run.steps=-1 must be >= 1"]),
        ("data.train.0.path=x", ["data.train has 0 item(s)", "data.train=[...]"]),
        ("data.train.x=1", ["data.train has 0 item(s)"]),
        ("sampling.stop=[a", ["argument sampling.stop=[a: not valid YAML"]),
        ("algo.kl={wher: loss}", ["algo.kl.wher is not a key", "did you mean 'where'?"]),
    ],
)
def test_bad_argument(argument: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, [argument])
    assert all(part in str(caught.value) for part in parts), caught.value


def test_missing_file_suggests_its_neighbour() -> None:
    write("yaml/quickstart.yaml", "")
    message = "yaml/quikstart.yaml: cannot be read: No such file or directory (did you mean 'quickstart.yaml'?)"
    with pytest.raises(ConfigError, match=re.escape(message)):
        load("yaml/quikstart.yaml", [])


def test_all_mistakes_are_told_at_once() -> None:
    path = write("x.yaml", "actor:\n  lr: x\n  foo: 1\nrun:\n  steps: 0\n")
    with pytest.raises(ConfigError) as caught:
        load(path, ["actor.eps=y", "sync.bucket_mb=0"])
    starts = ["x.yaml:2: actor.lr", "x.yaml:3: actor.foo", "argument actor.eps=y", "x.yaml:5: run.steps", "argument sync.bucket_mb=0"]
    assert [line.startswith(start) for line, start in zip(str(caught.value).splitlines(), starts, strict=True)] == [True] * 5
