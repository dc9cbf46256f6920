"""A graph that appends to a paged cache and attends to it, its inputs, and a plain
reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from etc_dist.functions.append_kv import PagedCache, append_kv
from etc_dist.functions.attend import HEADS, attend
from etc_dist.functions.combine_slices import combine_slices
from etc_dist.functions.rotary import frequencies, rotary_table
from etc_dist.ir import Graph, ceildiv, graph_function, minimum, span, tile
from tests.layers.reference import draw

Array = np.ndarray[Any, Any]
EPS, BASE = 1e-6, 10000.0
SLICE_POSITIONS = 16
WINDOW = 41
"""Of the layer, if the cache has windows."""


@graph_function
def attention(
    g: Graph,
    *,
    paged: PagedCache,
    group: int,
    together: int = 1,
    layer: int = 1,
    is_whole: bool = False,
) -> None:
    """qkv [rows, (group + 2) * kv_heads * head_dim] -> y [rows, group * kv_heads *
    head_dim], with the cache of `layer` of two. together: KV heads that a
    task attends to, at most. is_whole: all positions are one slice, and `attend` writes
    y."""
    rows, kv_heads, width = g.dims("rows kv_heads width")
    positions, requests, most_pages, pages = g.dims(
        "positions requests most_pages pages"
    )
    parts, whole = g.dims("parts"), int(is_whole)
    dim, dtype = paged.head_dim, paged.dtype
    heads = group * kv_heads
    qkv = g.input("qkv", (rows, width), dtype)
    gains = [g.input(f"{n}_gain", (2, dim), dtype) for n in "qk"]
    biases = g.input("bias", (2, width), dtype)
    spans = g.input("span", (2, 2), "int32")
    cos_sin = g.input("cos_sin", (positions, dim), "float32")
    request = g.input("request", (rows,), "int32")
    position = g.input("position", (rows,), "int32")
    table = g.input("table", (requests, most_pages), "int32")
    cache = g.state("cache", (2, pages, 2, kv_heads, paged.page_size, dim), dtype)
    sums = g.local("sums", (rows, heads, parts, dim), "float32")
    stats = g.local("stats", (rows, heads, parts, 2), "float32")
    y = g.output("y", (rows, heads * dim), dtype)
    tiles = -(-group // HEADS)
    tasks = ceildiv(kv_heads, together)
    appended = g.events(
        *("appended", (tasks,)),
        expects=lambda n: minimum(together, kv_heads - n * together),
    )
    attended = g.events("attended", (rows, tasks), expects=parts * tiles)

    def gain(n: int) -> list[Any]:
        gain = [] if paged.norm_eps is None else [gains[n][layer, :]]
        return [*gain, *([spans[layer, :]] if paged.has_span else [])]

    def bias(*parts: Any) -> list[Any]:
        return [biases[layer, part] for part in parts] if paged.has_bias else []

    (h,) = grid = g.grid(h=kv_heads)
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
        writes=[cache[layer, :, :, h, :, :]],
        notifies=[appended[h // together]],
    )
    r, i, s = grid = g.grid(r=rows, i=tasks * tiles, s=parts)
    h, first, own = tile(i // tiles, together), i % tiles * HEADS, span(r, 1)
    here = minimum(together, kv_heads - h.start)
    count = here * minimum(HEADS, group - first)
    first = first + h.start * group
    g.call(
        attend(paged, SLICE_POSITIONS, group=min(group, HEADS)),
        grid,
        reads=[
            qkv[own, span(first * dim, count * dim)],
            *bias(span(first * dim, count * dim)),
            *gain(0),
            *(cos_sin[:, :], request[own], position[own], table[:, :]),
            cache[layer, :, :, h, :, :],
        ],
        writes=[
            *(x[own, span(first, count), span(s, 1 - whole), :] for x in (sums, stats)),
            y[span(r, whole), span(first * dim, count * dim)],
        ],
        waits=[appended[i // tiles]],
        notifies=[] if is_whole else [attended[r, i // tiles]],
        values={"slices": parts},
    )
    if is_whole:
        return
    r, h = grid = g.grid(r=rows, h=kv_heads)
    own, of_group = span(r, 1), tile(h, group)
    g.call(
        combine_slices(dim, dtype),
        grid,
        reads=[sums[own, of_group, :, :], stats[own, of_group, :, :]],
        writes=[y[own, tile(h, group * dim)]],
        waits=[attended[r, h // together]],
    )


def draw_step(
    rng: np.random.Generator,
    paged: PagedCache,
    group: int,
    kv_heads: int,
    rows: Sequence[Sequence[int]],
) -> dict[str, Array]:
    """The inputs of a step. rows: of each request, the positions of its rows. Pages are
    in any order; what no position uses is NaN."""
    dim, page = paged.head_dim, paged.page_size
    most_pages = 1 + max((max(p) // page for p in rows if len(p)), default=0)
    pages = len(rows) * most_pages + 1
    order = rng.permutation(pages)
    order = np.roll(order, -order.argmax())  # the last page is used
    table = order[: len(rows) * most_pages].reshape(len(rows), most_pages)
    cache = draw(rng, (2, pages, 2, kv_heads, page, dim), paged.dtype)
    used = np.zeros((pages, page), bool)
    for request, positions in enumerate(rows):
        at = np.arange(max(positions, default=-1) + 1)
        used[table[request, at // page], at % page] = True
    cache.transpose(1, 4, 0, 2, 3, 5)[~used] = np.nan
    order = [(r, p) for r, positions in enumerate(rows) for p in positions]
    request, position = rng.permutation(np.array(order, np.int32)).T
    width = (group + 2) * kv_heads * dim
    return {
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
        "request": request.copy(),
        "position": position.copy(),
        "table": table.astype(np.int32),
        "cache": cache,
    }


def dims_of(given: dict[str, Array], slices: int) -> dict[str, int]:
    rows, width = given["qkv"].shape
    requests, most_pages = given["table"].shape
    return {
        "rows": rows,
        "kv_heads": given["cache"].shape[3],
        "width": width,
        "positions": len(given["cos_sin"]),
        "requests": requests,
        "most_pages": most_pages,
        "pages": given["cache"].shape[1],
        "parts": slices,
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


def expected(
    given: dict[str, Array], paged: PagedCache, group: int, layer: int = 1
) -> tuple[Array, Array]:
    """y in fp64, and the cache after the step."""
    dim, page = paged.head_dim, paged.page_size
    cache, kv_heads = given["cache"].copy(), given["cache"].shape[3]
    qkv = given["qkv"]
    if paged.has_bias:
        sums = qkv.astype(np.float32) + given["bias"][layer].astype(np.float32)
        qkv = sums.astype(qkv.dtype)
    qkv = qkv.reshape(len(qkv), -1, dim)
    q, k, v = np.split(qkv, [group * kv_heads, (group + 1) * kv_heads], axis=1)
    has_norm, is_after = paged.norm_eps is not None, paged.normalizes_rotated
    gains = (given[f"{n}_gain"][layer].astype(np.float64) for n in "qk")
    q_gain, k_gain = (g + paged.gain_offset if has_norm else None for g in gains)
    rows = [*zip(given["request"], given["position"], strict=True)]
    for row, (request, position) in enumerate(rows):
        at = given["table"][request, position // page], position % page
        for h in range(kv_heads):
            key = turned(k[row, h], position, k_gain, is_after).astype(cache.dtype)
            cache[layer, at[0], :, h, at[1]] = key, v[row, h]
    y = np.zeros((len(rows), group * kv_heads, dim))
    for row, (request, position) in enumerate(rows):
        begin = position + 1 - WINDOW if paged.has_span else 0
        at = np.arange(max(begin, 0), position + 1)
        pages, slots = given["table"][request, at // page], at % page
        for head in range(group * kv_heads):
            keys, values = (
                cache[layer, pages, i, head // group, slots].astype(np.float64)
                for i in range(2)
            )
            query = turned(q[row, head], position, q_gain, is_after)
            query = query.astype(cache.dtype)
            scores = keys @ query.astype(np.float64) / np.sqrt(dim)
            weights = np.exp(scores - scores.max())
            y[row, head] = weights @ values / weights.sum()
    return y.reshape(len(rows), -1), cache
