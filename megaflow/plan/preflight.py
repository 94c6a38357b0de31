"""What can be checked before anything is allocated: model folder, tokenizer, data, user's functions, divisibility, disk. Touches no device.

Every check says what it found (a fact for --dry-run) or what is wrong; all mistakes are raised together.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaflow.config.checks import registry_at
from megaflow.config.loading import Loaded
from megaflow.config.schema import Config
from megaflow.plan.safetensors import WeightFiles, is_converted, read_weight_files
from megaflow.shape import ModelShape, read_shape
from megaflow.types import ConfigError, PreflightError, UserError

GIB = 2**30


@dataclass
class Inspection:
    """What the checks share: the configuration, what was read so far, and what was found wrong."""

    loaded: Loaded
    world_size: int
    shape: ModelShape | None = None
    tokenizer: Any = None
    errors: list[UserError] = field(default_factory=list)

    @property
    def config(self) -> Config:
        return self.loaded.config

    @property
    def model(self) -> str:
        """The model's name in messages."""
        return Path(self.config.model.path).name

    def fail(self, message: str, *keys: str) -> None:
        self.errors.append(PreflightError(f"{self.loaded.blame(*keys)}: {message}"))

    @contextlib.contextmanager
    def collecting(self, *keys: str) -> Iterator[None]:
        """An error of the user's is collected, with the place of `keys` before it."""
        try:
            yield
        except UserError as error:
            self.errors.append(type(error)(f"{self.loaded.blame(*keys)}: {error}"))


def check(loaded: Loaded, world_size: int, checks: list[Callable[[Inspection], Iterator[str]]] | None = None) -> list[str]:
    """Facts for a person, one a line. checks: None: all of them.

    Raises PreflightError with one line for each thing that does not fit (ConfigError if a function that the configuration names
    cannot be loaded).
    """
    inspection = Inspection(loaded, world_size)
    facts = [fact for each in (CHECKS if checks is None else checks) for fact in each(inspection)]
    if inspection.errors:
        kind = ConfigError if any(isinstance(error, ConfigError) for error in inspection.errors) else PreflightError
        raise kind("\n".join(dict.fromkeys(str(error) for error in inspection.errors)))
    return facts


def model_shape(found: Inspection) -> Iterator[str]:
    with found.collecting("model.path"):
        found.shape = shape = read_shape(found.config.model.path)
        size = f"{shape.num_parameters / 1e9:.2f}B" if shape.num_parameters >= 1e8 else f"{shape.num_parameters / 1e6:.2f}M"
        heads = f"{shape.num_heads} heads, {shape.num_kv_heads} key/value heads"
        experts = f"{shape.experts.count} experts of which {shape.experts.top_k} a token, " if shape.experts else ""
        layers = f"{shape.num_layers} layers, {heads}, {experts}{found.config.model.dtype}"
        yield f"model: {found.model}, {shape.family}, {size} parameters, {layers}"


def weight_files(found: Inspection) -> Iterator[str]:
    """Of a Hugging Face folder; trainer/start_checks.py looks at a converted one."""
    if found.shape is None or is_converted(found.config.model.path):
        return
    with found.collecting("model.path"):
        files = read_weight_files(Path(found.config.model.path))
        yield f"weights: {len(files.tensors)} tensors in {files.num_files} file(s), {files.num_bytes / GIB:.3f} GiB"
        _all_layers_are_there(found, files)


def _all_layers_are_there(found: Inspection, files: WeightFiles) -> None:
    assert found.shape is not None
    layers = {name.split(".")[2] for name in files.tensors if name.startswith("model.layers.")}
    missing = [str(layer) for layer in range(found.shape.num_layers) if str(layer) not in layers]
    if missing:
        message = f"config.json says {found.shape.num_layers} layers, the weights lack layer {', '.join(missing)}"
        found.fail(f"{found.config.model.path}: {message}", "model.path")
    if "model.embed_tokens.weight" not in files.tensors:
        found.fail(f"{found.config.model.path}: the weights have no model.embed_tokens.weight", "model.path")


def actor_divides(found: Inspection) -> Iterator[str]:
    if found.shape is None:
        return
    shape, tp, pp = found.shape, found.config.parallel.tp, found.config.parallel.pp
    if odd := [f"{name}={size}" for name, size in _split_over_tp(shape).items() if size % tp]:
        found.fail(f"parallel.tp={tp} does not divide {' and '.join(odd)} of {found.model}; use {_sizes(shape)}", "parallel.tp")
    if shape.num_layers % pp:
        usable = _or([n for n in range(1, shape.num_layers + 1) if shape.num_layers % n == 0])
        found.fail(f"parallel.pp={pp} does not divide num_hidden_layers={shape.num_layers} of {found.model}; use {usable}", "parallel.pp")
    elif shape.num_layers // pp % (vpp := found.config.parallel.vpp):
        usable = _or([n for n in range(1, shape.num_layers // pp + 1) if shape.num_layers // pp % n == 0])
        found.fail(f"parallel.vpp={vpp} does not divide the {shape.num_layers // pp} layers of a stage; use {usable}", "parallel.vpp")
    yield f"actor: tp {tp}, pp {pp}, {shape.num_layers // pp} layers a stage"


def experts_divide(found: Inspection) -> Iterator[str]:
    if found.shape is None:
        return
    parallel, experts = found.config.parallel, found.shape.experts
    if experts is None:
        for name in ("ep", "etp"):
            if getattr(parallel, name) > 1:
                message = f"parallel.{name}={getattr(parallel, name)} divides experts, and {found.model} has none; use 1"
                found.fail(message, f"parallel.{name}")
        return
    if experts.count % parallel.ep:
        usable = _or([n for n in range(1, experts.count + 1) if experts.count % n == 0])
        found.fail(f"parallel.ep={parallel.ep} does not divide the {experts.count} experts of {found.model}; use {usable}", "parallel.ep")
    if experts.ffn_size % parallel.etp:
        found.fail(f"parallel.etp={parallel.etp} does not divide the expert's size {experts.ffn_size} of {found.model}", "parallel.etp")
    if parallel.tp > 1 and not parallel.sp:
        message = f"parallel.tp={parallel.tp} with the experts of {found.model} needs parallel.sp=true"
        found.fail(f"{message}: else each rank would send every token to them", "parallel.tp", "parallel.sp")
    yield f"experts: ep {parallel.ep}, etp {parallel.etp}, {experts.count // parallel.ep} a rank"


def router_replay_fits(found: Inspection) -> Iterator[str]:
    wanted, backend = found.config.actor.router_replay, found.config.rollout.backend
    if wanted == "none" or found.shape is None:
        return
    if found.shape.experts is None:
        message = f"actor.router_replay={wanted} is about the routes of tokens to experts, and {found.model} has none; use none"
        found.fail(message, "actor.router_replay")
        return
    if ":" in backend:
        with found.collecting("rollout.backend", "actor.router_replay"):
            if not getattr(registry_at("megaflow.rollout:BACKENDS").get(backend), "returns_routes", False):
                raise ConfigError(f"actor.router_replay={wanted} needs returns_routes=True of a rollout backend; {backend} has it not")
    layers = sum(found.shape.experts.layers)
    size = layers * found.shape.experts.top_k * (1 if found.shape.experts.count <= 256 else 2)
    yield f"router replay: {wanted}, {size} bytes of routes a token"


def other_models_divide(found: Inspection) -> Iterator[str]:
    """The critic's and the reward model's folders; both are laid out as the actor is, unless an engine has the reward model."""
    tp, pp, reward = found.config.parallel.tp, found.config.parallel.pp, found.config.reward.model
    for key, path in (("critic.path", found.config.critic.path), ("reward.model.path", reward.path)):
        if not path or (key == "reward.model.path" and reward.where == "engine"):
            continue
        with found.collecting(key):
            shape = read_shape(path)
            odd = [f"{name}={size}" for name, size in _split_over_tp(shape).items() if size % tp]
            odd += [f"num_hidden_layers={shape.num_layers} (pp={pp})"] if shape.num_layers % pp else []
            if odd:
                raise PreflightError(f"{path}: parallel.tp={tp} or pp={pp} does not divide {' and '.join(odd)}")
            yield f"{key}: {Path(path).name}, {shape.family}, {shape.num_layers} layers"


def reward_engine_takes(found: Inspection) -> Iterator[str]:
    """The reward model's folder, as SGLang would read it: it would take a folder without a head, and score with a random one."""
    from megaflow.rewards.model import ENGINE_ARCHITECTURES

    model = found.config.reward.model
    if model.where != "engine" or not model.path:
        return
    if importlib.util.find_spec("sglang") is None:
        found.fail("reward.model.where=engine needs sglang, which is not installed; use mesh, or install it", "reward.model.where")
    with found.collecting("reward.model.path"):
        shape = read_shape(model.path)
        names = json.loads((Path(model.path) / "config.json").read_text()).get("architectures") or ["nothing"]
        if not set(names) & set(ENGINE_ARCHITECTURES):
            text = f"{model.path}: architectures says {', '.join(names)}; an engine scores {_or(ENGINE_ARCHITECTURES)}"
            raise PreflightError(f"{text}. reward.model.where=mesh takes every family that the actor can be")
        if odd := [f"{name}={size}" for name, size in _split_over_tp(shape).items() if size % model.tp]:
            raise PreflightError(f"{model.path}: reward.model.tp={model.tp} does not divide {' and '.join(odd)}")
        _one_label(model.path, shape)
        yield f"reward engines: {found.world_size // model.tp} of {model.tp} rank(s), {Path(model.path).name}, {shape.family}"


def _one_label(path: str, shape: ModelShape) -> None:
    head = read_weight_files(Path(path)).shapes.get("score.weight")
    if head != (1, shape.hidden_size):
        is_what = "not there" if head is None else list(head)
        raise PreflightError(f"{path}: score.weight is {is_what}, a scalar head is {[1, shape.hidden_size]} (num_labels=1)")


def engine_divides(found: Inspection) -> Iterator[str]:
    if found.shape is None:
        return
    shape, tp = found.shape, found.config.rollout.tp
    odd = [f"{name}={size}" for name, size in _split_over_tp(shape).items() if size % tp]
    if tp % shape.num_kv_heads == 0:  # with more ranks than key/value heads, the engine copies them
        odd = [each for each in odd if not each.startswith("num_key_value_heads=")]
    if odd:
        found.fail(f"rollout.tp={tp} does not divide {' and '.join(odd)} of {found.model}; use {_sizes(shape)}", "rollout.tp")
    _engine_experts(found, shape)
    yield f"engines: {found.world_size // tp} of {tp} rank(s), backend {found.config.rollout.backend}"


def _engine_experts(found: Inspection, shape: ModelShape) -> None:
    rollout, experts = found.config.rollout, shape.experts
    if experts is None and rollout.ep > 1:
        found.fail(f"rollout.ep={rollout.ep} divides experts, and {found.model} has none; use 1", "rollout.ep")
    if experts is not None and rollout.ep > 1 and experts.count % rollout.ep:
        found.fail(f"rollout.ep={rollout.ep} does not divide the {experts.count} experts of {found.model}", "rollout.ep")
    if experts is not None and rollout.ep == 1 and experts.ffn_size % rollout.tp:
        found.fail(f"rollout.tp={rollout.tp} does not divide the expert's size {experts.ffn_size} of {found.model}", "rollout.tp")
    if experts is not None and shape.latent is None and rollout.backend == "sglang" and not all(experts.layers):
        dense = f"{experts.layers.count(False)} of the {shape.num_layers} layers of {found.model} have none"
        found.fail(f"rollout.backend=sglang gives every layer of {shape.family} experts, and {dense}; use hf", "rollout.backend")


def _split_over_tp(shape: ModelShape) -> dict[str, int]:
    """Sizes in config.json that tensor parallelism cuts. Experts are cut by etp instead."""
    sizes = {"num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads}
    if not all(shape.is_sparse(i) for i in range(shape.num_layers)):
        sizes["intermediate_size"] = shape.ffn_size
    if shape.experts and shape.experts.shared_ffn_size:
        sizes["the shared expert's size"] = shape.experts.shared_ffn_size
    if shape.latent:
        sizes["kv_lora_rank + qk_rope_head_dim"] = shape.latent.kv_rank + shape.latent.rope_dim
        sizes |= {"q_lora_rank": shape.latent.q_rank} if shape.latent.q_rank else {}
    return sizes


def _sizes(shape: ModelShape) -> str:
    """Tensor parallel sizes that divide everything."""
    return _or([tp for tp in range(1, shape.num_kv_heads + 1) if not any(size % tp for size in _split_over_tp(shape).values())])


def lengths_fit(found: Inspection) -> Iterator[str]:
    if found.shape is None:
        return
    prompt, response, most = found.config.data.max_prompt_tokens, found.config.sampling.max_new_tokens, found.shape.max_positions
    if prompt + response > most:
        message = f"data.max_prompt_tokens={prompt} + sampling.max_new_tokens={response} = {prompt + response}"
        keys = ("data.max_prompt_tokens", "sampling.max_new_tokens")
        found.fail(f"{message} exceeds max_position_embeddings={most} of {found.model}", *keys)
    yield f"lengths: {prompt} + {response} of {most} positions"


def tokenizer_loads(found: Inspection) -> Iterator[str]:
    from megaflow.data.prompts import load_tokenizer

    if found.shape is None:
        return
    with found.collecting("model.path"):
        found.tokenizer = tokenizer = load_tokenizer(found.config.model.path)
        if len(tokenizer) > found.shape.vocab_size:
            message = f"the tokenizer of {found.model} has {len(tokenizer)} tokens, more than vocab_size={found.shape.vocab_size}"
            found.fail(message, "model.path")
        if found.config.data.template == "chat" and not tokenizer.chat_template:
            message = f"data.template=chat, but the tokenizer of {found.model} has no chat template; use data.template=plain"
            found.fail(message, "data.template", "model.path")
            found.tokenizer = None
        yield f"tokenizer: {len(tokenizer)} tokens, template {found.config.data.template}"


def data_opens(found: Inspection) -> Iterator[str]:
    for part in ("train", "eval"):
        for number, source in enumerate(getattr(found.config.data, part)):
            key = f"data.{part}.{number}"
            with found.collecting(f"{key}.path"):
                yield f"{key}: {source.label}, {_first_record(found, source, key)}"


def _first_record(found: Inspection, source: Any, key: str) -> str:
    """Reads one record and renders it. Raises what the data's readers raise."""
    from megaflow.data.prompts import encode_records
    from megaflow.data.sources import read_source

    data = found.config.data
    record = next(read_source(source, key, data.prompt_key, data.answer_key), None)
    if record is None:
        raise PreflightError(f"{source.path} holds no prompts")
    comparing = [each.name for each in found.config.reward.functions if ":" not in each.name and each.name != "format"]
    if comparing and not record.has_answer:
        rewards = ", ".join(comparing)
        raise PreflightError(f"{record.where}: no key {data.answer_key!r} (data.answer_key), which reward {rewards} compares with")
    if found.tokenizer is None:
        return "opens"
    prompts, counts = encode_records([record], found.tokenizer, data)
    if counts["empty"]:
        raise PreflightError(f"{record.where}: the first prompt is empty")
    return f"first prompt has {len(prompts[0].tokens)} tokens" if prompts else f"first prompt exceeds {data.max_prompt_tokens} tokens"


def reward_functions_load(found: Inspection) -> Iterator[str]:
    from megaflow.rewards.worker import load_functions

    for number, reward in enumerate(found.config.reward.functions):
        key = f"reward.functions.{number}"
        with found.collecting(f"{key}.name", f"{key}.options"):
            loaded = load_functions([(reward.name, reward.name, reward.options)])
            if isinstance(loaded, str):
                raise ConfigError(f"{key}: {loaded}")
            yield f"{key}: {reward.name} loads"


def own_functions_load(found: Inspection) -> Iterator[str]:
    """What names a function of the user's own; importing the built-in algorithms would load torch and show nothing."""
    algo, rollout = found.config.algo, found.config.rollout
    chosen = [
        ("algo.advantage", algo.advantage, "megaflow.algo:ADVANTAGES"),
        ("algo.loss", algo.loss, "megaflow.algo:LOSSES"),
        ("rollout.backend", rollout.backend, "megaflow.rollout:BACKENDS"),
    ]
    for key, name, registry in chosen:
        if ":" not in name:
            continue
        with found.collecting(key):
            function = registry_at(registry).get(name)
            if not callable(function):
                raise ConfigError(f"{key}: {name} is a {type(function).__name__}, not a function")
            yield f"{key}: {name} loads"


def trackers_installed(found: Inspection) -> Iterator[str]:
    for name in found.config.monitor.trackers:
        if ":" in name:
            with found.collecting("monitor.trackers"):
                tracker = registry_at("megaflow.monitor:TRACKERS").get(name)
                if not callable(tracker):
                    raise ConfigError(f"monitor.trackers: {name} is a {type(tracker).__name__}, not a class or function")
                yield f"tracker: {name} loads"
        elif importlib.util.find_spec(name) is None:
            found.fail(f"monitor.trackers: {name} is not installed: pip install {name}", "monitor.trackers")
        else:
            yield f"tracker: {name}"


def run_folder_has_room(found: Inspection) -> Iterator[str]:
    run = found.config.run
    folder = Path(run.root, run.name).absolute()
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    if not existing.is_dir():
        found.fail(f"run.root={run.root}: {existing} is a file, not a folder", "run.root", "run.name")
        return
    if not os.access(existing, os.W_OK):
        found.fail(f"run.root={run.root}: no permission to write in {existing}", "run.root", "run.name")
    free, needed = shutil.disk_usage(existing).free, _checkpoint_bytes(found)
    if free < needed:
        message = f"{existing} has {free / GIB:.1f} GiB free, and the checkpoints of this run take {needed / GIB:.1f} GiB"
        best = f", run.keep_best={run.keep_best}" if run.keep_best else ""
        advice = f"run.keep_last={run.keep_last}{best} and the one being written; free some or set another run.root"
        found.fail(f"{message} ({advice})", "run.root", "run.keep_last")
    yield f"run: {Path(run.root, run.name)}, {free / GIB:.0f} GiB free, checkpoints take {needed / GIB:.3g} GiB"


def _checkpoint_bytes(found: Inspection) -> int:
    """Parameters, fp32 main weights (16-bit training only) and two fp32 moments, of the checkpoints kept and the one being written."""
    run, is_16_bit = found.config.run, found.config.model.dtype == "bfloat16"
    parameters = found.shape.num_parameters if found.shape else 0
    per_parameter = (2 + 4 if is_16_bit else 4) + 8
    saves = run.save_final or 0 < run.save_every <= run.steps
    return parameters * ((run.keep_last + run.keep_best + 1) * per_parameter * saves + (2 if is_16_bit else 4) * run.export_hf)


def _or(sizes: Iterable[Any]) -> str:
    texts = [str(size) for size in sizes]
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " or " + texts[-1]


CHECKS_OF_SIZES: list[Callable[[Inspection], Iterator[str]]] = [  # what needs config.json alone
    model_shape,
    actor_divides,
    experts_divide,
    router_replay_fits,
    other_models_divide,
    engine_divides,
    lengths_fit,
]
CHECKS: list[Callable[[Inspection], Iterator[str]]] = [
    model_shape,
    weight_files,
    actor_divides,
    experts_divide,
    router_replay_fits,
    other_models_divide,
    reward_engine_takes,
    engine_divides,
    lengths_fit,
    tokenizer_loads,
    data_opens,
    reward_functions_load,
    own_functions_load,
    trackers_installed,
    run_folder_has_room,
]
