"""A plug-in of vLLM, written for its version 0.26: `register` is an entry point of the
group vllm.general_plugins.

* The communicator of tensor-parallel ranks sums by `torch.ops.etc_dist.all_reduce`.
* In the graphs of vLLM's passes, this sum with the norm that follows it, and the fused
  operations of AsyncTP, become those of torch.ops.etc_dist (vllm_graphs.py).
* The experts of unquantised models run as `torch.ops.etc_dist.moe_experts`.

A hook that does not fit the installed vLLM is not used (vllm_hooks.py)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx

from etc_dist.errors import EtcDistError, WorldError
from etc_dist.functions.router import MOST_EXPERTS
from etc_dist.layers.moe import MAX_CHOICES
from etc_dist.messages import show_message
from etc_dist.settings import Settings
from etc_dist.torch import vllm_graphs
from etc_dist.torch.vllm_graphs import DTYPES, EIGHT, say
from etc_dist.torch.vllm_hooks import HOOKS, VERSIONS, faults
from etc_dist.world import World, of_group, start

BACKEND = "TRITON"
"""The backend of vLLM's experts that leaves their weights as they are loaded."""
_STATE = "vllm.distributed.parallel_state"
_EXPERTS = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
_is_registered = False


def register() -> None:
    """Add the operations to vLLM, in this process. vLLM calls it in each process."""
    global _is_registered
    if _is_registered:
        return
    _is_registered = True
    misfits = {hook: hook_faults for hook in HOOKS if (hook_faults := faults(hook))}
    if "all_reduce" in misfits:
        misfits.setdefault("graphs", ["it needs the world of all_reduce"])
    _warn(import_module("vllm").__version__, misfits)
    if "experts" not in misfits:
        base = import_module(_EXPERTS).UnquantizedFusedMoEMethod
        base.register_oot(_experts_method(base))
    platform = import_module("vllm.platforms").current_platform
    if "all_reduce" not in misfits and platform.is_cuda():
        _extend(platform, "get_device_communicator_cls", _communicator)
        if "graphs" not in misfits:
            _extend(platform, "get_pass_manager_cls", _pass_manager)
            _extend_cache_key()


def _warn(version: str, misfits: dict[str, list[str]]) -> None:
    """Name a version that is not known, or that some hooks do not fit."""
    is_known = version.startswith(tuple(f"{prefix}." for prefix in VERSIONS))
    if is_known and not misfits:
        return
    lines = [f"  {hook} is not used: {'; '.join(misfits[hook])}\n" for hook in misfits]
    text = f"etc_dist: its plug-in fits vLLM {VERSIONS[0]} to {VERSIONS[-1]}, "
    show_message(text + f"and runs in {version}\n" + "".join(lines))


def _found(find: Callable[..., str | None], *arguments: Any) -> str | None:
    """The obstacle that `find` finds; also what a version that is not known lacks."""
    try:
        return find(*arguments)
    except AttributeError as error:
        return str(error)


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
        say(f"no world over its tensor-parallel ranks: {error}")
        return None


def _extend(platform: Any, method: str, extended: Callable[[Any], Any]) -> None:
    """Let the platform's `method`, which names a class of vLLM, name one made of it."""
    module, _, name = getattr(platform, method)().rpartition(".")
    extended_class = extended(getattr(import_module(module), name))
    setattr(sys.modules[__name__], extended_class.__name__, extended_class)
    path_of_class = f"{__name__}.{extended_class.__name__}"
    setattr(type(platform), method, classmethod(lambda cls: path_of_class))


# ---------------------------------------------------------------------- collectives


def _communicator(base: Any) -> Any:
    """vLLM's communicator, with ours where it serves a sum."""

    class Communicator(base):
        etc_dist_group: str | None = None
        """The group whose world sums; None if vLLM does."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            if self.unique_name.partition(":")[0] != "tp":
                return
            obstacle = _found(collectives_obstacle)
            if obstacle:
                say(f"collectives: {obstacle}")
                return
            world = _world_over(self.device_group)
            if world is not None and self.use_custom_allreduce:
                self.etc_dist_group = world.group_name

        def all_reduce(self, input_: Tensor) -> Tensor:
            group, count = self.etc_dist_group, input_.numel()
            if group and count and count % EIGHT == 0 and input_.dtype in DTYPES:
                return cast(Tensor, torch.ops.etc_dist.all_reduce(input_, "sum", group))
            return cast(Tensor, super().all_reduce(input_))

    return Communicator


def collectives_obstacle() -> str | None:
    """Why the collectives of this process stay with vLLM: kernels that wait for peers,
    such as NCCL's, must not run with ours on another stream."""
    config = import_module("vllm.config.vllm").get_current_vllm_config_or_none()
    if config is None:
        return None
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
        return "pipeline or data parallelism"
    return "dual batch overlap" if parallel.enable_dbo else None


def _pass_manager(base: Any) -> Any:
    """vLLM's pass manager, with a pass of ours before the one that fuses all-reduces by
    FlashInfer, else as the last one: after AsyncTP in any case."""
    inductor_pass = import_module("vllm.compilation.passes.inductor_pass")

    class PassManager(base):
        def configure(self, config: Any) -> None:
            super().configure(config)
            obstacle = _found(norms_obstacle, config)
            is_fusing = obstacle is None
            if obstacle:
                say(f"all_reduce_norm: {obstacle}")
            rewrite = inductor_pass.CallableInductorPass(
                lambda graph: _rewrite(graph, is_fusing),
                f"{_source_hash()} {is_fusing}",
            )
            names = [type(graph_pass).__name__ for graph_pass in self.passes]
            fusion = "AllReduceFusionPass"
            place = names.index(fusion) if fusion in names else len(names)
            self.passes.insert(place, rewrite)

    return PassManager


def norms_obstacle(config: Any) -> str | None:
    """Why sums and norms are not fused: vLLM fuses the quantisation with them, too."""
    model = config.model_config
    is_quantised = model is not None and model.quantization is not None
    return "a quantised model" if is_quantised else None


def _rewrite(graph: fx.Graph, is_fusing: bool) -> None:
    """is_fusing: whether sums and norms are fused."""
    vllm_graphs.swap_collectives(graph)
    group = import_module(_STATE).get_tp_group()
    served_group = getattr(group.device_communicator, "etc_dist_group", None)
    if served_group and is_fusing:
        vllm_graphs.fuse_norms(graph, {group.unique_name: served_group})


def _extend_cache_key() -> None:
    """Keep graphs with our operations apart from others in the caches of vLLM."""
    config = import_module("vllm.config.compilation").PassConfig
    compute_hash = config.compute_hash

    @wraps(compute_hash)
    def with_ours(self: Any) -> str:
        return f"{compute_hash(self)} {_source_hash()}"

    config.compute_hash = with_ours


def _source_hash() -> str:
    return sha256(Path(vllm_graphs.__file__).read_bytes()).hexdigest()


# -------------------------------------------------------------------------- experts


def _experts_method(base: Any) -> Any:
    """vLLM's method for unquantised experts, with ours where it serves a layer."""

    class Experts(base):
        etc_dist_group: str | None = None
        """The group whose world runs the layer; None if vLLM does."""

        def process_weights_after_loading(self, layer: Any) -> None:
            super().process_weights_after_loading(layer)
            obstacle = _found(experts_obstacle, self, layer)
            if obstacle:
                say(f"experts: {obstacle}")
                return
            group = import_module(_STATE).get_tp_group().device_group
            world = _world_over(group)
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
                return cast(
                    Tensor,
                    super().forward_native(
                        layer,
                        x,
                        topk_weights,
                        topk_ids,
                        shared_experts,
                        shared_experts_input,
                    ),
                )
            group = self.etc_dist_group
            moe_experts = torch.ops.etc_dist.moe_experts
            return cast(
                Tensor,
                moe_experts(
                    x, topk_ids, topk_weights, layer.w13_weight, layer.w2_weight, group
                ),
            )

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
            getattr(layer, f"swiglu_{name}") is not None
            for name in ("limit", "alpha", "beta")
        ),
        f"weights of {weight.dtype}": weight.dtype not in DTYPES,
        f"{experts} experts": experts > MOST_EXPERTS,
        f"{choices} experts of a token": choices > MAX_CHOICES,
        f"experts of {hidden} x {width // 2}": hidden % EIGHT or width // 2 % EIGHT,
    }
    return next((text for text, is_fault in faults.items() if is_fault), None)
