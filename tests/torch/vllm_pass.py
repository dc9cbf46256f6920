"""The plug-in in the modules of vLLM 0.26, where these can be imported: communicator,
pass manager and AsyncTP pass, on each rank of torchrun, on the CPU. The configuration
is a stand-in, and kernels of vLLM are not needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import vllm.distributed.parallel_state as state
from torch import Tensor, nn
from torch import distributed as dist
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from vllm.compilation.passes.fusion.collective_fusion import AsyncTPPass
from vllm.config import CompilationConfig, PassConfig
from vllm.config.vllm import set_current_vllm_config
from vllm.distributed.device_communicators.base_device_communicator import (
    DeviceCommunicatorBase,
)
from vllm.model_executor.custom_op import op_registry_oot
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from etc_dist.torch import vllm as plugin
from etc_dist.torch.vllm_hooks import HOOKS, faults

RANKS = 2


class Parallel:
    """Two tensor-parallel ranks, and nothing else."""

    nnodes = nnodes_within_dp = data_parallel_size = pipeline_parallel_size = 1
    tensor_parallel_size = world_size = RANKS

    def __getattr__(self, name: str) -> None:
        return None


def stand_in() -> Any:
    return SimpleNamespace(
        compilation_config=CompilationConfig(),
        compile_debug_dump_path=lambda: None,
        device_config=SimpleNamespace(device="cpu"),
        model_config=SimpleNamespace(
            dtype=torch.bfloat16, is_moe=False, quantization=None
        ),
        parallel_config=Parallel(),
    )


def register() -> None:
    """As on GPUs, where vLLM's communicator has one attribute more."""
    assert not any(faults(hook) for hook in HOOKS)
    kind = type(current_platform)
    kind.is_cuda = lambda self: True
    plugin.register()
    kind.is_cuda = lambda self: False
    DeviceCommunicatorBase.use_custom_allreduce = True
    assert "UnquantizedFusedMoEMethod" in op_registry_oot


def main() -> None:
    before = PassConfig().compute_hash()
    register()
    assert PassConfig().compute_hash() != before
    rank = dist.get_node_local_rank()
    state.init_distributed_environment(RANKS, rank, "env://", rank, "gloo")
    config = stand_in()
    with set_current_vllm_config(config):
        state.initialize_model_parallel(RANKS, backend="gloo")
        manager = resolve_obj_by_qualname(current_platform.get_pass_manager_cls())()
        manager.configure(config)
        manager.passes.insert(0, AsyncTPPass(config))  # vLLM has it on GPUs only
    assert state.get_tp_group().device_communicator.etc_dist_group
    ops = torch.ops.vllm
    of_group = {"dim": 0, "world_size": RANKS}
    of_group["group_name"] = tp = state.get_tp_group().unique_name

    def layer(x: Tensor, up: Tensor, down: Tensor, gain: Tensor) -> Tensor:
        y = torch.mm(ops.all_gather(x, **of_group), up)
        y = ops.reduce_scatter(torch.mm(nn.functional.silu(y), down), **of_group)
        norm = torch.ops.vllm_ir.fused_add_rms_norm
        y, residual = norm(ops.all_reduce(y, tp), gain.expand(y.shape), gain, 1e-6)
        return y + residual

    torch.manual_seed(rank)
    x, up, down = (torch.randn(n, k) / 4 for n, k in ((16, 32), (48, 32), (32, 48)))
    gain = torch.ones(32).bfloat16()
    tensors = x.bfloat16(), up.bfloat16().t(), down.bfloat16().t(), gain
    captured = make_fx(layer, tracing_mode="fake")(*tensors)
    [first, *_] = captured.graph.nodes
    with V.set_fake_mode(first.meta["val"].fake_mode):
        for step in manager.passes:
            step(captured.graph)
    captured.recompile()
    assert captured.code.count("torch.ops.etc_dist.fused_") == 2, captured.code
    assert captured.code.count("torch.ops.etc_dist.all_reduce_norm") == 1
    expected, result = layer(*tensors).float(), captured(*tensors).float()
    assert (result - expected).abs().max() < 2e-2 * expected.abs().max()
    print(f"rank {rank} passed", flush=True)


if __name__ == "__main__":
    main()
