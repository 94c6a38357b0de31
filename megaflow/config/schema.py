"""Every key of the configuration, its type, its default and what it means. No torch here: --help must answer at once."""

# ruff: noqa: RUF009 (`key` makes a dataclasses.field)

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


def key(default: Any, doc: str, **limits: Any) -> Any:
    """A config key: `doc` is shown by --help and in the reference; `ge`, `gt`, `le`, `lt` bound a number."""
    metadata = {"doc": doc, **limits}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class RunConfig:
    name: str = key("run", "name of the run; its directory is <root>/<name>")
    root: str = key("runs", "where run directories are made")
    seed: int = key(0, "seed of everything: data order, sampling, initialisation", ge=0)
    steps: int = key(100, "RL steps to make", ge=1)
    resume: str = key("auto", "auto: from the last good checkpoint if there is one; never: start anew; or a checkpoint's path")
    save_every: int = key(50, "steps between checkpoints; 0: only at the end", ge=0)
    keep_last: int = key(2, "checkpoints kept; older ones are deleted", ge=1)
    save_final: bool = key(True, "save a checkpoint after the last step")
    export_hf: bool = key(False, "also write a Hugging Face folder <run>/hf after the last step")
    deterministic: bool = key(False, "bitwise repeatable: deterministic kernels, fixed thread counts (slower on CUDA)")
    timeout_s: float = key(1800.0, "seconds after which a collective that does not return ends the run", gt=0)


@dataclass(frozen=True)
class ModelConfig:
    path: str = key("", "Hugging Face folder: config.json, safetensors, tokenizer files")
    dtype: Literal["bfloat16", "float32"] = key("bfloat16", "of the parameters in training and in the engine; main weights stay fp32")
    attention: Literal["auto", "sdpa", "varlen"] = key("auto", "varlen (CUDA, 16-bit) or sdpa per sequence; auto: varlen if possible")


@dataclass(frozen=True)
class ParallelConfig:
    tp: int = key(1, "tensor parallel size of the actor", ge=1)
    pp: int = key(1, "pipeline parallel size of the actor", ge=1)
    vpp: int = key(1, "virtual pipeline chunks per stage", ge=1)
    cp: int = key(1, "context parallel size", ge=1)
    ep: int = key(1, "expert parallel size", ge=1)
    etp: int = key(1, "tensor parallel size within an expert", ge=1)
    sp: bool = key(False, "sequence parallel: norms and residuals split over tp")


@dataclass(frozen=True)
class SourceConfig:
    """Where prompts come from."""

    path: str = key("", "a .jsonl or .parquet file; or reasoning-gym:<task>, a procedural task")
    name: str = key("", "name in metrics; default: the file's stem or the task")
    limit: int = key(0, "use the first so many lines, 0: all; of a procedural task: how many to make", ge=0)
    seed: int = key(0, "of a procedural task", ge=0)
    options: dict[str, Any] = key({}, "settings of a procedural task, passed on as they are")

    @property
    def label(self) -> str:
        """The name in metrics and in prompts' ids."""
        return self.name or Path(self.path.removeprefix("reasoning-gym:")).stem


@dataclass(frozen=True)
class DataConfig:
    train: list[SourceConfig] = key([], "prompts to train on; several sources are joined")
    eval: list[SourceConfig] = key([], "held-out sets, each measured apart")
    eval_fraction: float = key(0.0, "part of the training prompts set aside as the eval set `heldout` (0: none)", ge=0, lt=1)
    prompt_key: str = key("prompt", "column with the question: a string, or a list of chat messages")
    answer_key: str = key("answer", "column with what the reward compares with")
    system: str = key("", "system message put before each string prompt")
    template: Literal["chat", "plain"] = key("chat", "chat: the tokenizer's chat template; plain: the prompt as it is")
    max_prompt_tokens: int = key(1024, "longer prompts are left out, and counted", ge=1)
    shuffle: bool = key(True, "new order each epoch, from run.seed")
    epochs: int = key(0, "stop after so many passes; 0: run.steps decides", ge=0)


@dataclass(frozen=True)
class SamplingConfig:
    temperature: float = key(1.0, "0: greedy", ge=0)
    top_p: float = key(1.0, "nucleus; below 1 the engine's log-probabilities are not those of the training distribution", gt=0, le=1)
    top_k: int = key(-1, "-1: off")
    max_new_tokens: int = key(512, "a response that reaches it counts as truncated", ge=1)
    stop: list[str] = key([], "strings that end a response, beside the model's own end token")
    ignore_eos: bool = key(False, "always generate max_new_tokens (benchmarks)")


@dataclass(frozen=True)
class RolloutConfig:
    backend: str = key("sglang", "sglang, hf (slow reference), or package.module:factory")
    tp: int = key(1, "tensor parallel size of an engine; each group of tp consecutive ranks owns one", ge=1)
    prompts_per_step: int = key(32, "prompts in a step, G", ge=1)
    samples_per_prompt: int = key(8, "samples drawn for each, so N = prompts_per_step * samples_per_prompt", ge=1)
    mem_fraction: float = key(0.6, "part of the device's memory for the engine's weights and KV cache", gt=0, lt=1)
    max_tokens: int = key(0, "tokens of KV cache; 0: as mem_fraction allows (on CPU: enough for all requests of a step)", ge=0)
    max_running: int = key(256, "requests decoded at once", ge=1)
    sleep_level: Literal["1", "2"] = key("2", "sleep 1 keeps the weights in host memory, 2 drops them (a sync fills them)")
    attention_backend: str = key("auto", "SGLang's; auto: torch_native on CPU, triton on CUDA")
    cuda_graph: bool = key(True, "capture decode graphs (CUDA)")
    timeout_s: float = key(600.0, "seconds without any finished sample after which an engine counts as hung", gt=0)
    start_timeout_s: float = key(600.0, "seconds an engine may take to start", gt=0)


@dataclass(frozen=True)
class ActorConfig:
    lr: float = key(1e-6, "peak learning rate", gt=0)
    lr_warmup_steps: int = key(0, "optimizer steps of linear warm-up", ge=0)
    lr_decay: Literal["constant", "linear", "cosine"] = key("constant", "after the warm-up, down to min_lr at the last step")
    min_lr: float = key(0.0, "where the decay ends", ge=0)
    weight_decay: float = key(0.0, "decoupled (AdamW)", ge=0)
    betas: list[float] = key([0.9, 0.999], "Adam's two")
    eps: float = key(1e-8, "Adam's epsilon", gt=0)
    clip_grad: float = key(1.0, "global gradient norm; 0: no clipping", ge=0)
    epochs: int = key(1, "passes over the samples of a step", ge=1)
    mini_batch: int = key(0, "samples per optimizer step, over all ranks; 0: all of the step's", ge=0)
    micro_batch_tokens: int = key(8192, "most tokens in one packed forward; a longer single sequence goes alone", ge=1)
    recompute: Literal["none", "full"] = key("none", "full: activations of each layer are computed again in the backward pass")
    distributed_optimizer: bool = key(True, "optimizer state split over the data-parallel ranks")
    offload: Literal["none", "optimizer", "all", "auto"] = key("none", "moves to host memory while the actor sleeps; gradients are freed")
    max_skipped: int = key(3, "optimizer steps with non-finite gradients in a row after which the run ends as diverged", ge=1)


@dataclass(frozen=True)
class ClipConfig:
    low: float = key(0.2, "the ratio's lower bound is 1 - low", ge=0, le=1)
    high: float = key(0.2, "the ratio's upper bound is 1 + high (clip-higher when above low)", ge=0)
    dual: float = key(3.0, "of loss=dual_clip: where the advantage A is negative, the loss is at most dual * |A|", gt=1)


@dataclass(frozen=True)
class SapoConfig:
    tau_pos: float = key(1.0, "of loss=sapo: how fast the gradient fades with the ratio where the advantage is positive", gt=0)
    tau_neg: float = key(1.05, "the same where it is not", gt=0)


@dataclass(frozen=True)
class KLConfig:
    where: Literal["none", "loss", "reward"] = key("none", "where the distance to the reference model enters")
    estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+"] = key(
        "k3", "Schulman's; k3 is verl's low_var_kl; with a plus: the same value, k2's gradient"
    )
    coef: float = key(0.001, "weight of that distance", ge=0)


@dataclass(frozen=True)
class CorrectionConfig:
    mode: Literal["none", "token_tis", "sequence_tis", "token_mask", "sequence_mask", "geometric_mask", "icepop"] = key(
        "none", "against the engine's distribution differing from the trainer's"
    )
    low: float = key(0.5, "of the masks and icepop: a ratio (trainer / engine) below it is left out", ge=0, le=1)
    high: float = key(2.0, "of the masks and icepop: a ratio above it is left out; of tis: it counts as this", ge=1)


@dataclass(frozen=True)
class AlgoConfig:
    advantage: str = key("grpo", "grpo, rloo, opo, gpg, reinforce_pp, reinforce_pp_baseline, pass_at_k, or package.module:function")
    norm_std: bool = key(True, "divide a group's advantages by its standard deviation (False: Dr. GRPO)")
    pass_k: int = key(4, "of advantage=pass_at_k: the k whose best sample counts; below rollout.samples_per_prompt", ge=1)
    loss: str = key("ppo_clip", "ppo_clip, dual_clip, policy_gradient, gspo, cispo, sapo, or package.module:function")
    aggregation: Literal["token", "sequence", "sequence_sum"] = key(
        "token", "mean over tokens, or over sequences of each one's mean, or of its sum / length_constant"
    )
    length_constant: int = key(1, "of aggregation=sequence_sum: what each response's sum is divided by, e.g. sampling.max_new_tokens", ge=1)
    clip: ClipConfig = field(default_factory=ClipConfig)
    sapo: SapoConfig = field(default_factory=SapoConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    entropy: float = key(0.0, "coefficient of the entropy bonus", ge=0)
    drop_uniform: bool = key(False, "leave out groups whose rewards are all equal (they carry no signal)")


@dataclass(frozen=True)
class RewardFunctionConfig:
    name: str = key("", "exact, number, math, boxed, format, reasoning_gym, or package.module:function or file.py:function")
    weight: float = key(1.0, "the reward is the weighted sum")
    options: dict[str, Any] = key({}, "keyword arguments of the function")


@dataclass(frozen=True)
class RewardConfig:
    functions: list[RewardFunctionConfig] = key([], "at least one")
    workers: int = key(2, "processes that compute rewards", ge=1)
    timeout_s: float = key(10.0, "wall-clock seconds for one sample; then its worker is killed, and the reward is `failed`", gt=0)
    failed: float = key(0.0, "the reward of a sample whose function failed")


@dataclass(frozen=True)
class SyncConfig:
    bucket_mb: int = key(256, "size of each of the two buckets, MiB", ge=1)
    proof: bool = key(True, "compare a digest of each tensor after each sync")


@dataclass(frozen=True)
class EvalConfig:
    every: int = key(0, "steps between evaluations; 0: only where `before` and `after` say", ge=0)
    before: bool = key(True, "evaluate before the first step")
    after: bool = key(True, "evaluate after the last step")
    samples: int = key(1, "samples per prompt", ge=1)
    temperature: float = key(0.0, "0: greedy", ge=0)


@dataclass(frozen=True)
class MonitorConfig:
    trackers: list[str] = key([], "tensorboard, wandb, trackio, swanlab; metrics.jsonl is always written")
    project: str = key("megaflow", "project name at the trackers")
    samples_per_step: int = key(16, "samples written to samples/step_N.jsonl; -1: all", ge=-1)
    plot: bool = key(True, "draw the learning curve at the end (curve.png)")


@dataclass(frozen=True)
class Config:
    """A whole run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
