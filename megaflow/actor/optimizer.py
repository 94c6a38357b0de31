"""Megatron's optimizer and learning-rate schedule for an actor."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megaflow.actor.chunks import Chunks
from megaflow.config.schema import ActorConfig
from megaflow.monitor.progress import mark
from megaflow.parallel.device import device, on_cuda

CLIP_EPSILON = 1e-6  # as Megatron's: the gradient is scaled by limit / (norm + epsilon)
OVERLAP_ON_CPU = False  # gloo gains nothing by it; a test turns it on, to compare the numbers


def wrap_for_training(model: Chunks, config: ActorConfig) -> Chunks:
    """Gradient buffers in fp32, summed (not averaged) over the data-parallel ranks: the loss comes divided by the global count.

    With `overlap` a bucket of gradients is summed as soon as the last micro batch has them all. (The all-gather of the new parameters is
    not hidden in the next forward pass as well: the sync of the engine's weights follows the step, and would have to wait for it.)
    """
    cfg = model.config
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=config.distributed_optimizer,
        overlap_grad_reduce=config.overlap and (on_cuda() or OVERLAP_ON_CPU),
        grad_reduce_in_fp32=True,
    )
    wrapped = model.map(lambda chunk: DistributedDataParallel(cfg, ddp_config, chunk))
    cfg.finalize_model_grads_func = functools.partial(_finalize)
    cfg.no_sync_func = wrapped[0].no_sync if len(wrapped) == 1 else [chunk.no_sync for chunk in wrapped]
    return wrapped


def _finalize(model, num_tokens=None, **kwargs) -> None:
    """Megatron would divide by num_tokens, which the loss has done."""
    mark("gradient reduction")
    finalize_model_grads(model, None, **kwargs)


def make_optimizer(model: Chunks, config: ActorConfig, total_steps: int):
    """(optimizer, scheduler). `total_steps`: optimizer steps of the whole run, where the decay ends."""
    is_16_bit = model.config.bf16
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        bf16=is_16_bit,
        params_dtype=model.config.params_dtype,
        use_distributed_optimizer=config.distributed_optimizer,
        clip_grad=config.clip_grad,
        log_num_zeros_in_grad=False,
    )
    optimizer = get_megatron_optimizer(optimizer_config, model)
    prefill_adam_state(optimizer)
    return optimizer, make_scheduler(optimizer, config, total_steps)


def make_scheduler(optimizer, config: ActorConfig, total_steps: int) -> OptimizerParamScheduler:
    """Learning rate of optimizer step k = 0, 1, ...: lr * k / warm-up steps, then from lr down to min_lr as lr_decay says."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if config.lr_warmup_steps else config.lr,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.lr_warmup_steps,
        lr_decay_steps=max(total_steps, config.lr_warmup_steps + 1),
        lr_decay_style=config.lr_decay,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=total_steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
    )


def scale_learning_rate(optimizer, scheduler: OptimizerParamScheduler, config: ActorConfig, scale: float) -> None:
    """The whole schedule, warm-up and decay, times `scale` of what the configuration says, from the next optimizer step on."""
    scheduler.max_lr, scheduler.min_lr = config.lr * scale, config.min_lr * scale
    for group in optimizer.param_groups:
        group["max_lr"], group["min_lr"] = scheduler.max_lr, scheduler.min_lr
    scheduler.init_lr = 0.0 if config.lr_warmup_steps else scheduler.max_lr
    scheduler.step(increment=0)


def torch_optimizers(optimizer) -> list[torch.optim.Optimizer]:
    inner = [o.optimizer for o in getattr(optimizer, "chained_optimizers", [optimizer])]
    return [o for o in inner if o is not None]


def prefill_adam_state(optimizer) -> None:
    """torch's Adam makes its state at the first step; a checkpoint of Megatron needs it to exist before (and to load into)."""
    for adam in torch_optimizers(optimizer):
        for group in adam.param_groups:
            for p in group["params"]:
                if not adam.state[p]:
                    zeros = torch.zeros_like(p.data)
                    adam.state[p].update(step=torch.tensor(0.0), exp_avg=zeros, exp_avg_sq=zeros.clone())


def take_fused_kernel(optimizer) -> None:
    """On CUDA torch's Adam goes through gradient, parameter and both moments once, without temporaries; it wants `step` on the device.

    To be called again before a step: a checkpoint brings its own settings and its steps on the host. apex's and Transformer Engine's
    Adam are fused already.
    """
    for adam in torch_optimizers(optimizer):
        if not (on_cuda() and isinstance(adam, torch.optim.Adam)):  # AdamW is one
            continue
        for group in adam.param_groups:
            group.update(fused=True, foreach=False)
            for p in group["params"]:
                if adam.state[p]["step"].device != p.device:
                    adam.state[p]["step"] = adam.state[p]["step"].to(p.device)


@torch.no_grad()
def guarded_step(optimizer) -> tuple[bool, float]:
    """One optimizer step; (False, norm) and nothing changed when the gradient norm is not finite. The norm is global, before clipping.

    The device is asked once, for the norm. Megatron's own step asks once for every parameter where neither apex nor Transformer Engine is
    there, and clips through a temporary of each gradient.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    found_inf = optimizer.prepare_grads()
    norm = float(sum(_squared_norm(part) for part in parts).sqrt())
    if found_inf or not math.isfinite(norm):
        return False, norm
    limit = optimizer.config.clip_grad
    if 0 < limit < norm + CLIP_EPSILON:
        for gradients in _gradients(parts):
            torch._foreach_mul_(gradients, limit / (norm + CLIP_EPSILON))
    take_fused_kernel(optimizer)
    optimizer.step_with_ready_grads()
    return True, norm


def _squared_norm(part) -> Tensor:
    """[] fp32, over all ranks that hold a part of these gradients; a parameter that several tp ranks have counts once."""
    gradients = part.get_grads_for_grad_norm()
    norms = torch._foreach_norm(gradients) if gradients else [torch.zeros((), device=device())]
    total = torch.stack([n.float() for n in norms]).square().sum()
    dist.all_reduce(total, group=part.get_grad_stats_parallel_group())
    return total


def _gradients(parts) -> Iterator[list[Tensor]]:
    for part in parts:
        if found := [p.grad for p in part.get_parameters() if p.grad is not None]:
            yield found
