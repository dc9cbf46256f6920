"""What the plug-in of vLLM needs of it, and whether a version has it."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

VERSIONS = tuple(f"0.{minor}" for minor in range(24, 32))
"""Those of vLLM that have all of HOOKS, by their files (tests/torch/vllm_wheels.py)."""
_MOE = "vllm.model_executor.layers.fused_moe"
HOOKS: dict[str, dict[str, tuple[str, ...]]] = {
    "all_reduce": {
        "vllm.platforms.interface": (
            "Platform.is_cuda(self)",
            "Platform.get_device_communicator_cls()",
        ),
        "vllm.distributed.device_communicators.cuda_communicator": (
            "CudaCommunicator.all_reduce(self, input_)",
            "CudaCommunicator.device_group",
            "CudaCommunicator.unique_name",
            "CudaCommunicator.use_custom_allreduce",
        ),
        "vllm.config.vllm": ("get_current_vllm_config_or_none()",),
        "vllm.config.parallel": (
            "ParallelConfig.pipeline_parallel_size",
            "ParallelConfig.data_parallel_size",
            "ParallelConfig.enable_dbo",
        ),
    },
    "graphs": {
        "vllm.platforms.interface": ("Platform.get_pass_manager_cls()",),
        "vllm.compilation.passes.pass_manager": (
            "PostGradPassManager.configure(self, config)",
            "PostGradPassManager.passes",
        ),
        "vllm.compilation.passes.inductor_pass": (
            "CallableInductorPass.__init__(self, callable, uuid)",
        ),
        "vllm.config.compilation": ("PassConfig.compute_hash(self)",),
        "vllm.config.model": ("ModelConfig.quantization",),
        "vllm.distributed.parallel_state": (
            "get_tp_group()",
            "all_reduce(tensor, group_name)",
            "GroupCoordinator.unique_name",
            "GroupCoordinator.device_communicator",
        ),
        "vllm.ir.ops.layernorm": (
            "fused_add_rms_norm(x, x_residual, weight, epsilon, variance_size)",
        ),
    },
    "async_tp": {
        "vllm.compilation.passes.fusion.collective_fusion": (
            "AsyncTPPass.__call__(self, graph)",
        ),
    },
    "experts": {
        "vllm.distributed.parallel_state": (
            "get_tp_group()",
            "GroupCoordinator.device_group",
        ),
        f"{_MOE}.unquantized_fused_moe_method": (
            "UnquantizedFusedMoEMethod.register_oot(_decorated_op_cls, name)",
            "UnquantizedFusedMoEMethod.process_weights_after_loading(self, layer)",
            "UnquantizedFusedMoEMethod.forward_native(self, layer, x, topk_weights, "
            "topk_ids, shared_experts, shared_experts_input)",
            "UnquantizedFusedMoEMethod.moe",
            "UnquantizedFusedMoEMethod.unquantized_backend",
        ),
        f"{_MOE}.oracle.unquantized": ("UnquantizedMoeBackend.TRITON",),
        f"{_MOE}.config": (
            "FusedMoEConfig.experts_per_token",
            "FusedMoEConfig.has_bias",
            "FusedMoEConfig.is_lora_enabled",
            "FusedMoEConfig.moe_parallel_config",
            "FusedMoEParallelConfig.dp_size",
            "FusedMoEParallelConfig.use_ep",
        ),
        f"{_MOE}.routed_experts": (
            "RoutedExperts.activation",
            "RoutedExperts.apply_router_weight_on_input",
            "RoutedExperts.swiglu_alpha",
            "RoutedExperts.swiglu_beta",
            "RoutedExperts.swiglu_limit",
        ),
    },
}
"""By hook and module: functions and methods with the names of their parameters, without
`cls`, and attributes of classes. Only the first can be checked in a running vLLM."""


def faults(hook: str) -> list[str]:
    """What a hook needs that the installed vLLM has not, as far as signatures show."""
    return [
        f"{signature} in place of {expected}"
        for module, names in HOOKS[hook].items()
        for expected in names
        if expected.endswith(")") and (signature := _seen(module, expected)) != expected
    ]


def _seen(module: str, expected: str) -> str:
    """The signature in the place of `expected`."""
    path = expected.partition("(")[0]
    try:
        member: Any = import_module(module)
        for name in path.split("."):
            member = getattr(member, name)
        schema = getattr(getattr(member, "torch_op", None), "_schema", None)
        if schema is None:
            names = list(inspect.signature(member).parameters)
        else:  # an operation of vLLM's IR
            names = [argument.name for argument in schema.arguments]
    except Exception as error:
        return f"{type(error).__name__} ({error})"
    return f"{path}({', '.join(names)})"
