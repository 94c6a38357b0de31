"""Megatron's optimizer and learning-rate schedule for an actor."""

from __future__ import annotations

import functools
import math

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megaflow.config.schema import ActorConfig
from megaflow.parallel.device import on_cuda


def wrap_for_training(model: torch.nn.Module, config: ActorConfig) -> DistributedDataParallel:
    """Gradient buffers in fp32, summed (not averaged) over the data-parallel ranks: the loss comes divided by the global count."""
    cfg = model.config
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=config.distributed_optimizer,
        overlap_grad_reduce=on_cuda(),
        grad_reduce_in_fp32=True,
    )
    wrapped = DistributedDataParallel(cfg, ddp_config, model)
    cfg.finalize_model_grads_func = functools.partial(_finalize)
    cfg.no_sync_func = wrapped.no_sync
    return wrapped


def _finalize(model, num_tokens=None, **kwargs) -> None:
    """Megatron would divide by num_tokens, which the loss has done."""
    finalize_model_grads(model, None, **kwargs)


def make_optimizer(model: DistributedDataParallel, config: ActorConfig, total_steps: int):
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
    optimizer = get_megatron_optimizer(optimizer_config, [model])
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


def guarded_step(optimizer) -> tuple[bool, float]:
    """One optimizer step; (False, norm) and nothing changed when the gradient norm is not finite. The norm is global, before clipping."""
    found_inf = optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if found_inf or not math.isfinite(norm):
        return False, norm
    optimizer.step()
    return True, norm
