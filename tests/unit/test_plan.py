"""The memory plan against what was measured on an H200, its traffic and advice against hand calculation, and its command line."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megaflow.config.footprint import stage_sizes, trained_bytes
from megaflow.config.loading import load
from megaflow.config.schema import (
    ActorConfig,
    Config,
    DataConfig,
    EvalConfig,
    KLConfig,
    ModelConfig,
    OfflineConfig,
    ParallelConfig,
    RewardConfig,
    RewardModelConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    SyncConfig,
)
from megaflow.plan.activations import Activations, Pack
from megaflow.plan.advice import Planner, advice
from megaflow.plan.duration import duration
from megaflow.plan.hardware import DEVICES, device_named
from megaflow.plan.memory import MemoryPlan
from megaflow.plan.models import Lengths, Models
from megaflow.plan.planned import Planned, Traffic
from megaflow.shape import shape_of
from megaflow.trainer.planned_run import compare
from megaflow.trainer.planning import plan_run, sync_traffic
from megaflow.types import ConfigError
from tests.unit.test_rollout_args import QWEN_1_5B

ROOT = Path(__file__).parents[2]
H200 = DEVICES["h200"]
QWEN = shape_of(QWEN_1_5B, "config.json")
SMOLLM2 = {
    "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
SMALL = shape_of(SMOLLM2, "config.json")
MIXTURE = shape_of(  # tools/bench/make_model.py qwen3-moe-3b
    {
        "model_type": "qwen3_moe", "num_hidden_layers": 8, "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 64,
        "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "intermediate_size": 768, "tie_word_embeddings": False,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    },
    "config.json",
)  # fmt: skip


def qwen_config(**more) -> Config:
    """32 sequences of 128 + 1,920 tokens, four packs of 16,384."""
    actor = ActorConfig(micro_batch_tokens=16384, logits_gb=6.0)
    rollout = RolloutConfig(prompts_per_step=4, samples_per_prompt=8, mem_fraction=0.5)
    base = Config(
        model=ModelConfig("somewhere"), actor=actor, rollout=rollout, data=DataConfig(max_prompt_tokens=128),
        sampling=SamplingConfig(max_new_tokens=1920),
    )  # fmt: skip
    return dataclasses.replace(base, **more)


# --- against what was measured on one H200 ----------------------------------------------------------------------------


def test_qwen_1_5b_is_within_two_percent_of_what_was_measured():
    """torch.cuda.max_memory_allocated of bf16 with the fused kernels, distributed optimizer on one rank."""
    plan = MemoryPlan(qwen_config(), Models(QWEN), 1, H200)
    assert plan.phases["update"].actor_bytes == pytest.approx(68.04e9, rel=0.02)
    assert plan.phases["logprob"].actor_bytes == pytest.approx(29.94e9, rel=0.02)
    assert plan.phases["rollout"].actor["optimizer"] == pytest.approx(18.52e9, rel=0.001)
    asleep = plan.phases["rollout"].actor
    assert asleep["optimizer"] + asleep["parameters"] == pytest.approx(21.61e9, rel=0.001)


@pytest.mark.parametrize(("gpus", "measured"), [(1, 26.96e9), (2, 17.04e9)])
def test_the_device_with_both_asleep(gpus, measured):
    """In use on it after a sleep (tools/bench/step.py, dp=1 and dp=2): with offload=none only gradients are freed, and the engine keeps its
    context and graphs."""
    plan = MemoryPlan(qwen_config(), Models(QWEN), gpus, H200)
    both = plan.phases["rollout"].actor_bytes + plan.phases["update"].engine_bytes + sum(plan.phases["rollout"].outside.values())
    assert both == pytest.approx(measured, rel=0.1)


# GPUs, parallel sizes, model, tokens of a sequence -> peak of update and of log-probabilities by torch, rest of the process by NVML
# (tools/bench/update.py)
TWO_GPUS = {
    "dense, tp=2": (ParallelConfig(tp=2), QWEN, 2048, 36.93e9, 15.67e9, 2.984e9),
    "mixture, ep=2": (ParallelConfig(ep=2), MIXTURE, 1024, 53.65e9, 34.33e9, 4.570e9),
}


@pytest.mark.parametrize("name", TWO_GPUS)
def test_two_gpus_are_within_ten_percent_of_what_was_measured(name):
    parallel, shape, length, update, logprob, outside = TWO_GPUS[name]
    config = qwen_config(parallel=parallel, sampling=SamplingConfig(max_new_tokens=length - 128))
    plan = MemoryPlan(config, Models(shape), 2, H200)
    print(name, plan.phases["update"].actor_bytes / update, plan.phases["logprob"].actor_bytes / logprob)
    assert plan.phases["update"].actor_bytes == pytest.approx(update, rel=0.1)
    assert plan.phases["logprob"].actor_bytes == pytest.approx(logprob, rel=0.1)
    held = plan.phases["update"].outside
    assert held["CUDA context"] + held["NCCL"] == pytest.approx(outside, rel=0.1)


# (tokens of prompts and responses in the step, mean length of a response, measured mem/update/actor_gb, mem/logprob/actor_gb)
SMOLLM2_STEPS = [
    (81_173, 38.7548828125, 8.85071616, 3.309741056),  # two packs each
    (64_102, 22.255859375, 12.199581184, 3.115688448),  # one, nearly full
    (52_841, 11.3681640625, 10.432696832, 2.83137024),
    (53_308, 11.66796875, 10.689000448, 2.837404672),
]


def small_config() -> Config:
    return load(str(ROOT / "yaml/smollm2_gpu.yaml"), ["actor.micro_batch_tokens=16384"]).config


@pytest.mark.parametrize(("tokens", "response", "update", "logprob"), SMOLLM2_STEPS)
def test_smollm2_at_the_lengths_that_the_run_had(tokens, response, update, logprob):
    """1,024 samples a step in mini batches of 256, which make one or two packs: their tokens, not the budget, say
    what an update takes."""
    plan = MemoryPlan(small_config(), Models(SMALL), 1, H200, Lengths(tokens / 1024 - response, response, is_mean=True))
    assert plan.phases["update"].actor_bytes / 1e9 == pytest.approx(update, rel=0.1)
    assert plan.phases["logprob"].actor_bytes / 1e9 == pytest.approx(logprob, rel=0.05)
    assert plan.phases["rollout"].actor_bytes / 1e9 == pytest.approx(1.97, rel=0.02)
    assert plan.phases["sync"].actor_bytes / 1e9 == pytest.approx(2.5076, rel=0.02)


def test_smollm2_with_a_critic():
    """Measured with PPO, step 10: asleep 3.869, awake in the update 13.897."""
    plan = MemoryPlan(small_config(), Models(SMALL, critic=SMALL), 1, H200, Lengths(61_552 / 1024 - 19.293, 19.293, is_mean=True))
    assert plan.phases["rollout"].actor_bytes / 1e9 == pytest.approx(3.8687, rel=0.02)
    assert plan.phases["update"].actor_bytes / 1e9 == pytest.approx(13.897, rel=0.05)


def test_decoding_is_of_the_right_size():
    """256 prompts of 128, 512 new tokens each: 131,072 tokens at 50,000 a second."""
    rollout = RolloutConfig(prompts_per_step=256, samples_per_prompt=1, mem_fraction=0.5)
    config = qwen_config(rollout=rollout, sampling=SamplingConfig(max_new_tokens=512))
    found = duration(config, MemoryPlan(config, Models(QWEN), 1, H200), 0.35, 0.0)
    assert 131_072 / 50_000 / 2 < found.seconds["rollout"] < 131_072 / 50_000 * 2


# --- by hand ------------------------------------------------------------------------------------------------------------


def test_a_tokens_activations_by_hand():
    """A layer of Qwen2.5-1.5B in bf16, bytes: two norms' inputs and outputs 4 x 3,072 and their rms 8; q, k, v as they come 4,096; q and k
    rotated 3,584; attention's output 3,072 and log-sum-exp 48; gate and up 35,840; their product 17,920."""
    one = 4 * 3072 + 8 + 4096 + 3584 + 3072 + 48 + 35_840 + 17_920
    assert one == 76_856
    assert Activations(qwen_config(), QWEN).of_token() == 28 * one
    full = qwen_config(actor=ActorConfig(recompute="full"))
    assert Activations(full, QWEN).of_token() == 28 * 3072
    split = qwen_config(parallel=ParallelConfig(tp=2))
    assert Activations(split, QWEN).of_layer(0) == 4 * 3072 + 8 + (one - 4 * 3072 - 8) / 2, "norms are whole on both ranks"
    sequence = qwen_config(parallel=ParallelConfig(tp=2, sp=True))
    assert Activations(sequence, QWEN).of_layer(0) == one / 2


def test_logits_are_kept_by_chunks_within_their_budget():
    """16,384 rows of 151,936 logits in 16 bits are 4.98e9 bytes: 5 chunks of 0.996e9."""
    passes, rows = Activations(qwen_config(), QWEN), 16384
    chunk = rows * 151_936 * 2 / 5
    assert passes.logits(rows, 6e9) == pytest.approx(5 * chunk)
    assert passes.logits(rows, 2.5e9) == pytest.approx(4 * chunk), "two are kept, and two are in the making"
    assert passes.logits(rows, 0.0) == pytest.approx(2 * chunk)


def test_stages_hold_what_the_name_table_gives_them():
    """The independent source: sizes of all parameters of weights/table.py, cut as their kinds say."""
    from megaflow.weights.plan import shard_shape
    from megaflow.weights.table import table

    for parallel in (ParallelConfig(pp=2), ParallelConfig(pp=4, vpp=7), ParallelConfig(tp=2, pp=2)):
        for stage in range(parallel.pp):
            rows = [row for row in table(QWEN) if row.stage(parallel.pp, QWEN.num_layers, parallel.vpp) == stage]
            sizes = [shard_shape(row, QWEN, parallel.tp) for row in rows]
            expected = sum(size[0] * (size[1] if len(size) > 1 else 1) for size in sizes)
            if stage == parallel.pp - 1:
                expected += 151_936 * 1536 // parallel.tp  # its copy of the tied embedding, which is no row of the table
            assert stage_sizes(QWEN, parallel, stage).total == expected


def test_experts_are_split_over_ep_and_their_optimizer_over_fewer_ranks():
    raw = {
        **SMOLLM2, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 64,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    }  # fmt: skip
    shape = shape_of(raw, "config.json")
    experts = 30 * 8 * 3 * 576 * 256
    alone = stage_sizes(shape, ParallelConfig(), 0)
    assert alone.experts == experts and alone.total == shape.num_parameters
    assert stage_sizes(shape, ParallelConfig(ep=4), 0).experts == experts / 4
    held = trained_bytes(Config(parallel=ParallelConfig(ep=4)), shape, 8)
    assert held.optimizer == pytest.approx(12 * (alone.dense / 8 + experts / 4 / 2)), "2 ranks have each quarter of the experts"


def test_routes_of_every_token_in_the_cache_are_pinned():
    raw = {
        **SMOLLM2, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 64,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    }  # fmt: skip
    models = Models(shape_of(raw, "config.json"))
    rollout = RolloutConfig(prompts_per_step=4, samples_per_prompt=8, max_tokens=10_000)
    for replay, expected in (("none", 0), ("R3", 10_000 * 30 * 2 * 4)):
        config = qwen_config(rollout=rollout, actor=ActorConfig(router_replay=replay))
        assert MemoryPlan(config, models, 1, H200).routes_bytes() == expected


def test_an_experts_activations_by_hand():
    """Qwen3-30B-A3B, of a token's 8 experts each: input 4,096, gate and up 3,072, product and weighted product 1,536 each, 12 of weight and
    place; the router's 128 scores three times in fp32 and a byte each; norm's input, output and rms."""
    raw = {
        **SMOLLM2, "model_type": "qwen3_moe", "hidden_size": 2048, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "head_dim": 128, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    }  # fmt: skip
    passes = Activations(qwen_config(), shape_of(raw, "config.json"))
    attention = 2 * 4096 + 4 + 10_240 + 9_216 + 8_192 + 128 + 9_216 + 144  # the last two: what the norms of q and k keep
    assert passes.of_layer(0) == attention + 2 * 4096 + 4 + 128 * 13 + 8 * (4096 + 3072 + 2 * 1536 + 12)


def test_pipeline_stages_hold_several_packs():
    def flying(stage: int, packs: int, **parallel) -> float:
        return Activations(Config(parallel=ParallelConfig(**parallel)), QWEN, stage).in_flight(packs)

    assert [flying(stage, 8, pp=4) for stage in range(4)] == [4, 3, 2, 1]
    assert flying(0, 2, pp=4) == 2
    assert flying(0, 8, pp=2, vpp=2) == 2.5, "2 (2 - 1) + (2 - 1) 2 + 1 = 5 chunks, each half a stage"


def test_other_models_are_counted():
    plain = MemoryPlan(qwen_config(), Models(QWEN), 1, H200)
    beside = MemoryPlan(qwen_config(), Models(QWEN, reward_model=SMALL, reference=True), 1, H200)
    assert beside.phases["logprob"].total - plain.phases["logprob"].total == pytest.approx(2 * QWEN.num_parameters, rel=0.01)
    assert beside.phases["reward"].actor["reward model"] == 2 * (SMALL.num_parameters + 576 + 1)
    assert beside.host_bytes() == pytest.approx(2 * (QWEN.num_parameters + SMALL.num_parameters), rel=0.001)
    scored = MemoryPlan(qwen_config(), Models(QWEN, reward_fraction=0.2), 1, H200)
    assert scored.phases["reward"].engine_bytes - plain.phases["reward"].engine_bytes == pytest.approx(0.2 * 150.1e9 + 3.0e9)


def test_host_memory_for_checkpoints_by_hand():
    def gb_a_parameter(world_size: int, **sections) -> float:
        config = dataclasses.replace(qwen_config(), **sections)
        return MemoryPlan(config, Models(QWEN), world_size, H200).saving_bytes() / QWEN.num_parameters

    assert gb_a_parameter(1) == pytest.approx(12 + 2, rel=0.001), "main weights and two moments in fp32, weights in bf16"
    assert gb_a_parameter(2) == pytest.approx(12 + 1, rel=0.001), "two ranks have all of the first and write half of the second"
    assert gb_a_parameter(1, run=RunConfig(async_save=False)) == pytest.approx(12, rel=0.001)
    plain = ActorConfig(distributed_optimizer=False)
    assert gb_a_parameter(2, actor=plain) == pytest.approx(7, rel=0.001), "14, shared"
    assert gb_a_parameter(2, actor=plain, run=RunConfig(async_save=False)) == 0


def test_models_are_read_from_the_configuration(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    folder = str(tmp_path)
    config = Config(model=ModelConfig(folder), reward=RewardConfig(model=RewardModelConfig(path=folder)))
    config = dataclasses.replace(config, algo=dataclasses.replace(config.algo, advantage="gae", kl=KLConfig(where="loss", coef=0.1)))
    assert Models.of(config) == Models(SMALL, SMALL, SMALL, True)
    assert Models.of(Config(model=ModelConfig(folder))) == Models(SMALL)


def test_cache_and_the_largest_safe_fraction():
    """0.5 of 150.1e9 less 3.087e9 of weights, at 28,672 bytes a token."""
    plan = MemoryPlan(qwen_config(), Models(QWEN), 1, H200)
    assert plan.kv_tokens() == int((75.05e9 - 2 * 1_543_714_304) / 28_672)
    assert plan.full_requests() == plan.kv_tokens() // 2048
    safe, config = plan.largest_mem_fraction(), qwen_config()

    def fits(fraction: float) -> bool:
        return MemoryPlan(qwen_config(rollout=dataclasses.replace(config.rollout, mem_fraction=fraction)), Models(QWEN), 1, H200).fits()

    assert fits(safe) and not fits(safe + 0.01)


def test_traffic_of_a_sync(tmp_path):
    """With one rank's shard beside its own worker nothing crosses a link; with two stages each worker reads the other's half."""
    assert sync_traffic(qwen_config(), QWEN, 8, 8) == Traffic(2.0 * QWEN.num_parameters, 0.0, 0.0, "pull")
    halves = sync_traffic(qwen_config(parallel=ParallelConfig(pp=2)), SMALL, 2, 8)
    last = 2 * (15 * 3_540_096 + 576)  # layers 15 to 29 and the final norm, of the worker beside rank 0
    first = 2 * (15 * 3_540_096 + 49_152 * 576)
    assert halves.link == last and halves.worker == first + last and halves.how == "pull"
    apart = sync_traffic(qwen_config(parallel=ParallelConfig(pp=2), sync=SyncConfig(transport="auto")), SMALL, 2, 1)
    assert apart.network > 0 and apart.how == "buckets, estimated"


def test_advice_is_planned_itself():
    """80 GB are too few for 16,384 tokens a pack beside 0.7 of the device."""
    config = qwen_config(rollout=RolloutConfig(prompts_per_step=4, samples_per_prompt=8, mem_fraction=0.7))
    planned = Planned(config, Models(QWEN), 1, DEVICES["a100"], Traffic(0, 0, 0, "pull"))
    assert not planned.fits()
    lines = advice(config, Planner(planned.tightest, planned.seconds))
    assert any("rollout.mem_fraction=0.59" in line for line in lines), lines
    assert "it does not fit" in planned.text() and "what to change" in planned.text()
    roomy = dataclasses.replace(planned, device=H200)
    assert advice(qwen_config(), Planner(roomy.tightest, roomy.seconds)) == []


def test_what_cannot_be_mended_is_said():
    config = qwen_config(rollout=RolloutConfig(prompts_per_step=4, samples_per_prompt=8, mem_fraction=0.5))
    seven = dataclasses.replace(QWEN, hidden_size=3584, ffn_size=18944, num_heads=28, num_kv_heads=4, tied=False)
    planned = Planned(config, Models(seven), 1, DEVICES["h100"], Traffic(0, 0, 0, "pull"))
    assert "more ranks, or devices with more memory" in planned.text()


QWEN_7B = {**QWEN_1_5B, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
           "vocab_size": 152064, "tie_word_embeddings": False}  # fmt: skip


def seven(device: str, *overrides: str, world_size: int = 1) -> Planned:
    config = load(str(ROOT / "yaml/qwen7b.yaml"), list(overrides)).config
    planned = Planned(config, Models(shape_of(QWEN_7B, "config.json")), world_size, DEVICES[device], Traffic(0, 0, 0, "pull"))
    assert not planned.fits()
    return planned


def test_what_is_lacking_is_what_one_device_lacks():
    """7.616e9 parameters with 18 bytes each are 137e9 bytes when all is awake; of 85.0e9 an A100 gives 82.5e9. With the engine's weights
    (15.2e9) and cache (the rest of 0.4), its context and the trainer's that is 174.9e9 at the start, whatever else is changed."""
    planned = seven("a100", "parallel.tp=1", "rollout.tp=1", "parallel.sp=false")
    lacks = 7.6156e9 * 18 + 0.4 * 85.0e9 + 3.0e9 + 0.71e9 + 0.09e9 - 0.97 * 85.0e9
    lines = planned.text().partition("what to change:")[2].strip().splitlines()
    numbers = [float(found[1]) for line in lines if (found := re.search(r"startup still lacks ([\d.]+) GB", line))]
    assert len(numbers) == len([line for line in lines if "world-size" not in line]) > 1
    assert numbers == pytest.approx([lacks / 1e9] * len(numbers), abs=0.2)


def test_advice_is_in_the_order_of_its_price():
    """What costs no time comes before what does: smaller packs before a cache that takes a part of the requests at once."""
    planned = seven("h100", world_size=2)
    lines = advice(planned.config, Planner(planned.tightest, planned.seconds))
    assert [line.split("=")[0] for line in lines] == ["actor.micro_batch_tokens", "rollout.mem_fraction"]
    per_request = (512 + 1024) * 28_672
    was, has = (int((fraction * DEVICES["h100"].memory - 7.6156e9) // per_request) for fraction in (0.4, 0.1))
    assert f"room for {has} requests at full length instead of {was}" in lines[1] and (has, was) == (19, 598)
    before, after = planned.seconds(), planned.seconds(load(str(ROOT / "yaml/qwen7b.yaml"), ["rollout.mem_fraction=0.1"]).config)
    assert f"a step about {before:.3g} s as before" in lines[0] and f"a step about {after:.3g} s, not {before:.3g}" in lines[1]
    assert after > 2 * before


def test_what_a_later_change_makes_needless_is_not_advised():
    """Every line is needed: without any one of them it does not fit. And alone, what is cheaper stands higher."""
    several = seven("h100", world_size=2)
    settings = [line.split(":")[0].split() for line in advice(several.config, Planner(several.tightest, several.seconds))]
    for left_out in settings:
        rest = [text for each in settings if each is not left_out for text in each]
        assert not several.tightest(load(str(ROOT / "yaml/qwen7b.yaml"), rest).config).fits()
    rollout = RolloutConfig(prompts_per_step=64, samples_per_prompt=8, mem_fraction=0.2)
    config = qwen_config(rollout=rollout, actor=ActorConfig(micro_batch_tokens=65536))
    planned = Planned(config, Models(QWEN), 1, H200, Traffic(0, 0, 0, "pull"))
    lines = advice(config, Planner(planned.tightest, planned.seconds))
    names = [line.split("=")[0] for line in lines]
    assert all("alone is enough" in line for line in lines) and names.index("actor.micro_batch_tokens") < names.index("actor.recompute")


def test_a_cache_without_room_for_one_sequence_is_made_larger():
    """0.03 of 150.1e9 is 4.5e9: 3.09e9 of weights leave 49,000 tokens."""
    sampling = SamplingConfig(max_new_tokens=60_000)
    config = qwen_config(rollout=RolloutConfig(prompts_per_step=4, samples_per_prompt=8, mem_fraction=0.03), sampling=sampling)
    planned = Planned(config, Models(QWEN), 1, H200, Traffic(0, 0, 0, "pull"))
    config = dataclasses.replace(config, actor=ActorConfig(micro_batch_tokens=61_440, recompute="full"))
    lines = advice(config, Planner(planned.tightest, planned.seconds))
    assert lines[0].startswith("rollout.mem_fraction=0.") and "alone is enough" in lines[0], lines


# --- steps from stored data -----------------------------------------------------------------------------------------------


def offline_config(objective: str, steps: int = 100, **more) -> Config:
    return qwen_config(offline=OfflineConfig(steps=steps, objective=objective, batch=64), data=DataConfig(max_prompt_tokens=128, **more))


def test_phases_of_steps_from_stored_data():
    """What trainer/build.py makes: an engine for online steps and evaluations; a reference for DPO."""
    def phases(config: Config) -> list[str]:
        return list(MemoryPlan(config, Models(QWEN), 1, H200).phases)

    assert phases(offline_config("sft")) == ["startup", "update"]
    assert phases(offline_config("dpo")) == phases(offline_config("rl")) == ["startup", "logprob", "update"]
    assert phases(offline_config("sft", eval_fraction=0.1)) == ["startup", "sync", "rollout", "reward", "update"]
    assert phases(offline_config("sft", steps=50)) == phases(qwen_config()) == ["startup", "sync", "rollout", "reward", "logprob", "update"]
    alone = MemoryPlan(offline_config("sft"), Models(QWEN), 1, H200)
    assert alone.phases["startup"].engine_bytes == 0 == alone.phases["update"].engine_bytes
    assert alone.phases["startup"].actor_bytes == pytest.approx(QWEN.num_parameters * 18, rel=0.01)
    assert alone.fits() and alone.offload == "none"


def test_seconds_of_steps_from_stored_data_by_hand():
    """64 responses of 2,048 tokens: 6 operations a parameter and token, and attention; DPO has 64 pairs and two passes of 2 before it."""
    def seconds(config: Config) -> dict[str, float]:
        return duration(config, MemoryPlan(config, Models(QWEN), 1, H200), 0.4, 0.0).seconds

    sft, dpo = seconds(offline_config("sft")), seconds(offline_config("dpo"))
    body = QWEN.num_parameters - 151_936 * 1536
    by_hand = 6 * 64 * (2048 * body + 1920 * 151_936 * 1536) / (H200.tflops * 1e12 * 0.4)
    assert sft.keys() == {"update"} and by_hand < sft["update"] < 1.15 * by_hand
    assert dpo["update"] == pytest.approx(2 * sft["update"]) and dpo["logprob"] == pytest.approx(dpo["update"] * 2 / 3)


def test_a_run_of_both_is_planned_for_the_larger_step():
    larger = offline_config("sft", steps=50)
    plan = MemoryPlan(larger, Models(QWEN), 1, H200)
    assert plan.mini_batch == 64, "64 responses offline, 4 * 8 samples online"
    text = Planned(larger, Models(QWEN), 1, H200, Traffic(0, 0, 0, "pull")).text()
    assert "an offline step (sft) of 64 times 128 + 1920 tokens a sequence" in text and "\na step of 128 + 1920 tokens" in text


def test_the_engine_sleeps_beside_steps_from_stored_data():
    """Which put it to sleep first: from its start on it is awake."""
    for before in (True, False):
        config = dataclasses.replace(offline_config("sft", steps=50), eval=EvalConfig(before=before))
        assert MemoryPlan(config, Models(QWEN), 1, H200).phases["update"].engine_bytes == 3.0e9


def test_packs_of_like_size():
    longest, mean = Lengths(100, 100), Lengths(100, 100, is_mean=True)
    assert longest.pack(1000, 100) == (Pack(1000, 500), 20)
    assert longest.pack(1000, 2) == (Pack(400, 200), 1)
    assert longest.pack(100, 2) == (Pack(200, 100), 4), "a longer sequence goes alone"
    assert mean.pack(1000, 6) == (Pack(600, 300), 2), "1,200 tokens make two packs of 600"
    assert mean.pack(1000, 5.1, 0.05)[0].tokens == 969, "1,020 tokens would be two; a lot 5% shorter is one"


def test_devices_by_name():
    assert device_named("H100").memory < device_named("h200").memory
    with pytest.raises(ConfigError, match=r"--device h20 is not known \(did you mean 'h200'"):
        device_named("h20")


# --- as a program -------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_launch_script_plans_without_weights_and_without_torch(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_1_5B))
    arguments = ["--config", "yaml/qwen2.5_1.5b.yaml", "--plan", f"model.path={tmp_path}"]
    lines = [
        "import sys", f"sys.argv = ['x', *{arguments!r}]", "from megaflow.cli import main", "try: main('none:none', '')",
        "finally: print('torch' in sys.modules)",
    ]  # fmt: skip
    code = "\n".join(lines)
    done = run("-c", code)
    assert done.returncode == 0 and done.stdout.splitlines()[-2:] == ["it fits", "False"], done.stdout + done.stderr
    small = run("launch/train_grpo.py", *arguments, "--device", "a100", "rollout.mem_fraction=0.9")
    assert small.returncode == 3 and "rollout.mem_fraction=0.59 alone is enough" in small.stdout, small.stdout + small.stderr


def test_command_lines_that_make_no_sense():
    device = run("launch/train_grpo.py", "--config", "yaml/quickstart.yaml", "--device", "h100")
    assert device.returncode == 2 and "--device goes with --plan" in device.stderr
    unknown = run("tools/plan.py", "--config", "yaml/quickstart.yaml", "--device", "b9000", "parallel.tp=1")
    assert unknown.returncode == 2 and "known: h200, h100, a100" in unknown.stderr


@pytest.mark.parametrize(("arguments", "message"), [
    (["--world-size", "0"], "argument --world-size: 0 must be a whole number, at least 1"),
    (["--ranks-per-host", "0"], "argument --ranks-per-host: 0 must be a whole number, at least 1"),
    (["--mfu", "0"], "argument --mfu: 0 must be a part, above 0 and at most 1"),
    (["--mfu", "40"], "argument --mfu: 40 must be a part"),
    (["--mfu", "nan"], "argument --mfu: nan must be a part"),
])  # fmt: skip
def test_numbers_that_make_no_plan(arguments, message, monkeypatch, capsys):
    from tools import plan

    monkeypatch.setattr(sys, "argv", ["plan.py", "--config", str(ROOT / "yaml/quickstart.yaml"), *arguments])
    with pytest.raises(SystemExit) as end:
        plan.main()
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_an_engine_over_two_hosts_is_not_planned(tmp_path, monkeypatch, capsys):
    """With the words of a start on such hosts, and its code."""
    from tools import plan

    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2 | {"num_attention_heads": 8, "num_key_value_heads": 4}))
    arguments = ["--config", str(ROOT / "yaml/smollm2_gpu.yaml"), f"model.path={tmp_path}", "rollout.tp=2", "--world-size", "2"]
    codes = []
    for ranks in ("1", "2"):
        monkeypatch.setattr(sys, "argv", ["plan.py", *arguments, "--ranks-per-host", ranks])
        codes.append(plan.main())
    said = capsys.readouterr().err
    assert codes == [2, 0] and "rollout.tp=2: an engine lives on one host, and a host has 1 ranks; use 1" in said, said


def test_stored_data_and_checkpoints_need_not_be_there_for_a_plan(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_1_5B))
    arguments = ["--world-size", "2", f"model.path={tmp_path}", "data.rollouts=nowhere.jsonl"]
    arguments += [f"run.resume={tmp_path}/gone", "data.eval_fraction=0"]
    done = run("launch/train_offline.py", "--config", "yaml/quickstart_sft.yaml", "--plan", "data.eval=[]", "eval.every=0", *arguments)
    assert done.returncode == 0 and "it fits" in done.stdout, done.stdout + done.stderr
    assert "no engine" in done.stdout
    assert not re.search(r"sync |rollout |reward|KV cache", done.stdout), done.stdout
    real = run("launch/train_offline.py", "--config", "yaml/quickstart_sft.yaml", *arguments, "--dry-run")
    assert real.returncode == 2 and "nowhere.jsonl: no such file" in real.stderr and "run.resume" in real.stderr


def test_after_a_run_planned_and_measured_stand_side_by_side(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    lines = [f"model: {{path: {tmp_path}}}", "actor: {micro_batch_tokens: 16384, mini_batch: 256}", "data: {max_prompt_tokens: 128}"]
    (tmp_path / "config.yaml").write_text("\n".join([*lines, "rollout: {prompts_per_step: 64, samples_per_prompt: 16}"]))
    (tmp_path / "env.json").write_text(json.dumps({"ranks": 1, "devices": {"gpus": ["NVIDIA H200"]}}))
    measured = {"batch/tokens": 56796, "rollout/len_mean": 14.73, "mem/update/actor_gb": 11.185, "sync/bytes": 269030016}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, **measured}) + "\n")
    done = run("tools/plan.py", str(tmp_path))
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()[2:]}
    assert done.returncode == 0 and float(rows["mem/update/actor_gb"][2]) == pytest.approx(1.0, abs=0.05), done.stdout + done.stderr
    assert rows["sync/bytes"] == ["269,030,016", "269,030,016", "1.00"] and "env.json" not in done.stdout
    (tmp_path / "env.json").unlink()
    assert f"{tmp_path}/env.json is missing or does not say how many ranks there were: planned for 1" in compare(tmp_path)
    nothing = run("tools/plan.py", str(tmp_path / "nothing"))
    assert nothing.returncode == 2 and "is it a run directory" in nothing.stderr


def test_a_plan_of_a_pipeline_names_its_stages(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    config = qwen_config(model=ModelConfig(str(tmp_path)), parallel=ParallelConfig(pp=2))
    text = plan_run(config, 2, H200, 0.35).text()
    assert "the tightest of 2" in text and "total, stage" in text and "NCCL" in text
