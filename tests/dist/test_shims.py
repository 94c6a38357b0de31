"""What we change in Megatron-core and SGLang is still needed. A failure here means: upstream has mended it, remove the shim."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ranks import ROOT, clean_env

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these shims are for machines without a GPU")


def run(code: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


BUILD = """
import os
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
import torch, torch.distributed as dist
{before}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from megatron.core import parallel_state
parallel_state.initialize_model_parallel(1, 1)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
model_parallel_cuda_manual_seed(1)
print("built")
"""


def test_megatron_still_needs_cuda_calls_mapped_to_the_cpu():
    code, output = run(BUILD.format(before=""))
    assert code != 0 and "built" not in output
    code, output = run(BUILD.format(before="from megaflow.parallel import megatron_shim; megatron_shim.install()"))
    assert code == 0 and "built" in output, output[-2000:]


def test_importing_megatron_would_still_load_a_compiler():
    code = "{first}; import sys, megatron.core.models.gpt, megatron.core.optimizer; print('torch._inductor' in sys.modules)"
    (_, plain), (_, mended) = (run(code.format(first=first)) for first in ("import torch", "import megaflow.actor.actor"))
    assert "True" in plain.split() and "False" in mended.split(), plain + mended


def test_gloo_still_refuses_split_sizes_that_are_tensors():
    code = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
{}
sizes = torch.tensor([3])
out = torch.empty(3)
dist.all_to_all_single(out, torch.arange(3.0), sizes, sizes)
print(out.tolist())
"""
    assert run(code.format(""))[0] != 0
    code, output = run(code.format("from megaflow.parallel import megatron_shim; megatron_shim.install()"))
    assert code == 0 and "[0.0, 1.0, 2.0]" in output, output[-2000:]


def test_saving_a_checkpoint_would_still_start_a_manager_process():
    import megaflow.actor  # noqa: F401  installs the shim
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async

    assert "Manager()" in inspect.getsource(filesystem_async.get_write_results_queue)
    assert "_results_queue" in inspect.getsource(filesystem_async.get_write_results_queue)


def test_megatrons_latent_attention_still_loses_part_of_a_gradient_over_tp():
    """The rotary part of k is gathered by an operation whose backward pass keeps this rank's part and sums nothing; with tp=2 the gradient
    of the compressed kv's projection was then off by a fifth of its largest entry."""
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    assert "gather_from_tensor_model_parallel_region(kv_combined)" in inspect.getsource(MLASelfAttention.get_query_key_value_tensors)
    backward = inspect.getsource(mappings._GatherFromModelParallelRegion.backward)
    assert "_split_along_last_dim" in backward and "reduce" not in backward


def test_sglangs_seeded_sampling_still_needs_triton():
    from sglang.srt.layers.utils.hash import murmur_hash32

    seeds, positions, columns = (torch.arange(4) for _ in range(3))
    with pytest.raises(Exception):  # noqa: B017  whatever Triton says on a machine without a GPU
        murmur_hash32(seeds, positions, columns)


def test_sglang_still_refuses_deterministic_inference_with_its_cpu_attention():
    code = """
import os
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
from sglang.srt.server_args import ServerArgs
ServerArgs(model_path={!r}, device="cpu", attention_backend="torch_native", enable_deterministic_inference=True)
"""
    import tempfile
    from pathlib import Path

    from tests import tiny

    with tempfile.TemporaryDirectory() as folder:
        code, output = run(code.format(tiny.model_folder(Path(folder) / "m", "qwen2", True, layers=2)))
    assert code != 0 and "torch_native" in output, output[-2000:]


def test_sglangs_experts_on_cpu_still_do_not_expect_those_of_other_ranks():
    from types import SimpleNamespace

    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native

    from megaflow.rollout.experts_on_cpu import weighted_sum

    g = torch.Generator().manual_seed(0)
    x, w13, w2 = (torch.randn(*size, generator=g) for size in ((3, 8), (2, 12, 8), (2, 8, 6)))
    weights, chosen = torch.rand(3, 2, generator=g), torch.tensor([[0, -1], [1, 0], [-1, -1]])
    layer = SimpleNamespace(num_experts=4, w13_weight=w13, w2_weight=w2)
    with pytest.raises((RuntimeError, IndexError)):
        config = SimpleNamespace(apply_router_weight_on_input=False, activation="silu", gemm1_alpha=None)
        moe_forward_native(layer, x, (weights, chosen, None), config)
    expected = torch.zeros(3, 8, dtype=torch.float64)
    for t, k in ((0, 0), (1, 0), (1, 1)):
        gate, up = (w13[chosen[t, k]].double() @ x[t].double()).chunk(2)
        expected[t] += weights[t, k].double() * (w2[chosen[t, k]].double() @ (gate / (1 + (-gate).exp()) * up))
    torch.testing.assert_close(weighted_sum(x, weights, chosen, w13, w2).double(), expected, rtol=1e-5, atol=1e-5)


def test_sglang_still_hands_out_the_buffer_into_which_the_next_forward_records_its_routes(monkeypatch):
    from types import SimpleNamespace

    from sglang.srt.managers import scheduler
    from sglang.srt.state_capturer import routed_experts

    from megaflow.rollout.routes import own_copy

    source = inspect.getsource(scheduler.Scheduler.run_batch)
    assert "with self.copy_stream_ctx:\n" in source.partition("self.copy_stream.wait_stream(self.forward_stream)")[2][:80]
    made = routed_experts.RoutedExpertsCapturer.__new__(routed_experts.RoutedExpertsCapturer)
    made.topk_size, made.device_cache = 2, SimpleNamespace(buffer=torch.arange(24, dtype=torch.int32).view(4, 3, 2))
    batch = SimpleNamespace(out_cache_loc=torch.arange(2))
    monkeypatch.setattr(routed_experts, "is_dp_attention_enabled", lambda: False)
    found = made._get_local_slice(batch, False, None)
    assert found.data_ptr() == made.device_cache.buffer.data_ptr()
    mine = own_copy(found, made, batch, False, None)
    made.device_cache.buffer.zero_()
    assert mine.tolist() == torch.arange(12).view(2, 3, 2).tolist()


def test_sglang_still_pins_memory_for_routes_and_still_forgets_to_number_mixtrals_routers():
    from sglang.srt.models import mixtral
    from sglang.srt.state_capturer import base

    assert "pin_memory=True" in inspect.getsource(base.BaseHostCache.__init__)
    routers = inspect.getsource(mixtral.MixtralMoE.__init__).partition("TopK(")[2].partition(")")[0]
    assert "renormalize" in routers and "layer_id" not in routers


def test_sglangs_qwen_heads_still_have_a_bias_that_transformers_has_not():
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    models = Path(importlib.util.find_spec("sglang").origin).parent / "srt/models"
    for name in ("qwen2_classification", "qwen3_classification"):
        assert "nn.Linear(config.hidden_size, config.num_labels)\n" in (models / f"{name}.py").read_text(), name
    small = Qwen2Config(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, vocab_size=8)
    assert Qwen2ForSequenceClassification(small).score.bias is None


def test_a_released_cpu_engine_still_keeps_its_memory_without_the_plugin():
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    assert not TorchMemorySaverAdapter.create(enable=False).enabled


def test_the_hash_of_the_plugin_is_uniform_and_depends_on_each_input():
    from megaflow.rollout.sglang_plugin import hash_columns

    seeds, positions = torch.arange(8), torch.arange(8) * 3
    h = hash_columns(seeds, positions, torch.arange(4096))
    assert h.shape == (8, 4096) and h.min() >= 0 and h.max() < 2**32
    u = h.double() / 2**32
    assert abs(u.mean() - 0.5) < 4 / (12 * u.numel()) ** 0.5, "within four standard errors of 1/2"
    bits = torch.stack([(h >> b) & 1 for b in range(32)]).double().mean((1, 2))
    assert (bits - 0.5).abs().max() < 4 * 0.5 / h.numel() ** 0.5
    assert len({tuple(row) for row in h.tolist()}) == 8
    assert not torch.equal(h, hash_columns(seeds, positions + 1, torch.arange(4096)))


def test_sglang_still_needs_help_with_latent_attention_and_shared_experts():
    """The kernels of another model are imported, rotary on CPU knows yarn only, and what is cut out of kv_b_proj is no parameter."""
    folder = Path(importlib.util.find_spec("sglang").origin).parent
    assert "from sglang.jit_kernel.dsa import" in (folder / "srt/layers/attention/dsa/dsa_indexer.py").read_text()
    assert "import cutlass" in (folder / "jit_kernel/dsa/cutedsl_paged_mqa_logits.py").read_text()
    on_cpu = (folder / "srt/layers/rotary_embedding/factory.py").read_text().partition("def get_rope_cpu(")[2].partition("\ndef ")[0]
    assert "assert rope_scaling is not None" in on_cpu
    assert "self_attn.w_kc = bind_or_assign(" in (folder / "srt/models/deepseek_common/deepseek_weight_loader.py").read_text()
    assert "_fused_gate_sigmoid_mul_add_kernel[" in (folder / "srt/layers/elementwise.py").read_text(), "Triton for a shared expert's gate"
