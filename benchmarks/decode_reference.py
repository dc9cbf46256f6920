"""The logits of a decode step in fp32, on the arrays of `decoder_graph`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.device import Device, wide
from etc_dist.models.config import ModelConfig
from etc_dist.models.experts import Mixture


def reference_logits(
    device: Device, config: ModelConfig, arrays: Mapping[str, Any], context: int
) -> tuple[Any, float]:
    """Row r is the last of `context` positions of request r. All layers that `arrays`
    holds. The cache has the positions before the last.

    Rows have the `experts` of `arrays`. Also returns by how much the router's logit of
    one of them is below that of another expert, at most, relative to the root mean
    square of all."""
    xp, dim = device.xp, config.head_dim
    heads, kv_heads = config.heads, config.kv_heads
    ids = arrays["ids"]
    rows, last = len(ids), context - 1
    cos, sin = xp.split(arrays["cos_sin"][last], 2)

    def norm(x: Any, gain: Any) -> Any:
        mean = (x * x).mean(axis=-1, keepdims=True)
        return x / xp.sqrt(mean + np.float32(config.norm_eps)) * gain

    def rotate(x: Any) -> Any:
        low, high = xp.split(x, 2, axis=-1)
        return xp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    x, below = _rows(arrays["embedding"], ids), 0.0
    for layer in range(len(arrays["w_qkv"])):

        def weight(name: str, layer: int = layer) -> Any:
            return wide(arrays[name][layer])

        qkv = norm(x, weight("norm")) @ weight("w_qkv").T
        q, k, v = xp.split(qkv.reshape(rows, -1, dim), [heads, heads + kv_heads], 1)
        q = rotate(norm(q, weight("q_norm")))
        k = rotate(norm(k, weight("k_norm")))
        keys, values = _cached(xp, arrays["cache"][layer], arrays["table"][:rows])
        keys[:, :, last], values[:, :, last] = k, v
        keys, values = keys[:, :, :context], values[:, :, :context]
        scores = q.reshape(rows, kv_heads, -1, dim) @ keys.swapaxes(2, 3)
        scores = scores / np.float32(np.sqrt(dim))
        parts = xp.exp(scores - scores.max(axis=-1, keepdims=True))
        parts /= parts.sum(axis=-1, keepdims=True)
        x = x + (parts @ values).reshape(rows, -1) @ weight("w_o").T
        y = norm(x, weight("mlp_norm"))
        if config.mixture is None:
            x = x + _mlp(xp, y, *(weight(name) for name in MLP))
        else:
            mixed, gap = _mix(xp, config.mixture, y, arrays, layer)
            x, below = x + mixed, max(below, gap)
    return norm(x, wide(arrays["norm"][-1])) @ wide(arrays["w_head"]).T, below


MLP = ("w_gate", "w_up", "w_down")


def _mlp(xp: Any, x: Any, w_gate: Any, w_up: Any, w_down: Any) -> Any:
    gate = x @ w_gate.T
    return gate / (1 + xp.exp(-gate)) * (x @ w_up.T) @ w_down.T


def _mix(
    xp: Any, mixture: Mixture, x: Any, arrays: Mapping[str, Any], layer: int
) -> tuple[Any, float]:
    logits, chosen = x @ wide(arrays["router"][layer]).T, arrays["experts"][layer]
    own = xp.sort(xp.take_along_axis(logits, chosen, axis=1), axis=1)
    best = xp.sort(logits, axis=1)[:, -mixture.top_k :]
    gap = float((best - own).max() / xp.sqrt((logits**2).mean()))
    parts = xp.exp(logits - logits.max(axis=1, keepdims=True))
    weights = xp.take_along_axis(parts, chosen, axis=1)
    whole = weights if mixture.normalizes else parts
    weights = weights / whole.sum(axis=1, keepdims=True)
    y = xp.zeros_like(x)
    for expert in xp.unique(chosen).tolist():
        matrices = (wide(arrays[name][layer, expert]) for name in MLP)
        share = xp.where(chosen == expert, weights, 0).sum(axis=1, keepdims=True)
        rows = xp.flatnonzero(share[:, 0])
        y[rows] += share[rows] * _mlp(xp, x[rows], *matrices)
    return y, gap


def _rows(array: Any, numbers: Any) -> Any:
    """Some rows in fp32."""
    # NOTE: CuPy gathers no bfloat16: take the bits.
    return wide(array.view(np.uint16)[numbers].view(array.dtype))


def _cached(xp: Any, cache: Any, table: Any) -> list[Any]:
    """Keys and values of each request, [requests, kv_heads, positions, head_dim]."""
    pages = _rows(cache, table)  # [requests, most_pages, 2, kv_heads, page_size, dim]
    requests, most_pages, _, kv_heads, page_size, dim = pages.shape
    shape = requests, kv_heads, most_pages * page_size, dim
    return [
        xp.ascontiguousarray(pages[:, :, place].swapaxes(1, 2)).reshape(shape)
        for place in range(2)
    ]
