"""What README and docs say can be done can be done: commands, keys, metrics, links, quoted code, and the first run of one's own."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import typing
from pathlib import Path
from typing import Any

import pytest

from megaflow.cli import _options
from megaflow.config.checks import check
from megaflow.config.help import sections
from megaflow.config.loading import load
from megaflow.config.nodes import types_of
from megaflow.config.schema import Config
from megaflow.monitor.console import PHASES
from megaflow.monitor.metrics import METRICS
from megaflow.plan import preflight
from megaflow.rewards import REWARDS
from tests.pages import PAGES, ROOT, blocks, commands, name_of

EXAMPLES = ROOT / "docs" / "examples"
EXAMPLE_METRICS = {"reward/near", "reward/short_and_right"}  # of functions that pages show
PLACEHOLDERS = {"section.key=value"}
GENERATED = ("models/", "data/", "runs/")  # what commands make; no page may name anything else that is not there
SECTIONS = set(types_of(Config))
NAMESPACES = {name.partition("/")[0] for name in METRICS}


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def prose(page: Path) -> str:
    """The text without fenced blocks and indented lines; of the page on verl without its tables' first column, which is verl's."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith("    ")]
    if page.name == "coming-from-verl.md":
        lines = ["|".join(line.split("|")[2:]) if line.startswith("|") else line for line in lines]
    return "\n".join(lines)


def in_backticks(page: Path) -> list[str]:
    """Single backticks; `a b=c` gives its words apart."""
    return [word for span in re.findall(r"`([^`\n]+)`", prose(page)) for word in span.split()]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def has_key(dotted: str) -> bool:
    """Whether the schema has the key or section; `data.train.0.path`, `data.train[]`, `actor.*` and `run.name` are all meant."""
    kind: Any = Config
    for part in dotted.replace("[]", ".0").removesuffix(".*").rstrip(".").split("."):
        if typing.get_origin(kind) is list:
            if not part.isdigit():
                return False
            kind = typing.get_args(kind)[0]
        elif typing.get_origin(kind) is dict:
            return True
        elif not hasattr(kind, "__dataclass_fields__") or part not in types_of(kind):
            return False
        else:
            kind = types_of(kind)[part]
    return True


def is_metric(name: str) -> bool:
    namespace, _, rest = name.partition("/")
    if rest == "*":
        return any(each.startswith(f"{namespace}/") for each in METRICS)
    if name in METRICS or name in EXAMPLE_METRICS:
        return True
    expansions = {"time": set(PHASES), "reward": set(REWARDS.names())}  # of time/<phase> and reward/<fn>
    phases = "|".join(["<phase>", *PHASES])
    if re.fullmatch(rf"mem/({phases})/(actor|engine|reserved|device)_gb|device/(util|power_w)_({phases})", name):
        return True
    return rest in expansions.get(namespace, ()) or re.fullmatch(r"eval/[\w<>]+/(accuracy|reward)|data/[\w<>]+/reward", name) is not None


def check_override(word: str, where: str) -> None:
    key = word.partition("=")[0]
    assert has_key(key), f"{where}: {key} is not a configuration key"


# --- commands --------------------------------------------------------------------------------------------------------------------


def check_script(script: str, arguments: list[str], where: str) -> None:
    """Exists, takes these options, its configuration loads with these overrides."""
    assert (ROOT / script).is_file(), f"{where}: there is no {script}"
    if script.startswith("launch/"):
        options = _options(arguments)  # raises ConfigError for an option that there is not
        if options.config:
            assert (ROOT / options.config).is_file(), f"{where}: there is no {options.config}"
            load(str(ROOT / options.config), options.overrides)
        return
    text = (ROOT / script).read_text()
    for shared in re.findall(r"^from tools\.bench import (\w+)", text, re.MULTILINE):  # where benchmarks have options in common
        text += (ROOT / f"tools/bench/{shared}.py").read_text()
    for option in (word for word in arguments if word.startswith("--")):
        assert f'"{option}"' in text, f"{where}: {script} has no option {option}"


def check_command(words: list[str], where: str) -> None:
    program, arguments = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "make":
        missing = {word for word in arguments if "=" not in word} - targets()
        assert not missing, f"{where}: the Makefile has no target {missing}"
    elif program == ".ci/run":
        assert (ROOT / ".ci/run").is_file()
    elif program in ("python", "torchrun"):
        if arguments[:1] == ["-m"]:
            assert importlib.util.find_spec(arguments[1]), f"{where}: there is no module {arguments[1]}"
            for path in (word for word in arguments[2:] if word.startswith("tests")):
                assert (ROOT / path).exists(), f"{where}: there is no {path}"
            return
        index = next((i for i, word in enumerate(arguments) if word.endswith(".py")), None)
        assert index is not None, f"{where}: no script in {' '.join(words)}"
        check_script(arguments[index], arguments[index + 1 :], where)
        for word in arguments[:index]:
            known = r"--(nproc-per-node|standalone|nnodes|node-rank|max-restarts|(rdzv-|local-|master-)\S+)|[\w.$-]+(:\d+)?"
            assert re.fullmatch(known, word), f"{where}: {word} is no option of torchrun that pages use"
    for word in arguments:
        path = word.partition("=")[2] if re.match(r"[a-z_.]+=", word) else word
        if re.fullmatch(r"[\w.]+/[\w./-]*\w", path) and not path.startswith(GENERATED):
            assert (ROOT / path).exists(), f"{where}: there is no {path}"


@every_page
def test_commands_can_be_given(page: Path) -> None:
    for words in commands(page):
        where = f"{name_of(page)}: {' '.join(words)}"
        if words:  # nothing is left of `VARIABLE=value` alone
            check_command(words, where)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("torchrun --nproc-per-node 2 launch/train_grp.py --config yaml/quickstart.yaml", "there is no launch/train_grp.py"),
        ("torchrun launch/train_grpo.py --config yaml/quick.yaml", "there is no yaml/quick.yaml"),
        ("python launch/train_grpo.py --config yaml/quickstart.yaml actor.lrr=1", "actor.lrr is not a key"),
        ("python launch/train_grpo.py --dryrun", "--dryrun"),
        ("python tools/view_samples.py runs/quickstart --stp 3", "no option --stp"),
        ("make quickstrt", "no target"),
        ("python -m pytest tests/unitt", "there is no tests/unitt"),
    ],
)
def test_a_wrong_command_would_be_found(line: str, reason: str) -> None:
    with pytest.raises(Exception, match=re.escape(reason)):
        check_command(shlex.split(line), "a page")


def test_commands_are_found() -> None:
    counts = {page.name: len(commands(page)) for page in PAGES}
    assert counts["README.md"] >= 7 and counts["tutorial.md"] >= 15 and counts["running.md"] >= 3, counts


# --- keys, metrics, links --------------------------------------------------------------------------------------------------------


@every_page
def test_configuration_keys_exist(page: Path) -> None:
    for word in in_backticks(page):
        is_key = re.fullmatch(rf"({'|'.join(SECTIONS)})(\.(\w+|\*)|\[\])+(=\S*)?[,;:]?", word)
        is_override = re.fullmatch(r"[a-z_]+(\.\w+)+=\S*", word)
        is_a_file = word.endswith((".py", ".yaml", ".jsonl", ".json"))
        if (is_key or is_override) and not is_a_file and word not in PLACEHOLDERS:
            check_override(word.rstrip(",;:"), f"{name_of(page)}: `{word}`")


def test_configuration_blocks_are_valid(tmp_path: Path) -> None:
    """Every yaml block of every page has only keys of the schema, with values that fit."""
    number = 0
    for page in PAGES:
        for language, lines in blocks(page):
            if language == "yaml":
                number += 1
                file = tmp_path / f"{page.stem}_{number}.yaml"
                file.write_text("\n".join(line for line in lines if not line.startswith("base:")) + "\n")
                load(str(file), [])
    assert number >= 3


@every_page
def test_metrics_exist(page: Path) -> None:
    for word in in_backticks(page):
        if re.fullmatch(rf"({'|'.join(NAMESPACES)})(/[\w<>*]+)+", word.rstrip(",;")):
            assert is_metric(word.rstrip(",;")), f"{name_of(page)}: {word} is not in megaflow.monitor.metrics.METRICS"


def test_a_wrong_key_or_metric_would_be_found() -> None:
    assert has_key("actor.lr") and has_key("data.train.0.path") and has_key("reward.functions.0.options.within") and has_key("data.*")
    assert not has_key("actor.learning_rate") and not has_key("data.train.path") and not has_key("actor.lr.x")
    assert is_metric("train/kl") and is_metric("time/sync") and is_metric("eval/heldout/accuracy") and is_metric("mismatch/*")
    assert not is_metric("train/klx") and not is_metric("time/syncs") and not is_metric("reward/avg") and not is_metric("rollout/<fn>")


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_relative_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists() and file.is_relative_to(ROOT), f"{name_of(page)}: the link {target} leads nowhere"
        assert not anchor or anchor in anchors(file), f"{name_of(page)}: {target}: {file.name} has no such heading"


def test_every_page_is_in_the_index() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs/index.md").read_text()))
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}


@every_page
def test_files_and_extras_that_are_named_exist(page: Path) -> None:
    for word in in_backticks(page):
        if re.fullmatch(r"(megaflow|yaml|launch|tools|tests|docs)/[\w/.-]+", word):
            assert (ROOT / word).exists(), f"{name_of(page)}: there is no {word}"
    for extra in re.findall(r"\.\[(\w+)\]", page.read_text()):
        assert f'"{extra}": ' in (ROOT / "setup.py").read_text(), f"{name_of(page)}: setup.py has no extra {extra}"


# --- quoted code and the first run of one's own ----------------------------------------------------------------------------------


def test_the_loop_in_the_readme_is_the_loop() -> None:
    """Each quoted line stands in loop.py, in this order."""
    quoted = next(lines for language, lines in blocks(ROOT / "README.md") if language == "python" and "run.steps()" in lines[0])
    source = iter([line.strip() for line in (ROOT / "megaflow/trainer/loop.py").read_text().splitlines()])
    for line in quoted:
        assert line.strip() in source, f"megaflow/trainer/loop.py has no such line, or not there: {line.strip()}"


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_the_quoted_example_is_the_example(page: str) -> None:
    code = {language: "\n".join(lines) for language, lines in blocks(ROOT / page) if "near" in "".join(lines) and language != "sh"}
    assert code["python"] in (EXAMPLES / "doubles_reward.py").read_text()
    if page == "README.md":
        assert code["yaml"] + "\n" == (EXAMPLES / "doubles.yaml").read_text()
    records = [lines[0] for language, lines in blocks(ROOT / page) if language == "json"]
    assert records and all(record in (EXAMPLES / "doubles.jsonl").read_text().splitlines() for record in records)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the example needs of a clone, and models/tiny with random weights."""
    from tools.make_tiny_model import make

    base = tmp_path_factory.mktemp("clone")
    shutil.copytree(EXAMPLES, base / "docs/examples")
    shutil.copytree(ROOT / "yaml", base / "yaml")
    make(base / "models/tiny", steps=0)
    return base


def test_the_first_run_of_ones_own_passes_all_checks(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clone)
    loaded = load("docs/examples/doubles.yaml", [])
    check(loaded, world_size=2)
    facts = "\n".join(preflight.check(loaded, world_size=2))
    assert "doubles_reward.py:near loads" in facts and "doubles, first prompt has" in facts


def test_the_data_of_the_first_run(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megaflow.data import PromptStream, load_tokenizer

    monkeypatch.chdir(clone)
    config = load("docs/examples/doubles.yaml", []).config
    lines = [json.loads(line) for line in Path("docs/examples/doubles.jsonl").read_text().splitlines()]
    assert all(line["prompt"] == f"What is {int(line['answer']) // 2} + {int(line['answer']) // 2}?" for line in lines)
    stream = PromptStream(config.data, load_tokenizer(config.model.path), config.rollout.prompts_per_step, config.run.seed)
    assert len(lines) == 90 and len(stream.eval_sets["heldout"]) == 18 and stream.num_prompts == 72


def test_the_reward_of_the_first_run() -> None:
    near = REWARDS.get(f"{EXAMPLES}/doubles_reward.py:near")
    by_hand = {" 84\n": 1.0, "82": 0.8, "89": 0.5, "94": 0.0, "120": 0.0, "-84": 0.0, "84.": 0.0, "": 0.0, "٨٤": 0.0}
    assert {text: near(text, "84", None) for text in by_hand} == pytest.approx(by_hand)
    assert near("82", "84", None, within=4) == 0.5


def test_every_section_of_the_schema_is_in_the_reference() -> None:
    headings = anchors(ROOT / "docs/config.md")
    assert {section.replace(".", "") for section, _, _ in sections()} <= headings
