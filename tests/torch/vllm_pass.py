"""The plug-in in vLLM's own modules, where vLLM 0.24 can be imported: its AsyncTP pass
rewrites a graph, which each rank of torchrun executes on the CPU. vLLM's configuration
is a stand-in, and its kernels are not needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import vllm.compilation.passes.pass_manager as passes
import vllm.distributed.parallel_state as state
from torch import Tensor, nn
from torch import distributed as dist
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from vllm.compilation.passes.fusion.collective_fusion import AsyncTPPass
from vllm.config import CompilationConfig
from vllm.config.vllm import set_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot

from etc_dist.torch import vllm as plugin

RANKS = 2


class Parallel:
    """Two tensor-parallel ranks, and nothing else."""

    nnodes = nnodes_within_dp = data_parallel_size = 1
    tensor_parallel_size = world_size = RANKS

    def __getattr__(self, name: str) -> None:
        return None


def stand_in() -> Any:
    compilation = CompilationConfig()
    compilation.pass_config.enable_sp = compilation.pass_config.fuse_gemm_comms = True
    return SimpleNamespace(
        compilation_config=compilation,
        compile_debug_dump_path=lambda: None,
        device_config=SimpleNamespace(device="cpu"),
        model_config=SimpleNamespace(dtype=torch.bfloat16, is_moe=False),
        parallel_config=Parallel(),
    )


def main() -> None:
    passes.AsyncTPPass = AsyncTPPass  # vLLM has it on GPUs only
    plugin.register()
    assert "UnquantizedFusedMoEMethod" in op_registry_oot
    rank = dist.get_node_local_rank()
    state.init_distributed_environment(RANKS, rank, "env://", rank, "gloo")
    config = stand_in()
    with set_current_vllm_config(config):
        state.initialize_model_parallel(RANKS, backend="gloo")
        rewrite = passes.AsyncTPPass(config)
    own = torch.ops.vllm
    of_group = {"dim": 0, "world_size": RANKS}
    of_group["group_name"] = state.get_tp_group().unique_name

    def layer(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        y = torch.mm(own.all_gather(x, **of_group), up)
        return own.reduce_scatter(torch.mm(nn.functional.silu(y), down), **of_group)

    torch.manual_seed(rank)
    x, up, down = (torch.randn(n, k) / 4 for n, k in ((16, 32), (48, 32), (32, 48)))
    given = x.bfloat16(), up.bfloat16().t(), down.bfloat16().t()
    captured = make_fx(layer, tracing_mode="fake")(*given)
    [first, *_] = captured.graph.nodes
    with V.set_fake_mode(first.meta["val"].fake_mode):
        rewrite(captured.graph)
    captured.recompile()
    assert captured.code.count("torch.ops.etc_dist.fused_") == 2, captured.code
    expected, found = layer(*given).float(), captured(*given).float()
    assert (found - expected).abs().max() < 2e-2 * expected.abs().max()
    print(f"rank {rank} passed", flush=True)


if __name__ == "__main__":
    main()
