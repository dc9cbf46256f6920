"""The dense MLPs and linear layers whose computation is known. Others are refused: an
adapter, a quantised layer or a hook would be dropped in silence."""

from __future__ import annotations

from torch import nn

from etc_dist.errors import ArgumentError
from etc_dist.layers.plain import odd_activation, oddity

PROJECTIONS = "gate_proj", "up_proj", "down_proj"
_MLPS = """
Cohere2MLP CohereMLP DeepseekV2MLP DeepseekV3MLP Ernie4_5MLP Exaone4MLP Glm4MoeMLP
GraniteMLP HYV3MLP HeliumMLP HunYuanDenseV1MLP HunYuanMoEV1MLP LlamaMLP Ministral3MLP
MinistralMLP MistralMLP Olmo2MLP Olmo3MLP OlmoMLP Qwen2MLP Qwen2MoeMLP Qwen3MLP
Qwen3MoeMLP Qwen3NextMLP Qwen3VLTextMLP SmolLM3MLP StableLmMLP
"""
MLPS = tuple(_MLPS.split())
"""Classes of transformers with down_proj(act_fn(gate_proj(x)) * up_proj(x))."""


def check_mlp(block: nn.Module) -> None:
    """Raise ArgumentError for an MLP that may compute something else."""
    odd = oddity(block, MLPS)
    faults = [odd] if odd else []
    for name in PROJECTIONS:
        linear = getattr(block, name, None)
        odd = _odd_linear(linear)
        faults += [f"{name}: {odd}"] if odd else []
        if getattr(linear, "bias", None) is not None:
            faults.append(f"{name}.bias")
    odd = odd_activation(getattr(block, "act_fn", None))
    if odd:
        faults.append(f"act_fn {odd}")
    if faults:
        raise ArgumentError(
            "the block cannot be replaced by an MLP",
            where=f"etc_dist.torch, a block {type(block).__name__}",
            wanted="SiLU, nn.Linear without bias, adapters and hooks, in one of "
            + ", ".join(MLPS),
            got=", ".join(faults),
            fix="merge adapters and remove hooks first, or leave the model as it is; "
            "of a block that computes the same, pass the weights to etc_dist.torch.MLP",
        )


def check_linear(linear: nn.Module) -> None:
    """Raise ArgumentError for a layer that may compute more than nn.Linear."""
    odd = _odd_linear(linear)
    if odd:
        raise ArgumentError(
            "the layer cannot be split",
            where="from_linear",
            wanted="an nn.Linear with Parameters, without adapters and hooks",
            got=odd,
            fix="merge adapters and remove hooks first, or pass this rank's shard of "
            "the weight to the constructor",
        )


def _odd_linear(linear: object) -> str:
    """What is unlike a plain nn.Linear."""
    odd = oddity(linear, ("Linear",))
    if odd:
        return odd
    weight = getattr(linear, "weight", None)
    is_plain = type(weight) is nn.Parameter
    return "" if is_plain else f"a weight of {type(weight).__name__}"
