"""A stand-in for the parts of vLLM 0.24 that the plug-in patches, since vLLM needs a
GPU: its modules, by name, with what `register` uses of each. It shows that the plug-in
fits these names and signatures, not that it fits vLLM."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn


class AsyncTPPass:
    """Leaves a graph as it is: the tests' graphs have the fused operations."""

    def __call__(self, graph: fx.Graph) -> None:
        self.seen = graph


class UnquantizedFusedMoEMethod(nn.Module):
    """Computes the experts in fp32, and counts its calls."""

    registered: type | None = None

    def __init__(self, moe: Any) -> None:
        super().__init__()
        self.moe, self.calls = moe, 0
        self.unquantized_backend = SimpleNamespace(name="TRITON")

    @classmethod
    def register_oot(cls, method: type) -> type:
        assert cls.registered is None, "Duplicate op name"
        cls.registered = method
        return method

    def process_weights_after_loading(self, layer: Any) -> None:
        pass

    def forward_native(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        self.calls += 1
        total = torch.zeros(x.shape)
        for row, (ids, weights) in enumerate(zip(topk_ids, topk_weights, strict=True)):
            for expert, weight in zip(ids, weights, strict=True):
                both = layer.w13_weight[expert].float() @ x[row].float()
                gate, up = both.chunk(2)
                active = nn.functional.silu(gate) * up
                total[row] += weight * (layer.w2_weight[expert].float() @ active)
        return total.to(x.dtype)


def install(monkeypatch: pytest.MonkeyPatch, group: Any, fuses: bool = True) -> Any:
    """Put the modules where `register` finds them, and return them by short names.
    fuses: whether AsyncTP is on."""
    method = type("Method", (UnquantizedFusedMoEMethod,), {})
    pass_config = SimpleNamespace(fuse_gemm_comms=fuses)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(pass_config=pass_config)
    )
    made = {
        "vllm": {},
        "vllm.config": {"get_current_vllm_config_or_none": lambda: config},
        "vllm.distributed.parallel_state": {
            "initialize_model_parallel": lambda *args, **options: None,
            "get_tp_group": lambda: SimpleNamespace(device_group=group),
        },
        "vllm.compilation.passes.pass_manager": {"AsyncTPPass": AsyncTPPass},
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method": {
            "UnquantizedFusedMoEMethod": method
        },
    }
    for name, contents in made.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    short = {name.rpartition(".")[2]: sys.modules[name] for name in made}
    return SimpleNamespace(method=method, **short)
