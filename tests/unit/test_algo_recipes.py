"""yaml/recipes: each goes over a whole configuration, passes the checks and learns; and how lengths reach advantages."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megaflow.algo import ADVANTAGES, LOSSES
from megaflow.algo.aggregation import token_weights
from megaflow.algo.losses import LossInputs, objective
from megaflow.config.checks import check
from megaflow.config.loading import load
from megaflow.config.schema import AlgoConfig, Config
from megaflow.trainer.logic import make_batch
from megaflow.types import Prompt, Sample

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "yaml/recipes").glob("*.yaml"))
PUBLISHED = {  # what a paper or framework prescribes, beside what the schema has as default
    "grpo": {"advantage": "grpo", "norm_std": True, "aggregation": "sequence", "kl.where": "loss", "kl.coef": 0.04},
    "dr_grpo": {"advantage": "grpo", "norm_std": False, "aggregation": "sequence_sum", "kl.where": "none"},
    "dapo": {"clip.low": 0.2, "clip.high": 0.28, "aggregation": "token", "kl.where": "none", "drop_uniform": True},
    "gspo": {"loss": "gspo", "clip.low": 3e-4, "clip.high": 4e-4, "aggregation": "sequence"},
    "cispo": {"loss": "cispo", "clip.low": 1.0, "aggregation": "token", "kl.where": "none"},
    "rloo": {"advantage": "rloo", "loss": "policy_gradient", "aggregation": "sequence_sum", "kl.where": "reward"},
    "reinforce_pp": {"advantage": "reinforce_pp", "loss": "ppo_clip", "kl.where": "reward", "kl.estimator": "k1"},
    "kl_grpo": {"kl.where": "loss", "kl.estimator": "k3", "kl.coef": 0.001, "clip.low": 0.2, "clip.high": 0.2},
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


def over_quickstart(recipe: Path, tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"base: [{ROOT / 'yaml/quickstart.yaml'}, {recipe}]\n")
    return load(str(file), [])


def test_every_recipe_is_known_here():
    assert {path.stem for path in RECIPES} == PUBLISHED.keys()


@every_recipe
def test_a_recipe_sets_the_algorithm_and_passes_the_checks(recipe, tmp_path):
    loaded = over_quickstart(recipe, tmp_path)
    check(loaded, world_size=2)
    for dotted, value in PUBLISHED[recipe.stem].items():
        found = loaded.config.algo
        for part in dotted.split("."):
            found = getattr(found, part)
        assert found == value, dotted
    quickstart = load(str(ROOT / "yaml/quickstart.yaml"), []).config
    assert replace(loaded.config, algo=quickstart.algo, actor=quickstart.actor) == quickstart, "a recipe sets the algorithm only"
    assert loaded.config.actor.lr == quickstart.actor.lr


@every_recipe
def test_one_gradient_step_of_a_recipe_favours_what_was_rewarded(recipe, tmp_path):
    """Two groups of four responses; on-policy, the gradient raises the log-probability of what got 1 and lowers that of what got 0."""
    cfg = over_quickstart(recipe, tmp_path).config.algo
    lengths = torch.tensor([2, 3, 1, 4, 2, 2, 5, 1])
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    function = ADVANTAGES.get(cfg.advantage)
    extra = {"lengths": lengths} if function.needs_lengths else {}
    advantage = function(rewards, torch.arange(8) // 4, cfg, **extra).repeat_interleave(lengths)
    old = torch.linspace(-3, -0.5, 20, dtype=torch.float64)
    logp = old.clone().requires_grad_()
    inputs = LossInputs(old, advantage, old, torch.arange(8).repeat_interleave(lengths), 8, ref_logp=old)
    per_token, _ = objective(logp, torch.ones_like(old), inputs, cfg)
    (token_weights(lengths, cfg.aggregation, 20, 8).double() * per_token).sum().backward()
    assert (torch.sign(-logp.grad) == torch.sign(rewards.repeat_interleave(lengths) - 0.5)).all()


class Rewards:
    """Stands in for the pool: the rewards are there already."""

    counts = {"failed": 0, "timeout": 0}

    def score(self, samples):
        return samples


def samples() -> list[Sample]:
    out = []
    for i, (reward, length) in enumerate([(1.0, 3), (0.0, 9), (0.5, 1), (0.0, 2), (1.0, 4), (0.2, 4)]):
        sample = Sample(Prompt("s:1", [1], "?"), i // 3, i % 3, torch.zeros(length).long(), torch.zeros(length), "stop", 0)
        sample.reward = reward
        out.append(sample)
    return out


def three_arguments(rewards, groups, cfg):
    """A user's own function that knows nothing of lengths."""
    return rewards - 5.0


def test_the_logic_block_hands_lengths_to_who_wants_them():
    batch = make_batch(samples(), Rewards(), Config(algo=AlgoConfig(advantage="opo")))
    baselines = [(3 * 1.0 + 1 * 0.5) / 13, (4 * 1.0 + 4 * 0.2) / 10]
    for (group, index), decision in batch.decisions.items():
        reward = samples()[3 * group + index].reward
        assert decision.advantage == pytest.approx(reward - baselines[group], rel=1e-12)
    own = make_batch(samples(), Rewards(), Config(algo=AlgoConfig(advantage=f"{__file__}:three_arguments")))
    assert [each.advantage for each in own.decisions.values()] == [s.reward - 5.0 for s in samples()]


@pytest.mark.parametrize("registry", [ADVANTAGES, LOSSES], ids=["advantages", "losses"])
def test_every_registered_name_can_be_had_and_is_documented(registry):
    schema = inspect.getsource(importlib.import_module("megaflow.config.schema"))
    page = (ROOT / "docs/algorithms.md").read_text()
    for name in registry.names():
        assert callable(registry.get(name)) and f"`{name}`" in page and name in schema, name
