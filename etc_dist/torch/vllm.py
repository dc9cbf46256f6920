"""A plug-in of vLLM, written for its version 0.24: `register` is an entry point of the
group vllm.general_plugins.

In the graphs of vLLM's AsyncTP pass, the two fused operations of torch.ops.symm_mem
become those of torch.ops.etc_dist. The experts of unquantised models run as
`torch.ops.etc_dist.moe_experts`. What neither serves stays as vLLM has it, and the
reason is printed on stderr, once."""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from importlib import import_module
from operator import getitem
from typing import Any, cast

import torch
import torch.distributed._symmetric_memory  # defines torch.ops.symm_mem
from torch import Tensor, fx

from etc_dist.errors import EtcDistError, WorldError
from etc_dist.functions.router import MOST_EXPERTS
from etc_dist.layers.moe import MAX_CHOICES
from etc_dist.messages import show_message
from etc_dist.settings import Settings
from etc_dist.torch.ops import REDUCTIONS
from etc_dist.world import World, of_group, start

DTYPES = (torch.bfloat16, torch.float16)
EIGHT = 8
"""K, N, and the sizes of experts, are multiples of this on GPUs."""
BACKEND = "TRITON"
"""The backend of vLLM's experts that leaves their weights as they are loaded."""
_PASSES = "vllm.compilation.passes.pass_manager"
_EXPERTS = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
_said: set[str] = set()
_is_registered = False


def register() -> None:
    """Add the operations to vLLM, in this process. vLLM calls it in each process."""
    global _is_registered
    if _is_registered:
        return
    _is_registered = True
    try:
        config = import_module("vllm.config")
        state = import_module("vllm.distributed.parallel_state")
        _start_after_groups(config, state)
        _swap_after_pass(import_module(_PASSES))
        base = import_module(_EXPERTS).UnquantizedFusedMoEMethod
        base.register_oot(_experts_method(base, state))
    except (ImportError, AttributeError) as error:
        _say(f"this version of vLLM is not supported: {error}")


def _say(text: str) -> None:
    """Print why something stays as vLLM has it, once."""
    if text not in _said:
        _said.add(text)
        show_message(f"etc_dist: not used by vLLM: {text}\n")


def _world_over(group: Any) -> World | None:
    """The world over a process group, started if need be, or None. Collective."""
    try:
        return of_group(group.group_name)
    except WorldError:
        pass
    settings = Settings.load()
    if torch.cuda.is_available():
        settings = replace(settings, backend="cuda")
    try:
        return start(settings, process_group=group)
    except EtcDistError as error:
        _say(f"no world over its tensor-parallel ranks: {error}")
        return None


# ---------------------------------------------------------------------- collectives


def _start_after_groups(config: Any, state: Any) -> None:
    """Start a world as soon as vLLM has its process groups, if AsyncTP is on: a graph
    from vLLM's cache runs without a pass."""
    initialize = state.initialize_model_parallel

    @wraps(initialize)
    def initialize_and_start(*args: Any, **options: Any) -> None:
        initialize(*args, **options)
        found = config.get_current_vllm_config_or_none()
        if found is not None and found.compilation_config.pass_config.fuse_gemm_comms:
            _world_over(state.get_tp_group().device_group)

    state.initialize_model_parallel = initialize_and_start


def _swap_after_pass(passes: Any) -> None:
    """Replace vLLM's AsyncTP pass, where its platform has one."""
    base: Any = getattr(passes, "AsyncTPPass", None)
    if base is None:
        return

    class AsyncTPPass(base):
        def __call__(self, graph: fx.Graph) -> None:
            super().__call__(graph)
            swap_collectives(graph)

    passes.AsyncTPPass = AsyncTPPass


def swap_collectives(graph: fx.Graph) -> int:
    """Let fused_matmul_reduce_scatter and fused_all_gather_matmul of torch.ops.symm_mem
    in a graph be those of torch.ops.etc_dist, where these serve their operands. Returns
    how many were replaced."""
    count = 0
    for name in ("fused_matmul_reduce_scatter", "fused_all_gather_matmul"):
        ours = getattr(torch.ops.etc_dist, name).default
        theirs = getattr(torch.ops.symm_mem, name).default
        for node in graph.find_nodes(op="call_function", target=theirs):
            names = [argument.name for argument in theirs._schema.arguments]
            found = dict(zip(names, node.args, strict=False)) | node.kwargs
            obstacle = _obstacle(found)
            if obstacle:
                _say(f"{name}: {obstacle}")
                continue
            _swap(graph, node, ours, found)
            count += 1
    return count


def _swap(graph: fx.Graph, node: fx.Node, ours: Any, found: dict[str, Any]) -> None:
    is_gather = "Bs" in found
    if is_gather:  # gathering A alone, too, is another collective
        for part in [u for u in node.users if u.target is getitem and u.args[1] == 0]:
            if not part.users:
                graph.erase_node(part)
        is_used = any(u.target is not getitem or u.args[1] == 0 for u in node.users)
        found["return_A"] = is_used and found.get("return_A", True)
    with graph.inserting_before(node):
        new = graph.call_function(ours, (), found)
    new.meta = dict(node.meta)
    if is_gather and not found["return_A"] and "val" in new.meta:
        new.meta["val"] = None, new.meta["val"][1]
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _obstacle(found: dict[str, Any]) -> str | None:
    """Why a call is not served."""
    try:
        of_group(found["group_name"])
    except WorldError:
        return "no world over its group"
    if found.get("reduce_op", REDUCTIONS[0]) not in REDUCTIONS:
        return f"reduction {found['reduce_op']!r}"
    nodes = found["A"], *found.get("Bs", [found.get("B")])
    for node in nodes:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return "operands of unknown shape"
        if value.dtype not in DTYPES or value.dtype != nodes[0].meta["val"].dtype:
            return f"operands of {value.dtype}"
        sizes = value.shape if node is not nodes[0] else value.shape[-1:]
        if any(not isinstance(n, int) or n % EIGHT for n in sizes):
            return f"K or N of {[*map(str, sizes)]}, not a multiple of {EIGHT}"
    return None


# -------------------------------------------------------------------------- experts


def _experts_method(base: Any, state: Any) -> Any:
    """vLLM's method for unquantised experts, with ours where it serves a layer."""

    class Experts(base):
        etc_dist_group: str | None = None
        """The group whose world runs the layer; None if vLLM does."""

        def process_weights_after_loading(self, layer: Any) -> None:
            super().process_weights_after_loading(layer)
            obstacle = experts_obstacle(self, layer)
            if obstacle:
                _say(f"experts: {obstacle}")
                return
            world = _world_over(state.get_tp_group().device_group)
            self.etc_dist_group = None if world is None else world.group_name

        def forward_native(
            self,
            layer: Any,
            x: Tensor,
            topk_weights: Tensor,
            topk_ids: Tensor,
            shared_experts: Any,
            shared_experts_input: Tensor | None,
        ) -> Tensor:
            if self.etc_dist_group is None:
                chosen = topk_weights, topk_ids
                shared = shared_experts, shared_experts_input
                return cast(Tensor, super().forward_native(layer, x, *chosen, *shared))
            weights = layer.w13_weight, layer.w2_weight
            group = self.etc_dist_group
            moe_experts = torch.ops.etc_dist.moe_experts
            return cast(Tensor, moe_experts(x, topk_ids, topk_weights, *weights, group))

    return Experts


def experts_obstacle(method: Any, layer: Any) -> str | None:
    """Why a layer of experts is not served. Shared experts, which are not run in the
    method without expert parallelism, are none."""
    config, weight = method.moe, layer.w13_weight
    parallel = config.moe_parallel_config
    experts, width, hidden = weight.shape
    choices = config.experts_per_token
    faults = {
        f"the backend {method.unquantized_backend.name}, not {BACKEND}": (
            method.unquantized_backend.name != BACKEND
        ),
        "expert or data parallelism": parallel.use_ep or parallel.dp_size > 1,
        "LoRA": config.is_lora_enabled,
        "a bias": config.has_bias,
        f"the activation {layer.activation.value}": layer.activation.value != "silu",
        "weights on the input": layer.apply_router_weight_on_input,
        "a limit or a scale of SwiGLU": any(
            getattr(layer, f"swiglu_{name}", None) is not None
            for name in ("limit", "alpha", "beta")
        ),
        f"weights of {weight.dtype}": weight.dtype not in DTYPES,
        f"{experts} experts": experts > MOST_EXPERTS,
        f"{choices} experts of a token": choices > MAX_CHOICES,
        f"experts of {hidden} x {width // 2}": hidden % EIGHT or width // 2 % EIGHT,
    }
    return next((text for text, is_fault in faults.items() if is_fault), None)
