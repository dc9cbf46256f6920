"""A graph that appends to a paged cache and attends to it, its inputs, and a plain
reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from etc_dist.functions.append_kv import PagedCache, append_kv
from etc_dist.functions.attend import HEADS, attend, written
from etc_dist.functions.attend_prompt import (
    HEAD_DIMS,
    attend_prompt,
    heads_of_block,
    rows_of_block,
)
from etc_dist.functions.combine_slices import combine_slices
from etc_dist.functions.plan_shares import (
    BOUND,
    CUT,
    EXTENT,
    MOST_ROWS,
    MOST_SHARES,
    STAGE,
    plan_shares,
)
from etc_dist.functions.rotary import frequencies, rotary_table
from etc_dist.ir import Graph, graph_function, minimum, select, span, tile, up_to
from tests.layers.reference import draw

Array = np.ndarray[Any, Any]
EPS, BASE = 1e-6, 10000.0
WINDOW = 141
"""Of the layer, if the cache has windows."""
APPEND_PARTS = 4
"""Tasks of a KV head that append."""


@graph_function
def attention(g: Graph, *, paged: PagedCache, group: int, layer: int = 1) -> None:
    """qkv [rows, (group + 2) * kv_heads * head_dim] -> y [rows, group * kv_heads *
    head_dim], with the cache of `layer` of two, and extents and bounds of the plan."""
    rows, kv_heads, width = g.dims("rows kv_heads width")
    positions, requests, most_pages, pages = g.dims(
        "positions requests most_pages pages"
    )
    shares, of_task, cuts = g.dims("shares shares_of_task cuts")
    most_blocks = g.dims("most_blocks")
    has_blocks = paged.head_dim in HEAD_DIMS
    dim, dtype = paged.head_dim, paged.dtype
    heads = group * kv_heads
    qkv = g.input("qkv", (rows, width), dtype)
    gains = [g.input(f"{n}_gain", (2, dim), dtype) for n in "qk"]
    biases = g.input("bias", (2, width), dtype)
    spans = g.input("span", (2, 2), "int32")
    sinks = g.input("sinks", (2, heads), "float32") if paged.has_sinks else None
    cos_sin = g.input("cos_sin", (positions, dim), "float32")
    request = g.input("request", (rows,), "int32")
    position = g.input("position", (rows,), "int32")
    table = g.input("table", (requests, most_pages), "int32")
    cache = g.state("cache", (2, pages, 2, kv_heads, paged.page_size, dim), dtype)
    extents = g.local("extents", (rows, EXTENT), "int32")
    bounds = g.local("bounds", (shares + 1, BOUND), "int32")
    most = g.let("most_combined", select(cuts < 1, shares, rows))
    combined = g.local("combined", (most, 3), "int32")
    num_combined = g.local("num_combined", (1,), "int32")
    blocks = g.local("blocks", (1 + most_blocks, 2), "int32")
    slots = g.let("slots", select(cuts < 1, 2 * shares, rows * cuts))
    sums = g.local("sums", (slots, heads, dim), "float32")
    stats = g.local("stats", (slots, heads, 2), "float32")
    y = g.state("y", (rows, heads * dim), dtype)
    num_head_tiles = -(-group // HEADS)
    num_share_tasks = g.let("share_tasks", shares // of_task)
    plan_event = g.events("planned", (1,), expects=1)
    appended = g.events("appended", (kv_heads,), expects=APPEND_PARTS)
    attended = g.events(
        "attended", (1,), expects=kv_heads * num_head_tiles * num_share_tasks
    )

    def gain(n: int) -> list[Any]:
        gain = [] if paged.norm_eps is None else [gains[n][layer, :]]
        return [*gain, *([spans[layer, :]] if paged.has_span else [])]

    def sinks_of(heads: Any) -> list[Any]:
        return [] if sinks is None else [sinks[layer, heads]]

    def bias(*parts: Any) -> list[Any]:
        return [biases[layer, part] for part in parts] if paged.has_bias else []

    every = span(0, minimum(MOST_ROWS, rows))
    bound = span(0, minimum(MOST_SHARES, shares) + 1)
    g.call(
        plan_shares(paged, rows_of_block(group) * has_blocks),
        g.grid(one=1),
        reads=[
            *([spans[layer, :]] if paged.has_span else []),
            *(cos_sin[:, :], request[every], position[every], table[:, :]),
        ],
        writes=[
            *(extents[every, :], bounds[bound, :], combined[:, :], num_combined[:]),
            *[blocks[:, :]] * has_blocks,
        ],
        notifies=[plan_event[0]],
        values={"lists": of_task},
    )
    h, part = grid = g.grid(h=kv_heads, part=APPEND_PARTS)
    slots_of_part = tile(part, paged.page_size // APPEND_PARTS)
    key = heads * dim + h * dim
    g.call(
        append_kv(paged),
        grid,
        reads=[
            qkv[:, span(key, dim)],
            qkv[:, span(key + kv_heads * dim, dim)],
            *bias(span(key, dim), span(key + kv_heads * dim, dim)),
            *gain(1),
            *(cos_sin[:, :], request[:], position[:], table[:, :]),
        ],
        writes=[cache[layer, :, :, h, slots_of_part, :]],
        waits=[plan_event[0]],  # so that tasks that attend begin before
        notifies=[appended[h]],
    )
    i, j = grid = g.grid(i=kv_heads * num_head_tiles, j=num_share_tasks)
    h, first_head = i // num_head_tiles, i % num_head_tiles * HEADS
    first, count = h * group + first_head, minimum(HEADS, group - first_head)
    own_rows, own_slots = written(bounds, (), j, of_task)
    g.call(
        attend(paged, early=True),
        grid,
        reads=[
            qkv[:, span(first * dim, count * dim)],
            *bias(span(first * dim, count * dim)),
            *(*gain(0), *sinks_of(span(first, count))),
            *(cos_sin[:, :], table[:, :]),
            cache[layer, :, :, h, :, :],
            extents[:, :],
            bounds[:, :],
        ],
        writes=[
            *(x[span(*own_slots), span(first, count), :] for x in (sums, stats)),
            y[span(*own_rows), span(first * dim, count * dim)],
        ],
        waits=[plan_event[0], appended[h]],
        notifies=[attended[0].when(num_combined.load(0))],
        even=True,
    )
    if has_blocks:
        width = heads_of_block(group)
        num_tiles = -(-group // width)
        b, i = grid = g.grid(
            b=up_to(most_blocks, blocks.load(0, 0)), i=kv_heads * num_tiles
        )
        h, first_head = i // num_tiles, i % num_tiles * width
        first, count = h * group + first_head, minimum(width, group - first_head)
        num_rows = minimum(rows_of_block(group), blocks.load(b + 1, 1))
        of_block = span(blocks.load(b + 1, 0), num_rows)
        g.call(
            attend_prompt(paged),
            grid,
            reads=[
                qkv[of_block, span(first * dim, count * dim)],
                *bias(span(first * dim, count * dim)),
                *(*gain(0), *sinks_of(span(first, count))),
                *(cos_sin[:, :], table[:, :]),
                cache[layer, :, :, h, :, :],
                extents[of_block, :],
            ],
            writes=[y[of_block, span(first * dim, count * dim)]],
            waits=[plan_event[0], appended[h]],
            even=True,
        )
    n, h = grid = g.grid(n=up_to(most, num_combined.load(0)), h=kv_heads)
    row, slot, count = (combined.load(n, k) for k in range(3))
    slot_heads, of_group = span(slot, count), tile(h, group)
    g.call(
        combine_slices(dim, dtype, has_sinks=paged.has_sinks, early=True),
        grid,
        reads=[
            *(x[slot_heads, of_group, :] for x in (sums, stats)),
            *sinks_of(of_group),
        ],
        writes=[y[row, tile(h, group * dim)]],
        waits=[plan_event[0], attended[0]],
        even=True,
    )


def draw_step(
    rng: np.random.Generator,
    paged: PagedCache,
    group: int,
    kv_heads: int,
    rows: Sequence[Sequence[int]],
    in_order: bool = False,
) -> dict[str, Array]:
    """The inputs of a step. rows: of each request, the positions of its rows. Pages are
    in any order, as are rows, unless in_order; what no position uses is NaN."""
    dim, page = paged.head_dim, paged.page_size
    most_pages = 1 + max((max(p) // page for p in rows if len(p)), default=0)
    pages = len(rows) * most_pages + 1
    order = rng.permutation(pages)
    order = np.roll(order, -order.argmax())  # the last page is used
    table = order[: len(rows) * most_pages].reshape(len(rows), most_pages)
    cache = draw(rng, (2, pages, 2, kv_heads, page, dim), paged.dtype)
    is_used = np.zeros((pages, page), bool)
    for request_idx, positions in enumerate(rows):
        at = np.arange(max(positions, default=-1) + 1)
        is_used[table[request_idx, at // page], at % page] = True
    cache.transpose(1, 4, 0, 2, 3, 5)[~is_used] = np.nan
    order = [(r, p) for r, positions in enumerate(rows) for p in positions]
    places = np.array(order, np.int32)
    request_idx, position = (places if in_order else rng.permutation(places)).T
    width = (group + 2) * kv_heads * dim
    sinks = 2 * rng.standard_normal((2, group * kv_heads)).astype(np.float32)
    return ({"sinks": sinks} if paged.has_sinks else {}) | {
        "qkv": draw(rng, (len(order), width), paged.dtype),
        "q_gain": draw(rng, (2, dim), paged.dtype),
        "k_gain": draw(rng, (2, dim), paged.dtype),
        "bias": draw(rng, (2, width), paged.dtype),
        "span": np.array(
            [[0, 0], [WINDOW, (paged.tables - 1) * most_pages * page]], np.int32
        ),
        "cos_sin": np.concatenate(
            [
                rotary_table(most_pages * page, frequencies(dim, base))
                for base in [2 * BASE] * (paged.tables - 1) + [BASE]
            ]
        ),
        "request": request_idx.copy(),
        "position": position.copy(),
        "table": table.astype(np.int32),
        "cache": cache,
        "y": np.full((len(order), group * kv_heads * dim), np.nan, cache.dtype),
    }


def dims_of(
    arrays: dict[str, Array],
    shares: int,
    of_task: int = 1,
    in_order: bool = False,
    blocks: int = 0,
) -> dict[str, int]:
    """in_order: rows are cut. blocks: of rows, at most."""
    most = -(-(int(arrays["position"].max()) + 1) // STAGE)
    rows, width = arrays["qkv"].shape
    requests, most_pages = arrays["table"].shape
    return {
        "rows": rows,
        "kv_heads": arrays["cache"].shape[3],
        "width": width,
        "positions": len(arrays["cos_sin"]),
        "requests": requests,
        "most_pages": most_pages,
        "pages": arrays["cache"].shape[1],
        "shares": shares,
        "shares_of_task": of_task,
        "cuts": -(-most // CUT) if in_order else 0,
        "most_blocks": blocks,
    }


def turned(
    head: Array, position: int, gain: Array | None, is_after: bool = False
) -> Array:
    """A head [dim] in fp64: normalized if there is a gain, and rotated. is_after:
    rotated, then normalized."""
    head = head.astype(np.float64)
    if gain is not None and is_after:
        head = turned(head, position, None)
        return head / np.sqrt((head**2).mean() + EPS) * gain
    if gain is not None:
        head = head / np.sqrt((head**2).mean() + EPS) * gain.astype(np.float64)
    half = len(head) // 2
    pairs = head[:half] + 1j * head[half:]
    pairs = pairs * np.exp(1j * position * BASE ** (-np.arange(half) / half))
    return np.concatenate([pairs.real, pairs.imag])


def in_place(heads: Array, slots: Any) -> Array:
    """Heads [rows, dim] with their chunks of eight elements as in the cache, or in
    order again."""
    pairs = zip(heads, slots, strict=True)
    return np.array(
        [h.reshape(-1, 8)[np.arange(len(h) // 8) ^ s % 8].ravel() for h, s in pairs]
    )


def expected(
    arrays: dict[str, Array], paged: PagedCache, group: int, layer: int = 1
) -> tuple[Array, Array]:
    """y in fp64, and the cache after the step."""
    dim, page = paged.head_dim, paged.page_size
    cache, kv_heads = arrays["cache"].copy(), arrays["cache"].shape[3]
    qkv = arrays["qkv"]
    if paged.has_bias:
        sums = qkv.astype(np.float32) + arrays["bias"][layer].astype(np.float32)
        qkv = sums.astype(qkv.dtype)
    qkv = qkv.reshape(len(qkv), -1, dim)
    q, k, v = np.split(qkv, [group * kv_heads, (group + 1) * kv_heads], axis=1)
    has_norm, is_after = paged.norm_eps is not None, paged.normalizes_rotated
    gains = (arrays[f"{n}_gain"][layer].astype(np.float64) for n in "qk")
    q_gain, k_gain = (g + paged.gain_offset if has_norm else None for g in gains)
    rows = [*zip(arrays["request"], arrays["position"], strict=True)]
    for row, (request, position) in enumerate(rows):
        at = arrays["table"][request, position // page], position % page
        for h in range(kv_heads):
            key = turned(k[row, h], position, k_gain, is_after).astype(cache.dtype)
            for i, head in enumerate((key, v[row, h])):
                cache[layer, at[0], i, h, at[1]] = in_place(head[None], at[1:])[0]
    y = np.zeros((len(rows), group * kv_heads, dim))
    for row, (request, position) in enumerate(rows):
        begin = position + 1 - WINDOW if paged.has_span else 0
        at = np.arange(max(begin, 0), position + 1)
        pages, slots = arrays["table"][request, at // page], at % page
        for head in range(group * kv_heads):
            keys, values = (
                in_place(cache[layer, pages, i, head // group, slots], slots)
                for i in range(2)
            )
            keys, values = keys.astype(np.float64), values.astype(np.float64)
            query = turned(q[row, head], position, q_gain, is_after)
            query = query.astype(cache.dtype)
            scores = keys @ query.astype(np.float64) / np.sqrt(dim)
            if cap := paged.score_cap:
                scores = cap * np.tanh(scores / cap)
            weights = np.exp(scores - scores.max())
            sink = arrays["sinks"][layer, head] if paged.has_sinks else -np.inf
            whole = weights.sum() + np.exp(sink - scores.max())
            y[row, head] = weights @ values / whole
    return y.reshape(len(rows), -1), cache
