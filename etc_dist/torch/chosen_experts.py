"""The experts of a mixture of experts whose router is elsewhere, and their use as an
experts implementation of Hugging Face transformers."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from etc_dist.compiler import compile
from etc_dist.errors import ArgumentError
from etc_dist.functions.router import Router
from etc_dist.functions.routing import NONE
from etc_dist.functions.scaled_weights import PER_BLOCK, scales_name
from etc_dist.layers.moe import MAX_CHOICES, PACKED_INNER
from etc_dist.layers.moe_graph import chosen_experts_graph
from etc_dist.layers.plain import odd_activation
from etc_dist.ops.scaled_weight import (
    ScaledWeight,
    inspect_scaled,
    scaling_of,
    scalings_of,
)
from etc_dist.program import Program
from etc_dist.runtime.arrays import Array, inspect
from etc_dist.torch import ops
from etc_dist.torch.tensors import as_array, dtype_name
from etc_dist.world import World

NAME = "etc_dist"
"""The name of the implementation in transformers."""
PLAIN = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
    "_is_expert_parallel": False,
}
"""Attributes of experts in transformers, and the values that are supported."""


def register_experts() -> None:
    """Register the experts implementation "etc_dist" of transformers 5, for
    `model.set_experts_implementation("etc_dist")`: `torch.ops.etc_dist.moe_experts` by
    the choices of the model's router. Each rank runs all experts. Experts with a bias,
    another activation than SiLU, a gate or norm of their own, or another layout raise
    ArgumentError at their call."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_forward)


def _experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts of a block of transformers."""
    faults = _faults(self)
    if faults:
        raise ArgumentError(
            "these experts are not supported",
            where=f"experts implementation {NAME!r}, {type(self).__name__}",
            wanted="silu(gate) * up, weights [E, 2 I, H] and [E, H, I], no bias, norm",
            got=", ".join(faults),
            fix="use another implementation for this model",
        )
    return cast(
        Tensor,
        torch.ops.etc_dist.moe_experts(
            hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj
        ),
    )


def _faults(experts: Any) -> list[str]:
    """What these experts compute that `moe_experts` does not."""
    from transformers.integrations import moe

    flag_names = [name for name in experts.__dict__ if name.startswith(("has_", "is_"))]
    differences = []
    for name in dict.fromkeys((*PLAIN, *flag_names)):
        plain = PLAIN.get(name, False)
        value = getattr(experts, name, plain)
        if bool(value) is not plain:
            differences.append(f"{name} = {value}")
    gate = getattr(experts, "_apply_gate", None)
    if getattr(gate, "__func__", gate) is not getattr(moe, "_default_apply_gate", None):
        differences.append("_apply_gate of their own")
    odd = odd_activation(getattr(experts, "act_fn", None))
    if odd:
        differences.append(f"act_fn {odd}")
    return differences


def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    group_name: str = "",
    *,
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
) -> Tensor:
    """The sum over k of weights[:, k] * expert ids[:, k] of x [M, H] -> [M, H], where
    an expert is (silu(x @ gate.T) * (x @ up.T)) @ down.T. No gradients.

    ids [M, K], of any integer dtype: from 0 to E - 1, those of a token all different,
    or -1 for no expert. The result of a token without experts is zero. weights [M, K],
    of any dtype: used in fp32. gate_up [E, 2 I, H], rows of gate, then those of up;
    down [E, H, I]: all experts on each rank. K is at most 16, E at most 512. A token
    has the same bits for any M. gate_up_scales, down_scales: of weights in float8, as
    `etc_dist.ScaledWeight`, of one kind and dtype. Groups and errors: as for the other
    operations (ops.py), except that GPUs check the values of ids during the run: an id
    out of range ends it with an ArgumentError of a later call."""
    world = ops.world_of(group_name)
    try:
        rows = x.contiguous()
        out = torch.empty_like(rows)
        count, experts = ids.shape[1], gate_up.shape[0]
        arrays = {
            "x": as_array(rows),
            "ids": as_array(_checked(ids, experts)),
            "weights": as_array(weights.float().contiguous()),
            "y": as_array(out),
        }
        w_layout = _add_weights(
            arrays, {"gate_up": (gate_up, gate_up_scales), "down": (down, down_scales)}
        )
    except Exception as error:
        ops.refuse(world, error, "moe_experts")
    if rows.shape[0]:
        packs = down.shape[2] >= PACKED_INNER
        _program(world, experts, count, dtype_name(x), packs, w_layout).run(**arrays)
    return out


def _add_weights(
    arrays: dict[str, Any], weights: dict[str, tuple[Tensor, Tensor | None]]
) -> str:
    """Add weights, and the scales of those that have some. Returns their layout."""
    pairs = list[tuple[Array, Array | None]]()
    for name, (w, scales) in weights.items():
        arrays[name] = as_array(w)
        if scales is None:
            pairs.append((inspect(name, arrays[name]), None))
            continue
        scaled = ScaledWeight(arrays[name], as_array(scales))
        codes, of_codes = inspect_scaled(name, scaled).values()
        pairs.append((codes, of_codes))
        if scaling_of(codes, of_codes).per != PER_BLOCK:
            scales = scales.view(w.shape[0], -1, 1)
        arrays[scales_name(name)] = as_array(scales)
    layouts = {s.w_layout if s is not None else "nk" for s in scalings_of(pairs)}
    if len(layouts) > 1:
        wanted, got = "of one kind and dtype for both, or none", sorted(layouts)
        raise ops.refusal("moe_experts", "scales", wanted, ", ".join(got))
    return layouts.pop()


def _checked(ids: Tensor, experts: int) -> Tensor:
    """Ids in int32, of which those out of range stay out of range. ArgumentError for
    another dtype than an integer and, on the CPU, for ids out of range."""
    wanted = f"integers, 0 to {experts - 1}, or {NONE} for no expert"
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ops.refusal("moe_experts", "ids", wanted, str(ids.dtype))
    if ids.device.type == "cpu":
        wrong = ids[(ids.long() < NONE) | (ids.long() >= experts)]
        if len(wrong):
            raise ops.refusal("moe_experts", "ids", wanted, f"id {int(wrong[0])}")
    if ids.element_size() > 4:
        ids = ids.clamp(NONE - 1, experts)
    return ids.int().contiguous()


def _program(
    world: World, experts: int, count: int, dtype: str, packs: bool, w_layout: str
) -> Program:
    """The program of `world` for these experts, compiled at the first use."""
    key = "torch", chosen_experts_graph, experts, count, dtype, packs, w_layout
    program = world.kept.get(key)
    if program is None:
        with world.refusing("the arguments of moe_experts"):
            Router(count).check(experts, MAX_CHOICES)
            graph = chosen_experts_graph(
                world.size,
                experts=experts,
                top_k=count,
                dtype=dtype,
                packs=packs,
                w_layout=w_layout,
            )
        program = world.kept[key] = compile(graph, world)
    return cast(Program, program)


def _fake(x: Tensor, *arguments: Any, **scales: Any) -> Tensor:
    return x.new_empty(x.shape)


ops.register(moe_experts, _fake)
