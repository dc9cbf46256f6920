"""The logits of a decode step on the arrays of `decoder_graph`: in fp32, and by torch
in the model's dtype, as transformers computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.device import NUMBERS, dequantized, wide
from etc_dist.functions.activation import Activation
from etc_dist.functions.router import Router
from etc_dist.functions.scaled_weights import BLOCK, scales_name
from etc_dist.models.config import ModelConfig
from etc_dist.models.experts import DENSE_WEIGHTS, EXPERT_BIASES, SHARED_WEIGHTS

MLP = ("w_gate", "w_up", "w_down")


class Fp32:
    """fp32, on the arrays of NumPy or CuPy."""

    def __init__(self, xp: Any):
        self.xp = xp

    def rows(self, array: Any, numbers: Any) -> Any:
        """Some rows of a stored array."""
        # NOTE: CuPy gathers no bfloat16: take the bits.
        return wide(array.view(np.uint16)[numbers].view(array.dtype))

    def stored(self, array: Any) -> Any:
        """A stored array in the dtype of the computation."""
        return wide(array)

    def dequantized(self, codes: Any, scales: Any) -> Any:
        """A stored weight of float8 in that dtype."""
        return dequantized(self.xp, codes, scales)

    def norm(self, x: Any, gain: Any, eps: float) -> Any:
        mean = (x * x).mean(axis=-1, keepdims=True)
        return x / self.xp.sqrt(mean + np.float32(eps)) * gain

    def attend(
        self, q: Any, keys: Any, values: Any, sinks: Any = None, mask: Any = None
    ) -> Any:
        """q [rows, kv_heads, heads, dim], keys and values [rows, kv_heads, positions,
        dim], sinks [.., 1] and mask [.., positions] as the scores -> as q."""
        scores = q @ keys.swapaxes(2, 3) / q.shape[-1] ** 0.5
        if mask is not None:
            scores = self.xp.where(mask, scores, np.float32(-np.inf))
        if sinks is None:
            return self._softmax(scores) @ values
        every_sink = self.xp.broadcast_to(sinks, (*scores.shape[:-1], 1))
        scores = self.xp.concatenate([scores, every_sink], axis=-1)
        return self._softmax(scores)[..., :-1] @ values

    def activated(self, activation: Activation, gate: Any, up: Any) -> Any:
        if limit := activation.limit:
            gate = self.xp.clip(gate, None, limit)
            up = self.xp.clip(up, -limit, limit)
        return self.gate(gate, activation.alpha) * (up + activation.shift)

    def gate(self, x: Any, alpha: float) -> Any:
        return x / (1 + self.xp.exp(-alpha * x))

    def shares(self, router: Router, logits: Any, ids: Any) -> Any:
        """The weights of each row's chosen experts."""
        shares = self.xp.take_along_axis(self.scores(router, logits), ids, axis=1)
        sums = shares.sum(axis=1, keepdims=True) if router.normalize else 1.0
        return shares / sums * router.scale

    def scores(self, router: Router, logits: Any) -> Any:
        if router.score == "sigmoid":
            return 1 / (1 + self.xp.exp(-logits))
        return self._softmax(logits)

    def gap(self, logits: Any, ids: Any) -> float:
        """How far the logit of a chosen expert is below one that was not chosen, at
        most, relative to the root mean square; or the score, with its correction."""
        logits_of_ids = self.xp.take_along_axis(logits, ids, axis=1)
        best = self.xp.sort(logits, axis=1)[:, -ids.shape[1] :]
        below = (best - self.xp.sort(logits_of_ids, axis=1)).max()
        return float(below / self.xp.sqrt((logits**2).mean()))

    def _softmax(self, logits: Any) -> Any:
        parts = self.xp.exp(logits - logits.max(axis=-1, keepdims=True))
        return parts / parts.sum(axis=-1, keepdims=True)


class Torch(Fp32):
    """The model's dtype, on torch's tensors."""

    def __init__(self, torch: Any, dtype: Any):
        super().__init__(torch)
        self._functional, self._dtype = torch.nn.functional, dtype

    def rows(self, array: Any, numbers: Any) -> Any:
        return array[numbers.long()]

    def stored(self, array: Any) -> Any:
        return array.to(self._dtype)

    def dequantized(self, codes: Any, scales: Any) -> Any:
        rows, columns = codes.shape
        row_scales = scales.repeat_interleave(BLOCK, 0)[:rows]
        row_scales = row_scales.repeat_interleave(BLOCK, 1)[:, :columns]
        numbers = self.xp.as_tensor(NUMBERS, device=codes.device)
        return (numbers[codes.long()] * row_scales).to(self._dtype)

    def norm(self, x: Any, gain: Any, eps: float) -> Any:
        mean = x.float().pow(2).mean(-1, keepdim=True)
        return gain * (x.float() * self.xp.rsqrt(mean + eps)).to(x.dtype)

    def attend(
        self, q: Any, keys: Any, values: Any, sinks: Any = None, mask: Any = None
    ) -> Any:
        if sinks is not None or mask is not None:
            return super().attend(q, keys, values, sinks, mask)
        return self._functional.scaled_dot_product_attention(q, keys, values)

    def gate(self, x: Any, alpha: float) -> Any:
        return self._functional.silu(x) if alpha == 1 else x * (alpha * x).sigmoid()

    def shares(self, router: Router, logits: Any, ids: Any) -> Any:
        scores = self.scores(router, logits.to(self.xp.float32))
        shares = scores.gather(1, ids.long())
        sums = shares.sum(-1, keepdim=True) if router.normalize else 1.0
        return (shares / sums * router.scale).to(self._dtype)

    def gap(self, logits: Any, ids: Any) -> float:
        return 0.0

    def _softmax(self, logits: Any) -> Any:
        return logits.softmax(-1, dtype=self.xp.float32).to(logits.dtype)


Attend = Callable[[int, Any, Any, Any, Any], Any]
"""attend(layer, q, k, v, sinks): q [rows, kv_heads, heads, dim], k and v [rows,
kv_heads, dim] of a layer's rows, sinks [kv_heads, heads, 1] or None -> as q."""


def step_logits(
    math: Fp32, config: ModelConfig, arrays: Mapping[str, Any]
) -> tuple[Any, float]:
    """Row r is the last position of request r. All layers that `arrays` holds. The
    cache has the positions before the last.

    Rows have the `experts` of `arrays`. Also returns the largest `gap`."""
    positions = arrays["position"].tolist()

    def attend(layer: int, q: Any, k: Any, v: Any, sinks: Any) -> Any:
        attended_rows = []
        for row, last in enumerate(positions):
            table = arrays["table"][row : row + 1]
            keys, values = cached(math, arrays["cache"][layer], table, last + 1)
            keys[0, :, last], values[0, :, last] = k[row], v[row]
            first = max(0, last + 1 - window_of(config, layer, last + 1))
            keys, values = keys[:, :, first:], values[:, :, first:]
            attended_rows.append(math.attend(q[row : row + 1], keys, values, sinks))
        return math.xp.concatenate(attended_rows)

    x, below = _normed(math, config, arrays, attend)
    return x @ math.stored(arrays["w_head"]).T, below


def prompt_logits(
    math: Fp32, config: ModelConfig, arrays: Mapping[str, Any], rows: int = 1
) -> tuple[Any, float]:
    """As `step_logits`, of the last rows [rows, vocabulary]: row r is position r of one
    request, and there is no cache."""
    position = arrays["position"]
    distance = position[:, None] - position[None]

    def attend(layer: int, q: Any, k: Any, v: Any, sinks: Any) -> Any:
        window = window_of(config, layer, len(k))
        mask, of_heads = (distance >= 0) & (distance < window), []
        for head in range(config.kv_heads):
            group = q[:, head].swapaxes(0, 1)[:, None]
            keys, values = k[:, head][None, None], v[:, head][None, None]
            own_sinks = None if sinks is None else sinks[head][:, None, None]
            group = math.attend(group, keys, values, own_sinks, mask)
            of_heads.append(group[:, 0].swapaxes(0, 1)[:, None])
        return math.xp.concatenate(of_heads, axis=1)

    x, below = _normed(math, config, arrays, attend)
    return x[-rows:] @ math.stored(arrays["w_head"]).T, below


def window_of(config: ModelConfig, layer: int, positions: int) -> int:
    """The positions up to its own that a row attends to, of so many."""
    return (config.windows[layer] if config.windows else 0) or positions


def _normed(
    math: Fp32, config: ModelConfig, arrays: Mapping[str, Any], attend: Attend
) -> tuple[Any, float]:
    """The rows before the output head, and the largest `gap`."""
    dim, eps, features = config.head_dim, config.norm_eps, config.features
    heads, kv_heads = config.heads, config.kv_heads
    num_rows, positions = len(arrays["ids"]), arrays["position"]
    x, below = math.rows(arrays["embedding"], arrays["ids"]), 0.0
    cos_sin = math.stored(math.rows(arrays["cos_sin"], positions))[:, None]
    for layer in range(len(arrays["w_qkv"])):

        def stored(name: str, layer: int = layer) -> Any:
            return _stored_at(math, arrays, name, layer)

        qkv = math.norm(x, stored("norm"), eps) @ stored("w_qkv").T
        if features.qkv_bias:
            qkv = qkv + stored("qkv_bias")
        qkv = qkv.reshape(num_rows, -1, dim)
        q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        if config.normalizes_heads:
            q = math.norm(q, stored("q_norm"), eps)
            k = math.norm(k, stored("k_norm"), eps)
        q, k = rotated(math, q, cos_sin), rotated(math, k, cos_sin)
        v = qkv[:, heads + kv_heads :]
        sinks = None
        if features.has_sinks:
            sinks = stored("sinks").reshape(kv_heads, -1, 1)
        q = q.reshape(num_rows, kv_heads, -1, dim)
        attended = attend(layer, q, k, v, sinks).reshape(num_rows, -1)
        x = x + attended @ stored("w_o").T
        if features.o_bias:
            x = x + stored("o_bias")
        y = math.norm(x, stored("mlp_norm"), eps)
        if config.mixture is None or layer < config.dense_layers:
            matrices = (
                stored(name) for name in (DENSE_WEIGHTS if config.mixture else MLP)
            )
            x = x + _mlp(math, features.activation, y, *matrices)
        else:
            mixed, gap = _mix(math, config, y, arrays, layer)
            x, below = x + mixed, max(below, gap)
    return math.norm(x, math.stored(arrays["norm"][-1]), eps), below


def rotated(math: Fp32, x: Any, cos_sin: Any) -> Any:
    """The rotary embedding of heads [..., dim]; cos_sin: cosines, then sines."""
    half = x.shape[-1] // 2
    low, high, cos, sin = (
        array[..., part]
        for array in (x, cos_sin)
        for part in (slice(half), slice(half, None))
    )
    return math.xp.concatenate(
        (low * cos - high * sin, high * cos + low * sin), axis=-1
    )


def _stored_at(math: Fp32, arrays: Mapping[str, Any], name: str, at: Any) -> Any:
    """The number `at` of a stack of arrays, of which some have scales."""
    array, scales = arrays[name][at], arrays.get(scales_name(name))
    return math.stored(array) if scales is None else math.dequantized(array, scales[at])


def cached(math: Fp32, cache: Any, table: Any, num_positions: int) -> list[Any]:
    """Keys and values of the first positions of each request, [requests, kv_heads,
    positions, head_dim]."""
    table = table[:, : -(-num_positions // cache.shape[3])]
    pages = math.rows(cache, table)  # [.., most_pages, 2, kv_heads, page_size, dim]
    requests, most_pages, _, kv_heads, page_size, dim = pages.shape
    # Each position has its chunks of eight elements in another order.
    xp, num_chunks = math.xp, dim // 8
    order = xp.arange(num_chunks)[None] ^ xp.arange(page_size)[:, None] % 8
    pages = pages.reshape(*pages.shape[:-1], num_chunks, 8)
    pages = pages[..., xp.arange(page_size)[:, None], order, :]
    shape = requests, kv_heads, most_pages * page_size, dim
    arrays = [pages[:, :, n].swapaxes(1, 2).reshape(shape) for n in range(2)]
    return [array[:, :, :num_positions] for array in arrays]


def _mlp(math: Fp32, activation: Activation, x: Any, *arrays: Any) -> Any:
    """arrays: gate, up and down, then their biases, if there are any."""
    w_gate, w_up, w_down, *biases = arrays
    gate_bias, up_bias, down_bias = biases or (0, 0, 0)
    gate, up = x @ w_gate.T + gate_bias, x @ w_up.T + up_bias
    return math.activated(activation, gate, up) @ w_down.T + down_bias


def _mix(
    math: Fp32, config: ModelConfig, x: Any, arrays: Mapping[str, Any], layer: int
) -> tuple[Any, float]:
    mixture, ids = config.mixture, arrays["experts"][layer]
    assert mixture is not None
    layer -= config.dense_layers
    logits = x @ math.stored(arrays["router"][layer]).T
    if mixture.router.has_bias:
        logits = logits + math.stored(arrays["router_bias"][layer])
    names = [*MLP, *(EXPERT_BIASES if mixture.has_biases else ())]
    shares, y = math.shares(mixture.router, logits, ids), math.xp.zeros_like(x)
    for expert in math.xp.unique(ids).tolist():
        matrices = (_stored_at(math, arrays, name, (layer, expert)) for name in names)
        rows, place = math.xp.where(ids == expert)
        result = _mlp(math, mixture.activation, x[rows], *matrices)
        y[rows] += result * shares[rows, place][:, None]
    if mixture.shared:
        matrices = (_stored_at(math, arrays, name, layer) for name in SHARED_WEIGHTS)
        y = y + _mlp(math, config.features.activation, x, *matrices)
    if mixture.router.has_correction:
        logits = math.scores(mixture.router, logits) + arrays["correction"][layer]
    return y, math.gap(logits, ids)
