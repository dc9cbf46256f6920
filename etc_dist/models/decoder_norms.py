"""The norms of a decoder's layers."""

from __future__ import annotations

from collections.abc import Sequence

from etc_dist.functions.add_ranks_norm import add_ranks_norm
from etc_dist.functions.heads_norm import norm_of_ranks, push_squares
from etc_dist.functions.post_norm import post_norm, post_ranks_norm
from etc_dist.functions.rms_norm import add_rms_norm, rms_norm
from etc_dist.ir import DeviceFunction, EventTensor, Expr, Graph, Tensor, span
from etc_dist.models.sizes import DecoderSizes
from etc_dist.ops.near_ranks import peers_of


def norm_of_sum(
    sizes: DecoderSizes, is_sum: bool, has_bias: bool, early: bool
) -> DeviceFunction:
    """What adds the output of attention or of the MLP to the residual. is_sum: it is a
    sum over ranks. early: the residual is read before the last wait, if possible."""
    of, features = (sizes.dtype, sizes.norm_eps), sizes.features
    if features.post_norm:
        make = post_ranks_norm if is_sum else post_norm
        return make(
            *of,
            has_bias=has_bias,
            normalizes_sum=features.pre_norm,
            offset=features.gain_offset,
        )
    if is_sum:
        return add_ranks_norm(*of, has_bias=has_bias)
    return add_rms_norm(*of, has_bias=has_bias, early=early)


def norm_of_heads(
    g: Graph,
    qkv: Tensor,
    gains: Sequence[Tensor],
    dtype: str,
    eps: float,
    qkv_events: EventTensor,
    turns: tuple[Expr, Expr],
    turn: tuple[Expr, Expr],
) -> EventTensor:
    """Normalizes all queries of each row of qkv together, and all keys, over the heads
    of all ranks, in place; the events that are met after them. gains [layers, columns]:
    of queries, and of keys. qkv_events: after them it is complete."""
    rows, layer, world = qkv.shape[0], turn[1], g.world_size
    normed = g.events("heads_normed", turns, expects=rows * len(gains))
    (r,) = grid = g.grid(r=rows)
    row = span(r, 1)
    first, second = (gain.shape[1] for gain in gains)
    columns = span(0, first), span(first, second)
    squares, wait = None, qkv_events[turn]
    if world > 1:
        squares = g.symmetric("head_squares", (len(gains), rows, world), "float32")
        expects = rows * world
        squares_events = g.events(
            "squares_arrived", turns, expects=expects, cross_rank=True
        )
        peers = [g.rank, *peers_of(g)]
        g.call(
            push_squares(dtype, world),
            grid,
            reads=[qkv[row, part] for part in columns],
            writes=[squares.on(peer)[:, row, g.rank] for peer in peers],
            waits=[wait],
            notifies=[squares_events.on(peer)[turn] for peer in peers],
        )
        wait = squares_events[turn]
    for n, (gain, part) in enumerate(zip(gains, columns, strict=True)):
        of_ranks = [] if squares is None else [squares[n, row, :]]
        make = rms_norm if squares is None else norm_of_ranks
        g.call(
            make(dtype, eps),
            grid,
            name=f"{gain.name}_of_row",
            reads=[qkv[row, part], *of_ranks, gain[layer, :]],
            writes=[qkv[row, part]],
            waits=[wait],
            notifies=[normed[turn]],
        )
    return normed
