"""The logits of a decode step by torch in the model's dtype, as transformers computes
them, on the arrays of `decoder_graph`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etc_dist.models.config import ModelConfig


def torch_logits(
    torch: Any, config: ModelConfig, tensors: Mapping[str, Any], context: int
) -> Any:
    """As `reference_logits`; the rows have the `experts` of `tensors`."""
    linear, dim = torch.nn.functional.linear, config.head_dim
    ids = tensors["ids"].long()
    rows, last = len(ids), context - 1

    def norm(x: Any, gain: Any) -> Any:
        wide = x.float()
        mean = wide.pow(2).mean(-1, keepdim=True)
        return gain * (wide * torch.rsqrt(mean + config.norm_eps)).to(x.dtype)

    x = tensors["embedding"][ids]
    cos, sin = tensors["cos_sin"][last].to(x.dtype).chunk(2)

    def rotate(x: Any) -> Any:
        low, high = x.chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    heads = [config.heads, config.kv_heads, config.kv_heads]
    for layer in range(len(tensors["w_qkv"])):
        of = {n: tensors[n][layer] for n in tensors.keys() & LAYERED}
        qkv = linear(norm(x, of["norm"]), of["w_qkv"]).view(rows, -1, dim)
        q, k, v = qkv.split(heads, 1)
        q, k = rotate(norm(q, of["q_norm"])), rotate(norm(k, of["k_norm"]))
        pages = of["cache"][tensors["table"][:rows].long()]
        keys, values = pages.permute(2, 0, 3, 1, 4, 5).flatten(3, 4).clone()
        keys[:, :, last], values[:, :, last] = k, v
        attended = torch.nn.functional.scaled_dot_product_attention(
            q.view(rows, config.kv_heads, -1, dim), keys[:, :, :context],
            values[:, :, :context],
        )  # fmt: skip
        x = x + linear(attended.reshape(rows, -1), of["w_o"])
        y = norm(x, of["mlp_norm"])
        if config.mixture is None:
            x = x + _mlp(torch, y, of["w_gate"], of["w_up"], of["w_down"])
        else:
            x = x + _mix(torch, config.mixture.normalizes, y, of)
    return linear(norm(x, tensors["norm"][-1]), tensors["w_head"])


LAYERED = {"norm", "mlp_norm", "q_norm", "k_norm", "cache", "experts", "router"}
LAYERED |= {"w_qkv", "w_o", "w_gate", "w_up", "w_down"}
"""The arrays whose first axis is the layer."""


def _mlp(torch: Any, x: Any, gate: Any, up: Any, down: Any) -> Any:
    functional = torch.nn.functional
    active = functional.silu(functional.linear(x, gate)) * functional.linear(x, up)
    return functional.linear(active, down)


def _mix(torch: Any, normalizes: bool, x: Any, of: Mapping[str, Any]) -> Any:
    chosen = of["experts"].long()
    logits = torch.nn.functional.linear(x, of["router"])
    weights = logits.softmax(-1, dtype=torch.float32).gather(1, chosen)
    if normalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    weights, y = weights.to(x.dtype), torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        rows, place = torch.where(chosen == expert)
        matrices = (of[name][expert] for name in ("w_gate", "w_up", "w_down"))
        part = _mlp(torch, x[rows], *matrices) * weights[rows, place, None]
        y.index_add_(0, rows, part)
    return y
