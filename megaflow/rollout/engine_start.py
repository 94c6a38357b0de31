"""Start SGLang's engine in the host process."""

from __future__ import annotations

import time
from typing import Any

from megaflow.rollout.engine_args import engine_args
from megaflow.rollout.engine_clock import SECONDS
from megaflow.rollout.engine_warm import WarmProcess, processes_from


def engine_class(warm: list[WarmProcess]) -> type:
    """SGLang's Engine, with schedulers that have imported SGLang already (engine_warm.py).

    Without the detokenizer process when there is nothing to detokenize: with skip_tokenizer_init the scheduler does not send to it, and
    it would import all of SGLang once more (sglang 0.5.15).
    """
    from sglang.srt.entrypoints import engine as module

    class TokenEngine(module.Engine):
        @classmethod
        def _launch_scheduler_processes(cls, server_args, port_args, run_scheduler_process_func):
            with processes_from(warm, module):
                return super()._launch_scheduler_processes(server_args, port_args, run_scheduler_process_func)

        @classmethod
        def _launch_detokenizer_subprocesses(cls, server_args, port_args, run_detokenizer_process_func):
            if server_args.skip_tokenizer_init:
                return [], []
            return super()._launch_detokenizer_subprocesses(server_args, port_args, run_detokenizer_process_func)

    return TokenEngine


def start_engine(order: Any, loaders: list[str], warm: list[WarmProcess]) -> tuple[Any, dict[str, Any]]:
    """(engine, {"kv_tokens": ..., "seconds": {part of the start: seconds}}). Raises what SGLang raises, and MemoryError when the KV cache
    that was asked for did not fit."""
    make = engine_class(warm)
    start = time.time()
    args = engine_args(order, loaders)
    wanted = args.max_total_tokens
    arguments_s = time.time() - start
    engine = make(server_args=args)
    info = engine._scheduler_init_result.scheduler_infos[0]
    got = info["max_total_num_tokens"]
    if order.device >= 0 and wanted and got < 0.98 * wanted:  # SGLang takes what is free, and would say so in a warning only
        engine.shutdown()
        fewer = "" if order.scores else " (or rollout.max_tokens)"
        raise MemoryError(
            f"its KV cache was to hold {wanted} tokens, and the free device memory is enough for {got} only; "
            f"lower {order.section}.mem_fraction{fewer}, or give the trainer less (parallel.tp, actor.offload)"
        )
    return engine, {"kv_tokens": got, "seconds": {"arguments": arguments_s, **info.get(SECONDS, {})}}
