"""What a reward model on the mesh reads, what a scalar head is loaded from, and which settings and checkpoints are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megaflow.checkpoint.loading import _check_critic
from megaflow.config.checks import check
from megaflow.config.loading import load
from megaflow.config.schema import Config, DataConfig, RewardConfig, RewardModelConfig
from megaflow.shape import read_shape
from megaflow.trainer.critic import load_scalar_model
from megaflow.trainer.mesh_scorer import MeshScorer, conversation, reads_the_same
from megaflow.types import ConfigError, PreflightError, Prompt, Sample
from tests import tiny

ROOT = Path(__file__).parents[2]
OTHER = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return tiny.model_folder(tmp_path_factory.mktemp("model") / "m", layers=1)


def tokenizer_of(folder: str, template: str | None = None):
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(folder)
    if template:
        made.chat_template = template
    return made


def sample(asked, text="42") -> Sample:
    return Sample(Prompt("x:1", [5, 6, 7], "the policy's text", asked=asked), 0, 0, torch.tensor([8, 9]), None, "stop", 0, text=text)


def scorer(tokenizer, data: DataConfig | None = None, positions: int = 64) -> MeshScorer:
    return MeshScorer(Config(data=data or DataConfig()), None, SimpleNamespace(shape=SimpleNamespace(max_positions=positions)), tokenizer)


def test_with_the_policys_tokenizer_it_reads_the_policys_tokens(folder):
    assert reads_the_same(tokenizer_of(folder), tokenizer_of(folder))
    asked = scorer(None)._asked(sample("6 * 7?"))
    assert [*asked.prompt.tokens, *asked.response.tolist()] == [5, 6, 7, 8, 9]


def test_with_another_template_the_conversation_is_put_anew(folder):
    own = tokenizer_of(folder, OTHER)
    assert not reads_the_same(own, tokenizer_of(folder))
    asked = scorer(own, DataConfig(system="Be brief."))._asked(sample("6 * 7?"))
    expected = own("<system>Be brief.<user>6 * 7?<assistant>42", add_special_tokens=False).input_ids
    assert list(asked.prompt.tokens) == expected and len(asked.response) == 0
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert conversation(own, sample(turns), Config()) == own("<user>a<assistant>b<user>c<assistant>42", add_special_tokens=False).input_ids
    plain = Config(data=DataConfig(template="plain"))
    assert conversation(own, sample("6 * 7?"), plain) == own("the policy's text42").input_ids


def test_more_tokens_than_it_has_positions_are_an_error(folder):
    with pytest.raises(PreflightError, match=r"5 tokens of prompt x:1 and its response exceed its 4 positions"):
        scorer(None, positions=4)._asked(sample("?"))


def test_a_folder_without_a_head_makes_a_critic_of_zeros_and_no_reward_model(folder):
    mesh = SimpleNamespace(tp=SimpleNamespace(size=1, index=0), etp=SimpleNamespace(size=1, index=0))
    shape = read_shape(folder)
    head = {"output_layer.weight": torch.zeros(1, shape.hidden_size), "output_layer.bias": torch.zeros(1)}
    load_scalar_model(folder, shape, head, mesh)
    assert not head["output_layer.weight"].any()
    with pytest.raises(PreflightError, match=r"no scalar head \(score.weight"):
        load_scalar_model(folder, shape, head, mesh, need_head=True)


@pytest.mark.parametrize(
    ("names", "weight", "message"),
    [
        (("score.weight", None), [1, 128], None),
        (("v_head.summary.weight", "v_head.summary.bias"), [1, 128], None),
        (("score.weight", None), [3, 128], r"score.weight is \[3, 128\], a scalar head is \[1, 128\]"),
    ],
)
def test_heads_of_transformers_and_trl_are_found(folder, tmp_path, names, weight, message):
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_text((Path(folder) / "config.json").read_text())
    tensors = {names[0]: torch.randn(weight)} | ({names[1]: torch.tensor([2.5])} if names[1] else {})
    save_file(load_file(Path(folder) / "model.safetensors") | tensors, tmp_path / "model.safetensors")
    mesh = SimpleNamespace(tp=SimpleNamespace(size=1, index=0), etp=SimpleNamespace(size=1, index=0))
    head = {"output_layer.weight": torch.zeros(1, 128), "output_layer.bias": torch.zeros(1)}
    if message:
        with pytest.raises(PreflightError, match=message):
            load_scalar_model(str(tmp_path), read_shape(folder), head, mesh, need_head=True)
        return
    load_scalar_model(str(tmp_path), read_shape(folder), head, mesh, need_head=True)
    assert torch.equal(head["output_layer.weight"], tensors[names[0]])
    assert head["output_layer.bias"].item() == (2.5 if names[1] else 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reward.model={where: engine}"], "reward.model.where=engine needs reward.model.path"),
        (["reward.model={where: engine, path: m, url: 'http://x/y'}"], "and it is engine"),
        (["reward.model={where: engine, path: m, tp: 4}"], r"reward.model.tp=4 does not divide the 2 rank\(s\) of a host, .* use 1 or 2"),
        (["reward.model={where: engine, path: m, mem_fraction: 0.5}", "rollout.mem_fraction=0.6"], r"0.5 \+ .*=0.6 = 1.1 of a device"),
        (["reward.model={url: 'http://x/y'}"], "reward.model.url is for reward.model.where=remote"),
        (["reward.model={where: remote}"], "needs reward.model.url"),
        (["reward.model={where: remote, url: 'scorer:8000'}"], "must begin with http"),
        (["reward.model={where: remote, url: 'http://x/y', path: m}"], "a remote service has its own model"),
        (["algo.advantage=gae", "algo.drop_uniform=true", "rollout.samples_per_prompt=1"], "would leave out every sample"),
        (["reward.functions=[]"], "or a reward.model"),
    ],
)
def test_contradictions_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        check(load(str(ROOT / "yaml/quickstart.yaml"), arguments), world_size=2)


def test_a_reward_model_alone_is_enough():
    check(load(str(ROOT / "yaml/quickstart.yaml"), ["reward.functions=[]", "reward.model.path=models/scorer"]), world_size=2)


def test_a_checkpoint_without_the_critic_or_of_another_is_refused_with_the_way_out():
    facts = {"num_layers": 2, "hidden_size": 32}
    _check_critic(Path("c"), {"model": dict(facts)}, facts)
    with pytest.raises(PreflightError, match=r"c has no critic, and algo.advantage needs one"):
        _check_critic(Path("c"), None, facts)
    with pytest.raises(PreflightError, match=r"num_layers: 4 in the checkpoint, 2 here"):
        _check_critic(Path("c"), {"model": {**facts, "num_layers": 4}}, facts)


def test_preflight_looks_at_the_folders_of_critic_and_reward_model(folder, tmp_path):
    from megaflow.plan.preflight import Inspection, other_models_divide

    def found(*arguments: str) -> tuple[list[str], list[str]]:
        inspection = Inspection(load(str(ROOT / "yaml/quickstart.yaml"), list(arguments)), 2)
        facts = list(other_models_divide(inspection))
        return facts, [str(error) for error in inspection.errors]

    assert found() == ([], [])
    assert found(f"critic.path={folder}") == (["critic.path: m, qwen2, 1 layers"], [])
    _, errors = found(f"critic.path={folder}", "parallel.pp=2", f"reward.model.path={tmp_path}")
    assert len(errors) == 2 and "num_hidden_layers=1 (pp=2)" in errors[0] and "no config.json there" in errors[1]
    assert errors[0].startswith("argument critic.path=") and errors[1].startswith("argument reward.model.path=")


def test_an_engine_takes_what_sglang_scores_as_transformers_does(folder, tmp_path):
    from megaflow.plan.preflight import Inspection, reward_engine_takes

    scorer = Path(tiny.reward_model_folder(tmp_path / "scorer"))

    def found(*arguments: str) -> tuple[list[str], str]:
        settings = ["reward.model.where=engine", f"reward.model.path={scorer}", *arguments]
        inspection = Inspection(load(str(ROOT / "yaml/quickstart.yaml"), settings), 2)
        return list(reward_engine_takes(inspection)), " ".join(str(error) for error in inspection.errors)

    assert found("reward.model.tp=2") == (["reward engines: 1 of 2 rank(s), scorer, qwen2"], "")
    assert "reward.model.tp=3 does not divide num_attention_heads=4" in found("reward.model.tp=3")[1]
    assert "Qwen2ForCausalLM; an engine scores LlamaForSequenceClassification, " in found(f"reward.model.path={folder}")[1]
    raw = json.loads((scorer / "config.json").read_text())
    (scorer / "config.json").write_text(json.dumps(raw | {"architectures": ["MistralForSequenceClassification"]}))
    assert re.search(r"MistralForSequenceClassification; .*=mesh takes every family", found()[1])


@pytest.mark.parametrize(("shape", "message"), [([3, 128], r"score.weight is \[3, 128\], a scalar head is"), (None, "is not there")])
def test_an_engine_needs_a_head_of_one_label(folder, tmp_path, shape, message):
    from safetensors.torch import save_file

    from megaflow.plan.preflight import _one_label

    save_file({"score.weight": torch.zeros(shape)} if shape else {"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(PreflightError, match=message):
        _one_label(str(tmp_path), read_shape(folder))


def test_an_engine_counts_where_the_sleeping_actor_must_leave_room():
    from megaflow.actor.memory import engines_fraction

    assert engines_fraction(Config()) == 0.6
    assert engines_fraction(Config(reward=RewardConfig(model=RewardModelConfig(where="engine", path="m", mem_fraction=0.25)))) == 0.85


def test_a_rank_without_an_engine_takes_nothing_to_score(folder):
    """Rank 3 of 4, engines of two ranks: 0 and 2 have one. Its context is 7 positions shorter: SGLang keeps those for answers."""
    from megaflow.rollout.scoring import ScoringEngines

    cfg = Config(reward=RewardConfig(model=RewardModelConfig(where="engine", path=folder, tp=2)))
    engines = ScoringEngines(cfg, SimpleNamespace(rank=3, world_size=4), restarts=None)
    assert engines.owners == [[0], [2]] and engines.engine is None and engines.name == "reward engine 1 (ranks 2-3)"
    assert engines.shape.max_positions == read_shape(folder).max_positions - 7


@pytest.mark.parametrize(("bias", "expected"), [(None, 0.0), (2.5, 2.5)])
def test_a_head_keeps_the_bias_of_the_folder_and_no_other(bias, expected):
    from megaflow.rollout.score_head import without_random_bias

    model = torch.nn.Module()
    model.score = torch.nn.Linear(4, 1)
    weights = [("score.weight", torch.ones(1, 4)), *([("score.bias", torch.tensor([bias]))] if bias else [])]

    def load_weights(model, weights, device):
        for name, tensor in weights:
            model.get_parameter(name).data.copy_(tensor)
        return "done"

    assert model.score.bias.item() != 0
    assert without_random_bias(load_weights, model, iter(weights), None) == "done"
    assert model.score.bias.item() == expected and torch.equal(model.score.weight.data, torch.ones(1, 4))


def test_ppo_without_a_critic_is_refused():
    from megaflow.trainer.ppo import train_ppo

    with pytest.raises(ConfigError, match=r"algo.advantage=grpo reads no values"):
        train_ppo(Config())
