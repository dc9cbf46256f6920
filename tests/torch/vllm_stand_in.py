"""A stand-in for the parts of vLLM 0.26 that the plug-in uses, since vLLM needs a GPU:
its modules, by name, with what `register` uses of each. vllm_wheels.py compares what
the plug-in needs with the files of vLLM itself."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch import distributed as dist

_MOE = "vllm.model_executor.layers.fused_moe"
_COMMUNICATORS = "vllm.distributed.device_communicators.cuda_communicator"
_PASSES = "vllm.compilation.passes"


def all_reduce(tensor: Tensor, group_name: str) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    total = x.float() + x_residual.float()
    part = total[..., :variance_size]
    y = total * torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + epsilon)
    if weight is not None:
        y = y.to(weight.dtype) * weight
    return y.to(x.dtype), total.to(x.dtype)


def define(name: str, function: Any, fake: Any) -> Any:
    """An operation of torch, as vLLM defines it."""
    schema = torch.library.infer_schema(function, mutates_args=[])
    torch.library.define(name, schema)
    torch.library.impl(name, "default", function)
    torch.library.register_fake(name, fake)


define("vllm::all_reduce", all_reduce, lambda tensor, group_name: tensor.clone())
define("vllm_ir::fused_add_rms_norm", fused_add_rms_norm, fused_add_rms_norm)


class Platform:
    def is_cuda(self) -> bool:
        return True

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return f"{_COMMUNICATORS}.CudaCommunicator"

    @classmethod
    def get_pass_manager_cls(cls) -> str:
        return f"{_PASSES}.pass_manager.PostGradPassManager"


class CudaCommunicator:
    """Returns zeros as the sum."""

    use_custom_allreduce = True

    def __init__(
        self,
        cpu_group: Any,
        device: Any = None,
        device_group: Any = None,
        unique_name: str = "",
    ) -> None:
        self.device_group, self.unique_name = device_group, unique_name

    def all_reduce(self, input_: Tensor) -> Tensor:
        return torch.zeros_like(input_)


class InductorPass:
    def uuid(self) -> str:
        return type(self).__name__


class CallableInductorPass(InductorPass):
    def __init__(self, callable: Any, uuid: Any | None = None) -> None:
        self.callable, self._uuid = callable, uuid

    def __call__(self, graph: fx.Graph) -> None:
        self.callable(graph)


class AsyncTPPass(InductorPass):
    """Leaves a graph as it is: the tests' graphs have the fused operations."""

    def __call__(self, graph: fx.Graph) -> None:
        pass


class AllReduceFusionPass(AsyncTPPass):
    pass


class PostGradPassManager:
    def __init__(self) -> None:
        self.passes: list[InductorPass] = []

    def __call__(self, graph: fx.Graph) -> None:
        for step in self.passes:
            step(graph)

    def configure(self, config: Any) -> None:
        self.passes += [AsyncTPPass(), AllReduceFusionPass()]


class PassConfig:
    def compute_hash(self) -> str:
        return "hash"


class UnquantizedFusedMoEMethod(nn.Module):
    """Computes the experts in fp32, and counts its calls."""

    registered: type | None = None

    def __init__(self, moe: Any) -> None:
        super().__init__()
        self.moe, self.calls = moe, 0
        self.unquantized_backend = SimpleNamespace(name="TRITON")

    @classmethod
    def register_oot(cls, _decorated_op_cls: type, name: str | None = None) -> type:
        assert cls.registered is None, "Duplicate op name"
        cls.registered = _decorated_op_cls
        return _decorated_op_cls

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
        for row, expert, weight in chosen(topk_ids, topk_weights):
            gate_up = layer.w13_weight[expert].float() @ x[row].float()
            gate, up = gate_up.chunk(2)
            active = nn.functional.silu(gate) * up
            total[row] += weight * (layer.w2_weight[expert].float() @ active)
        return total.to(x.dtype)


def chosen(ids: Tensor, weights: Tensor) -> list[tuple[int, int, float]]:
    """The row, expert and weight of each choice, without padding."""
    pairs = [(row, k) for row, k in torch.cartesian_prod(*map(torch.arange, ids.shape))]
    return [(r, int(ids[r, k]), weights[r, k]) for r, k in pairs if ids[r, k] >= 0]


def install(monkeypatch: pytest.MonkeyPatch, group: Any) -> Any:
    """Put the modules where `register` finds them, and return what tests use of them.
    Its `config` is vLLM's current one."""
    platform = type("CudaPlatform", (Platform,), {})()
    method = type("Method", (UnquantizedFusedMoEMethod,), {})
    pass_config = type("PassConfig", (PassConfig,), {})
    parallel = SimpleNamespace(
        pipeline_parallel_size=1, data_parallel_size=1, enable_dbo=False
    )
    config = SimpleNamespace(
        parallel_config=parallel, model_config=SimpleNamespace(quantization=None)
    )
    tp = SimpleNamespace(
        device_group=group, device_communicator=None, unique_name="tp:0"
    )
    contents_of_modules = {
        "vllm": {"__version__": "0.26.0"},
        "vllm.config.vllm": {"get_current_vllm_config_or_none": lambda: config},
        "vllm.config.compilation": {"PassConfig": pass_config},
        "vllm.platforms": {"current_platform": platform},
        "vllm.platforms.interface": {"Platform": Platform},
        "vllm.distributed.parallel_state": {
            "all_reduce": all_reduce,
            "get_tp_group": lambda: tp,
        },
        _COMMUNICATORS: {"CudaCommunicator": CudaCommunicator},
        f"{_PASSES}.inductor_pass": {"CallableInductorPass": CallableInductorPass},
        f"{_PASSES}.pass_manager": {"PostGradPassManager": PostGradPassManager},
        f"{_PASSES}.fusion.collective_fusion": {"AsyncTPPass": AsyncTPPass},
        "vllm.ir.ops.layernorm": {
            "fused_add_rms_norm": SimpleNamespace(
                torch_op=torch.ops.vllm_ir.fused_add_rms_norm.default
            )
        },
        f"{_MOE}.unquantized_fused_moe_method": {"UnquantizedFusedMoEMethod": method},
    }
    for name, contents in contents_of_modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    parts = {"method": method, "pass_config": pass_config, "config": config, "tp": tp}
    return SimpleNamespace(platform=platform, **parts)


def resolve(name: str) -> Any:
    """The object of a qualified name, as vLLM finds the classes of its platform."""
    module, _, last = name.rpartition(".")
    return getattr(import_module(module), last)
