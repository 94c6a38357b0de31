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
from megaflow.config.loading import Loaded, load
from megaflow.config.notices import notices
from megaflow.config.schema import AlgoConfig, Config
from megaflow.trainer.logic import make_batch
from megaflow.types import Prompt, Sample

ROOT = Path(__file__).parents[2]
STORED = {"sft", "dpo"}  # learn from stored data: see test_offline.py
RECIPES = sorted(path for path in (ROOT / "yaml/recipes").glob("*.yaml") if path.stem not in STORED)
PUBLISHED = {  # what a paper or framework prescribes, with the place that says so, beside what the schema has as default
    "grpo": {  # DeepSeekMath, arXiv:2402.03300, 4.1.2 and 4.2
        "advantage": "grpo", "norm_std": True, "aggregation": "sequence", "kl.where": "loss", "kl.estimator": "k3", "kl.coef": 0.04,
    },
    "dr_grpo": {"advantage": "grpo", "norm_std": False, "aggregation": "sequence_sum", "kl.where": "none"},  # arXiv:2503.20783, 3.2
    "dapo": {  # arXiv:2503.14476, 3 and 4.1: eps 0.2 and 0.28, L_max 16384 + cache 4096; the oversampling is verl's recipe
        "clip.low": 0.2, "clip.high": 0.28, "aggregation": "token", "kl.where": "none", "drop_uniform": True,
        "dynamic.rounds": 10, "dynamic.factor": 1536 / 512, "overlong.buffer": 4096 / 20480, "overlong.penalty": 1.0,
    },
    "gspo": {"loss": "gspo", "clip.low": 3e-4, "clip.high": 4e-4, "aggregation": "sequence", "kl.where": "none"},  # arXiv:2507.18071, 5.1
    "cispo": {"loss": "cispo", "clip.low": 1.0, "aggregation": "token", "kl.where": "none"},  # arXiv:2506.13585, 3.1: no lower bound
    "sapo": {"loss": "sapo", "sapo.tau_pos": 1.0, "sapo.tau_neg": 1.05, "aggregation": "sequence", "kl.where": "none"},  # arXiv:2511.20347
    "rloo": {  # arXiv:2402.14740; the coefficient is TRL's
        "advantage": "rloo", "loss": "policy_gradient", "aggregation": "sequence_sum", "kl.where": "reward", "kl.coef": 0.05,
    },
    "remax": {  # arXiv:2310.10505, algorithm 1; kl_ctl of the authors' script
        "advantage": "remax", "loss": "policy_gradient", "aggregation": "sequence_sum", "kl.where": "reward", "kl.estimator": "k1",
        "kl.coef": 0.05,
    },
    "reinforce_pp": {  # arXiv:2501.03262: k1 in the reward; version 1, table 1: 0.001 for mathematics, clip 0.2
        "advantage": "reinforce_pp", "loss": "ppo_clip", "aggregation": "token", "kl.where": "reward", "kl.estimator": "k1",
        "kl.coef": 0.001, "clip.low": 0.2, "clip.high": 0.2,
    },
    "reinforce_pp_baseline": {  # arXiv:2501.03262: k2 in the loss; the coefficient is of OpenRLHF's example scripts
        "advantage": "reinforce_pp_baseline", "loss": "ppo_clip", "kl.where": "loss", "kl.estimator": "k2", "kl.coef": 1e-5,
    },
    "gpg": {"advantage": "gpg", "loss": "policy_gradient", "aggregation": "token", "kl.where": "none", "drop_uniform": False},  # 2504.02546
    "opo": {"advantage": "opo", "kl.where": "none", "entropy": 0.0},  # arXiv:2505.23585
    "kl_ppo": {  # verl's actor: kl_loss_coef 0.001, kl_loss_type low_var_kl, clip_ratio 0.2, loss_agg_mode token-mean
        "kl.where": "loss", "kl.estimator": "k3", "kl.coef": 0.001, "clip.low": 0.2, "clip.high": 0.2, "aggregation": "token",
    },
    "clip_cov": {  # arXiv:2505.22617, 4.3: r = 2e-4, omega from 1 to 5; ratios within [0, 2] in the authors' script
        "loss": "clip_cov", "cov.clip_ratio": 2e-4, "cov.low": 1.0, "cov.high": 5.0, "clip.low": 1.0, "clip.high": 1.0, "kl.where": "none",
    },
    "ppo_gae": {  # verl's ppo_megatron_trainer: gamma, lam, kl_ctrl.kl_coef, kl_penalty kl, clip_ratio
        "advantage": "gae", "gae.gamma": 1.0, "gae.lam": 1.0, "gae.whiten": True, "kl.where": "reward", "kl.estimator": "k1",
        "kl.coef": 0.001, "clip.low": 0.2, "clip.high": 0.2,
    },
    "kl_cov": {"loss": "kl_cov", "cov.kl_ratio": 2e-3, "cov.kl_coef": 1.0, "kl.where": "none"},  # arXiv:2505.22617, 4.3, for 7B
}
ONE_UPDATE = {"rloo", "remax", "gpg", "opo"}  # per step: losses that know no old policy, or papers that are strictly on-policy
QUICKSTART = load(str(ROOT / "yaml/quickstart.yaml"), []).config


@pytest.fixture(scope="module", params=RECIPES, ids=lambda path: path.stem)
def recipe(request, tmp_path_factory) -> tuple[str, Loaded]:
    """(its name, its configuration over quickstart's)."""
    file = tmp_path_factory.mktemp("recipe") / "mine.yaml"
    file.write_text(f"base: [{ROOT / 'yaml/quickstart.yaml'}, {request.param}]\n")
    return request.param.stem, load(str(file), [])


def test_every_recipe_is_known_here():
    assert {path.stem for path in RECIPES} == PUBLISHED.keys()


def test_a_recipe_sets_the_algorithm_and_passes_the_checks(recipe):
    name, loaded = recipe
    check(loaded, world_size=2)
    for dotted, value in PUBLISHED[name].items():
        found = loaded.config.algo
        for part in dotted.split("."):
            found = getattr(found, part)
        assert found == value, dotted
    same = {"algo": QUICKSTART.algo, "actor": QUICKSTART.actor, "critic": QUICKSTART.critic}
    assert replace(loaded.config, **same) == QUICKSTART, "a recipe sets the algorithm only"
    assert loaded.config.actor.lr == QUICKSTART.actor.lr
    assert (loaded.config.actor.mini_batch == 0 and loaded.config.actor.epochs == 1) == (name in ONE_UPDATE)
    assert notices(loaded.config) == [], "no recipe does what megaflow itself warns of"


def test_one_gradient_step_of_a_recipe_favours_what_was_rewarded(recipe):
    """Two groups of four responses; on-policy, the gradient raises the log-probability of what got 1 and lowers that of what got 0."""
    cfg = recipe[1].config.algo
    lengths = torch.tensor([2, 3, 1, 4, 2, 2, 5, 1])
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    function = ADVANTAGES.get(cfg.advantage)
    if function.needs_tokens:
        pytest.skip("its advantages are those of the critic: see test_algo_gae.py")
    extra = {"lengths": lengths} if getattr(function, "needs_lengths", False) else {}
    if getattr(function, "needs_greedy", False):
        extra["baseline"] = torch.full_like(rewards, 0.5)
    advantage = function(rewards, torch.arange(8) // 4, cfg, **extra).repeat_interleave(lengths)
    old = torch.linspace(-3, -0.5, 20, dtype=torch.float64)
    logp = old.clone().requires_grad_()
    inputs = LossInputs(old, advantage, old, torch.arange(8).repeat_interleave(lengths), 8, old, torch.zeros(20).bool())
    per_token, _ = objective(logp, torch.ones_like(old), inputs, cfg)
    (token_weights(lengths, cfg.aggregation, 20, 8).double() * per_token).sum().backward()
    assert (torch.sign(-logp.grad) == torch.sign(rewards.repeat_interleave(lengths) - 0.5)).all()


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
    batch = make_batch(samples(), Config(algo=AlgoConfig(advantage="opo")))
    baselines = [(3 * 1.0 + 1 * 0.5) / 13, (4 * 1.0 + 4 * 0.2) / 10]
    for (group, index), decision in batch.decisions.items():
        reward = samples()[3 * group + index].reward
        assert decision.advantage == pytest.approx(reward - baselines[group], rel=1e-12)
    own = make_batch(samples(), Config(algo=AlgoConfig(advantage=f"{__file__}:three_arguments")))
    assert [each.advantage for each in own.decisions.values()] == [s.reward - 5.0 for s in samples()]


@pytest.mark.parametrize("registry", [ADVANTAGES, LOSSES], ids=["advantages", "losses"])
def test_every_registered_name_can_be_had_and_is_documented(registry):
    schema = inspect.getsource(importlib.import_module("megaflow.config.schema"))
    page = (ROOT / "docs/algorithms.md").read_text()
    for name in registry.names():
        assert callable(registry.get(name)) and f"`{name}`" in page and name in schema, name
