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
    keep_best: int = key(0, "checkpoints kept besides: the best by best_metric at their step", ge=0)
    best_metric: str = key("", "of keep_best: e.g. eval/<set>/accuracy or reward/mean")
    best_mode: Literal["max", "min"] = key("max", "of keep_best: which end of best_metric is good")
    async_save: bool = key(True, "a save holds up training only while the state is copied to host memory; files are written meanwhile")
    save_final: bool = key(True, "save a checkpoint after the last step")
    export_hf: bool = key(False, "also write a Hugging Face folder <run>/hf after the last step, in files of at most 5 GB")
    deterministic: bool = key(False, "bitwise repeatable: deterministic kernels, fixed thread counts (slower on CUDA)")
    timeout_s: float = key(1800.0, "seconds after which a collective that does not return ends the run", gt=0)
    cache_dir: str = key("~/.cache/megaflow", "where compiled kernels are kept from run to run; empty: where each library likes")


@dataclass(frozen=True)
class ModelConfig:
    path: str = key("", "Hugging Face folder: config.json, safetensors, tokenizer files; or one that tools/convert.py hf-to-megatron made")
    dtype: Literal["bfloat16", "float32"] = key("bfloat16", "of the parameters in training and in the engine; main weights stay fp32")
    attention: Literal["auto", "sdpa", "varlen"] = key("auto", "varlen (CUDA, 16-bit) or sdpa per sequence; auto: varlen if possible")
    kernels: Literal["auto", "fused", "plain"] = key("auto", "norm, SwiGLU, rotary, softmax in Triton or plain torch; auto: Triton on CUDA")
    experts: Literal["auto", "grouped", "sequential"] = key("auto", "in one product or one by one; auto: grouped in bf16 on Hopper")


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
    weight: float = key(0.0, "share of the prompts handed out, relative to the other sources'; 0 for all of them: they are joined", ge=0)
    seed: int = key(0, "of a procedural task", ge=0)
    options: dict[str, Any] = key({}, "settings of a procedural task, passed on as they are")

    @property
    def label(self) -> str:
        """The name in metrics and in prompts' ids."""
        return self.name or Path(self.path.removeprefix("reasoning-gym:")).stem


@dataclass(frozen=True)
class DataConfig:
    train: list[SourceConfig] = key([], "prompts to train on; several sources are joined, or mixed by their weights")
    eval: list[SourceConfig] = key([], "held-out sets, each measured apart")
    eval_fraction: float = key(0.0, "part of the training prompts set aside as the eval set `heldout` (0: none)", ge=0, lt=1)
    prompt_key: str = key("prompt", "column with the question: a string, or a list of chat messages")
    answer_key: str = key("answer", "column with what the reward compares with")
    system: str = key("", "system message put before each string prompt")
    template: Literal["chat", "plain"] = key("chat", "chat: the tokenizer's chat template; plain: the prompt as it is")
    max_prompt_tokens: int = key(1024, "longer prompts are left out, and counted", ge=1)
    shuffle: bool = key(True, "new order each epoch, from run.seed")
    epochs: int = key(0, "stop after so many passes; 0: run.steps decides", ge=0)
    curriculum: Literal["none", "easy_to_hard", "target"] = key(
        "none", "order by pass rate: each epoch from easy to hard; or drawn, likelier the nearer the pass rate is to target_rate"
    )
    target_rate: float = key(0.5, "of curriculum=target: the pass rate that is worth most", ge=0, le=1)
    skip_solved: int = key(0, "leave out a prompt whose samples were all solved so many times in a row; 0: never", ge=0)
    pass_rate_key: str = key("", "column with a pass rate known beforehand, of [0, 1]; empty: unknown until a prompt was tried")
    pass_rate_memory: float = key(0.5, "weight of a prompt's earlier pass rate when a new one comes in", ge=0, lt=1)
    rollouts: str = key("", "stored samples for the first offline.steps steps: a .jsonl or .parquet file, or a folder <run>/samples")


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
    ep: int = key(1, "1: every expert is cut over the engine's ranks; equal to tp: each rank has its own experts whole", ge=1)
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
    max_restarts: int = key(3, "engines that die or hang are started anew, so often within an hour; then the run ends (code 5)", ge=0)


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
    router_replay: Literal["none", "measure", "R3"] = key(
        "none", "of experts: R3: tokens go to those that the engine chose; measure: only count how many differ (moe/routes_differ)"
    )
    recompute: Literal["none", "full"] = key("none", "full: activations of each layer are computed again in the backward pass")
    distributed_optimizer: bool = key(True, "optimizer state split over the data-parallel ranks")
    overlap: bool = key(True, "gradients are summed over the data-parallel ranks while the backward pass goes on (CUDA)")
    logits_gb: float = key(6.0, "16-bit logits kept from forward to backward, 1e9 bytes; the others are computed again", ge=0)
    offload: Literal["none", "optimizer", "all", "auto"] = key("none", "moves to host memory while the actor sleeps; gradients are freed")
    max_skipped: int = key(3, "optimizer steps with non-finite gradients in a row after which the run ends as diverged", ge=1)


@dataclass(frozen=True)
class CriticConfig:
    """Of algo.advantage=gae: the model that says what reward to expect. What is not here is as for the actor."""

    path: str = key("", "Hugging Face folder to start from, with a scalar head or without (then the head starts at 0); empty: model.path")
    lr: float = key(1e-5, "peak learning rate", gt=0)
    lr_warmup_steps: int = key(0, "optimizer steps of linear warm-up", ge=0)
    lr_decay: Literal["constant", "linear", "cosine"] = key("constant", "after the warm-up, down to min_lr at the last step")
    min_lr: float = key(0.0, "where the decay ends", ge=0)
    weight_decay: float = key(0.0, "decoupled (AdamW)", ge=0)
    clip_grad: float = key(1.0, "global gradient norm; 0: no clipping", ge=0)
    epochs: int = key(1, "passes over the samples of a step, in the actor's mini batches", ge=1)
    micro_batch_tokens: int = key(0, "most tokens in one packed forward; 0: as actor.micro_batch_tokens", ge=0)
    clip_value: float = key(0.5, "a value may move so far from the one before the update; 0: no clipping", ge=0)
    warmup_steps: int = key(0, "RL steps at the start in which only the critic learns and the policy stays as it is", ge=0)


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
    coef: float = key(0.001, "weight of that distance; of controller=adaptive: at the start", ge=0)
    controller: Literal["fixed", "adaptive"] = key("fixed", "adaptive: coef rises while the distance is above target, falls while below")
    target: float = key(0.1, "of controller=adaptive: the distance aimed at, mean over response tokens, nats", gt=0)
    horizon: int = key(10000, "of controller=adaptive: samples over which coef can change by about a fifth", ge=1)


@dataclass(frozen=True)
class GaeConfig:
    gamma: float = key(1.0, "of advantage=gae: what a reward one token later is worth", ge=0, le=1)
    lam: float = key(1.0, "of advantage=gae: 1: rewards alone count; 0: the critic's next value; between: variance or bias", ge=0, le=1)
    whiten: bool = key(True, "of advantage=gae: advantages of all response tokens to mean 0 and variance 1")
    bootstrap: bool = key(False, "of advantage=gae: after a truncated response comes the critic's value, not 0")


@dataclass(frozen=True)
class CovConfig:
    clip_ratio: float = key(2e-4, "of loss=clip_cov: part of the tokens that lose their gradient", gt=0, le=1)
    low: float = key(1.0, "of loss=clip_cov: covariance from which a token may be drawn")
    high: float = key(5.0, "of loss=clip_cov: covariance up to which a token may be drawn")
    kl_ratio: float = key(2e-3, "of loss=kl_cov: part of the tokens, those of largest covariance, that are held back", gt=0, le=1)
    kl_coef: float = key(1.0, "of loss=kl_cov: weight of the distance to the old policy on these tokens", ge=0)


@dataclass(frozen=True)
class CorrectionConfig:
    mode: Literal[
        "none", "token_tis", "sequence_tis", "geometric_tis", "token_mask", "sequence_mask", "geometric_mask", "icepop"
    ] = key("none", "against the engine's distribution differing from the trainer's")
    low: float = key(0.5, "of the masks and icepop: a ratio (trainer / engine) below it is left out", ge=0, le=1)
    high: float = key(2.0, "of the masks and icepop: a ratio above it is left out; of tis: it counts as this", ge=1)
    reject: Literal["none", "sequence", "geometric", "worst"] = key(
        "none", "leave out sequences whose product, geometric mean or any one of ratios is out of bounds; goes with any mode"
    )
    reject_low: float = key(0.5, "of reject: lower bound", ge=0, le=1)
    reject_high: float = key(2.0, "of reject: upper bound", ge=1)


@dataclass(frozen=True)
class DynamicConfig:
    """Dynamic sampling (DAPO): groups whose rewards are all equal are replaced by fresh prompts' groups."""

    rounds: int = key(0, "most times that a step generates; 0: off, every group is taken", ge=0)
    factor: float = key(1.0, "prompts generated for each group that is missing", ge=1)
    surplus: Literal["drop", "keep"] = key("drop", "groups with a signal that are left over: drop them, or keep them for the next step")
    short: Literal["train", "fill"] = key(
        "train", "groups still missing after the last round: train with fewer, or fill up with groups without a signal"
    )


@dataclass(frozen=True)
class OverlongConfig:
    """What a response near sampling.max_new_tokens costs (DAPO)."""

    buffer: float = key(
        0.0, "last part of sampling.max_new_tokens in which the reward falls linearly, by `penalty` at its end; 0: off", ge=0, le=1
    )
    penalty: float = key(1.0, "what a response that fills the buffer loses", ge=0)
    filter: bool = key(False, "leave truncated responses out of the loss (their rewards still count within their group)")


@dataclass(frozen=True)
class LengthConfig:
    form: Literal["none", "linear", "group"] = key(
        "none", "linear: coef * length / sampling.max_new_tokens off the reward; group: Kimi k1.5's, by length within the group"
    )
    coef: float = key(0.1, "weight of it", ge=0)


@dataclass(frozen=True)
class AlgoConfig:
    advantage: str = key("grpo", "grpo, rloo, opo, gpg, reinforce_pp, reinforce_pp_baseline, pass_at_k, remax, gae, or module:function")
    norm_std: bool = key(True, "divide a group's advantages by its standard deviation (False: Dr. GRPO)")
    pass_k: int = key(4, "of advantage=pass_at_k: the k whose best sample counts; below rollout.samples_per_prompt", ge=1)
    loss: str = key("ppo_clip", "ppo_clip, dual_clip, policy_gradient, gspo, cispo, sapo, clip_cov, kl_cov, or package.module:function")
    aggregation: Literal["token", "sequence", "sequence_sum"] = key(
        "token", "mean over tokens, or over sequences of each one's mean, or of its sum / length_constant"
    )
    length_constant: int = key(1, "of aggregation=sequence_sum: what each response's sum is divided by, e.g. sampling.max_new_tokens", ge=1)
    clip: ClipConfig = field(default_factory=ClipConfig)
    sapo: SapoConfig = field(default_factory=SapoConfig)
    cov: CovConfig = field(default_factory=CovConfig)
    gae: GaeConfig = field(default_factory=GaeConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    old_logp: Literal["recompute", "rollout"] = key(
        "recompute", "the ratio's denominator: the trainer's own log-probabilities, or the engine's (saves a forward; no mismatch/* then)"
    )
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    entropy: float = key(0.0, "coefficient of the entropy bonus", ge=0)
    drop_uniform: bool = key(False, "leave out groups whose rewards are all equal (they carry no signal)")
    dynamic: DynamicConfig = field(default_factory=DynamicConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    length: LengthConfig = field(default_factory=LengthConfig)


@dataclass(frozen=True)
class RewardFunctionConfig:
    name: str = key("", "exact, number, math, boxed, format, reasoning_gym, or package.module:function or file.py:function")
    weight: float = key(1.0, "the reward is the weighted sum")
    options: dict[str, Any] = key({}, "keyword arguments of the function")


@dataclass(frozen=True)
class RewardModelConfig:
    """A model that scores responses, beside the reward functions or instead of them."""

    where: Literal["mesh", "remote", "engine"] = key("mesh", "mesh: a forward on the actor's ranks; engine: in SGLang; remote: a service")
    path: str = key("", "of mesh and engine: Hugging Face folder of a *ForSequenceClassification with one label; empty: no reward model")
    url: str = key("", "of where=remote: where {prompts, responses, answers} are POSTed as JSON and {scores} comes back; empty: none")
    weight: float = key(1.0, "of the score, normalised and clipped, in the sum that is the reward")
    normalize: bool = key(False, "(score - mean) / std, over all scores of the run so far")
    clip: float = key(0.0, "bound on |score|, after normalize; 0: off", ge=0)
    micro_batch_tokens: int = key(0, "of where=mesh: most tokens in one packed forward; 0: as actor.micro_batch_tokens", ge=0)
    tp: int = key(1, "of where=engine: tensor parallel size; each group of tp consecutive ranks owns one engine", ge=1)
    mem_fraction: float = key(0.25, "of where=engine: part of the device's memory for weights and KV cache while it scores", gt=0, lt=1)
    batch: int = key(32, "of where=remote: most samples of one request", ge=1)
    concurrency: int = key(4, "of where=remote: requests on their way at once", ge=1)
    timeout_s: float = key(60.0, "of where=remote: seconds until a request counts as failed", gt=0)
    retries: int = key(20, "of where=remote: further tries of a request; then the run ends (code 5). 20: for 8 minutes", ge=0)
    backoff_s: float = key(1.0, "of where=remote: seconds before the first further try, twice that before the next, up to 30", ge=0)


@dataclass(frozen=True)
class RewardConfig:
    functions: list[RewardFunctionConfig] = key([], "at least one, unless there is a reward model")
    workers: int = key(2, "processes that compute rewards", ge=1)
    timeout_s: float = key(10.0, "wall-clock seconds for one sample; then its worker is killed, and the reward is `failed`", gt=0)
    failed: float = key(0.0, "the reward of a sample whose function failed")
    solved: float = key(1.0, "a sample counts as solved when the first function gives at least this: pass rates, pass@k, majority voting")
    model: RewardModelConfig = field(default_factory=RewardModelConfig)


@dataclass(frozen=True)
class SyncConfig:
    transport: Literal["auto", "pull", "buckets"] = key("auto", "pull: engines read the ranks' memory (one host); auto: pull if possible")
    bucket_mb: int = key(256, "size of each of the two buckets, MiB", ge=1)
    proof: bool = key(True, "compare a digest of each tensor after each sync")


@dataclass(frozen=True)
class EvalConfig:
    every: int = key(0, "steps between evaluations; 0: only where `before` and `after` say", ge=0)
    before: bool = key(True, "evaluate before the first step")
    after: bool = key(True, "evaluate after the last step")
    samples: int = key(1, "samples per prompt; with more than one also pass@k and majority voting, at a temperature above 0", ge=1)
    pass_k: list[int] = key([], "the k of pass@k; empty: 1, 2, 4, ... up to eval.samples")
    temperature: float = key(0.0, "0: greedy", ge=0)


GuardAction = Literal["warn", "lower_lr", "raise_kl", "rollback", "stop"]


@dataclass(frozen=True)
class GuardConfig:
    """Limits that a step is held to, and what is done when it is past one. 0: that limit is off."""

    kl: float = key(0.0, "limit on the distance to the reference model, train/ref_kl; 0: off", ge=0)
    kl_action: GuardAction = key("warn", "what is done past it")
    step_kl: float = key(0.0, "limit on how far one step moves the policy, train/kl; 0: off", ge=0)
    step_kl_action: GuardAction = key("warn", "what is done past it")
    reward_drop: float = key(0.0, "how far the mean reward of reward_window steps may fall below the best such mean; 0: off", ge=0)
    reward_drop_action: GuardAction = key("warn", "what is done past it")
    reward_window: int = key(5, "steps in such a mean", ge=1)
    nonfinite_action: GuardAction = key("warn", "when a loss, a gradient or a mean reward is not finite")
    mismatch: float = key(0.0, "limit on the difference between engine and trainer, mismatch/k3; 0: off", ge=0)
    mismatch_action: GuardAction = key("warn", "what is done past it")
    entropy: float = key(0.0, "least entropy of the policy, train/entropy, nats; 0: off", ge=0)
    entropy_action: GuardAction = key("warn", "what is done below it")
    factor: float = key(0.5, "lower_lr multiplies the learning rate by it, raise_kl divides algo.kl.coef by it", gt=0, lt=1)
    cooldown: int = key(5, "steps after an action in which the same guard only warns: what was done needs time to show", ge=0)
    max_actions: int = key(3, "actions other than warn in a run; the next one ends it as diverged", ge=0)


@dataclass(frozen=True)
class GenerateConfig:
    """Of launch/generate.py."""

    output: str = key("", "file to write; default: <run.root>/<run.name>/generated.<format>")
    format: Literal["jsonl", "parquet"] = key("jsonl", "of that file")
    kind: Literal["samples", "best_of_n", "pairs", "sft"] = key(
        "samples", "of a prompt's samples: all; the best; the best and the worst; those good enough to imitate"
    )
    samples: int = key(8, "drawn for each prompt", ge=1)
    threshold: float = key(1.0, "of kind=sft: the least reward")
    per_prompt: int = key(1, "of kind=sft: at most so many different responses to a prompt, the best first", ge=1)
    margin: float = key(0.5, "of kind=pairs: the least difference of the two rewards", gt=0)
    chunk: int = key(64, "prompts between two writes: what a kill can cost", ge=1)


@dataclass(frozen=True)
class OfflineConfig:
    """Steps from stored data (data.rollouts), before the online ones or instead of them."""

    steps: int = key(0, "steps 1 to this one learn from data.rollouts, later ones online", ge=0)
    objective: Literal["rl", "sft", "dpo"] = key(
        "rl", "rl: as online, off-policy; sft: imitate the responses; dpo: prefer `chosen` to `rejected`"
    )
    batch: int = key(0, "prompts (rl), responses (sft) or pairs (dpo) of a step; 0: rollout.prompts_per_step", ge=0)
    missing_logp: Literal["refuse", "recompute"] = key(
        "refuse", "of objective=rl: samples stored without log-probabilities; recompute: take the trainer's own, as if they were on-policy"
    )
    beta: float = key(0.1, "of objective=dpo: the larger, the closer to the reference model", gt=0)
    dpo_loss: Literal["sigmoid", "ipo"] = key("sigmoid", "of objective=dpo: DPO's own loss, or IPO's square")
    label_smoothing: float = key(0.0, "of dpo_loss=sigmoid: part of the pairs taken to be the wrong way round", ge=0, lt=0.5)


@dataclass(frozen=True)
class MonitorConfig:
    trackers: list[str] = key([], "tensorboard, wandb, trackio, swanlab; metrics.jsonl is always written")
    project: str = key("megaflow", "project name at the trackers")
    samples_per_step: int = key(16, "samples written to samples/step_N.jsonl; -1: all", ge=-1)
    plot: bool = key(True, "draw the learning curve at the end (curve.png)")
    prometheus_port: int = key(-1, "HTTP port of rank 0 where Prometheus finds the last step's metrics; 0: any; -1: none", ge=-1, le=65535)
    prometheus_host: str = key("127.0.0.1", "address it listens on; 0.0.0.0: all of the host's, for whoever can reach them")


# of a run (trainer/run.py), as they are measured and watched. start: before the first step; loop: between two phases
PHASES = ("start", "loop", "sync", "rollout", "reward", "logprob", "logic", "update", "eval", "save")


@dataclass(frozen=True)
class WatchdogConfig:
    """A run that does not move any more is ended with code 6, and a report of which ranks wait for which."""

    timeout_s: float = key(900.0, "seconds without a sign of progress (micro batch, sample, ...) after which a rank stalls; 0: off", ge=0)
    first_factor: float = key(1.5, "times that, in a phase's first time after a start: kernels are compiled, files are read", ge=1)
    phases: dict[str, float] = key({}, "other seconds for single phases, e.g. {update: 300, save: 0}: start, loop, sync, rollout, ...")


@dataclass(frozen=True)
class ProfileConfig:
    steps: str = key(
        "",
        "steps to trace, up to run.steps, e.g. 5-6 or 5,8-9: torch's trace of each rank (from the first to the last, gaps too) and all "
        "ranks' phases, in <run>/profile",
    )


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
    critic: CriticConfig = field(default_factory=CriticConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    offline: OfflineConfig = field(default_factory=OfflineConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
