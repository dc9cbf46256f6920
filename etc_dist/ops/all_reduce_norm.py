"""All-reduce, residual and RMSNorm: what follows a row-parallel layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from etc_dist.compiler import world_or_current
from etc_dist.errors import ArgumentError, expect_type
from etc_dist.functions.add_parts import add_parts
from etc_dist.functions.add_ranks_norm import add_ranks_norm
from etc_dist.functions.rms_norm import add_rms_norm, copy_norm
from etc_dist.ir import (
    Expr,
    Graph,
    Tensor,
    ceildiv,
    equal,
    graph_function,
    maximum,
    minimum,
    select,
    span,
    tile,
)
from etc_dist.ir.tensor import Tile
from etc_dist.ops.exchange_model import (
    LEAST_PIECE,
    ONE_SHOT,
    TWO_SHOT,
    Exchange,
    choose_algorithm,
    largest_sizes,
)
from etc_dist.ops.host_sums import near_rank
from etc_dist.ops.operation import Candidate, Operation
from etc_dist.ops.sum_steps import every_rank, exchange_hosts, local_rank, whole
from etc_dist.ops.tuning import Tuning
from etc_dist.schedule.plan import Choice
from etc_dist.world import World

EPS = 1e-6


@graph_function
def all_reduce_norm_graph(
    g: Graph, *, dtype: str = "bfloat16", eps: float = EPS
) -> None:
    """x and residual [rows, 8 * vectors] on each rank, gain [8 * vectors] -> the sum of
    the residual and x over ranks, and its RMSNorm y; they may be written over residual
    and x. Dims as for `all_reduce_graph`; of two exchanges, a rank adds whole rows."""
    rows, vectors, algorithm, piece = g.dims("rows vectors algorithm piece")
    shape = rows, 8 * vectors
    x, residual = g.input("x", shape, dtype), g.input("residual", shape, dtype)
    gain = g.input("gain", (8 * vectors,), dtype)
    total = g.output("residual_out", shape, dtype, over=residual)
    y = g.output("y", shape, dtype, over=x)
    given, results = (x, residual, gain), (total, y)
    if g.world_size == 1:
        (r,) = grid = g.grid(r=rows)
        own = span(r, 1), slice(None)
        g.call(
            add_rms_norm(dtype, eps),
            grid,
            reads=[x[own], residual[own], gain[:]],
            writes=[total[own], y[own]],
        )
        return
    pieces = g.let("pieces", ceildiv(vectors, piece))

    def used(number: int) -> Expr:
        return g.let(f"rows_{number}", select(equal(algorithm, number), rows, 0))

    if g.local_size == g.world_size:
        _add_one_shot(g, given, results, used(ONE_SHOT), (pieces, piece), eps)
        _add_two_shot(g, given, results, used(TWO_SHOT), (pieces, piece), eps)
    else:
        _add_two_shot(g, given, results, rows, (pieces, piece), eps)


def _add_one_shot(
    g: Graph,
    given: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    rows: Expr,
    divided: tuple[Expr, Expr],
    eps: float,
) -> None:
    """Each rank stores its rows on all ranks, and adds those of all. divided: the
    pieces of a row, and the vectors of each."""
    (x, residual, gain), (total, y), (pieces, piece) = given, results, divided
    columns, dtype = x.shape[1], x.dtype
    slots = g.symmetric("slots", (g.world_size, rows, columns), dtype)
    expects = g.world_size * pieces
    arrived = g.events("arrived", (rows,), expects=expects, cross_rank=True)
    r, c = grid = g.grid(r=rows, c=pieces)
    part, ranks = tile(c, 8 * piece), every_rank(g)
    g.call(
        add_parts(dtype, 1, g.world_size),
        grid,
        name="push_parts",
        reads=[x[r, part]],
        writes=[slots.on(rank)[g.rank, r, part] for rank in ranks],
        notifies=[arrived.on(rank)[r] for rank in ranks],
    )
    (r,) = grid = g.grid(r=rows)
    own = span(r, 1), slice(None)
    g.call(
        add_ranks_norm(dtype, eps),
        grid,
        reads=[slots[:, *own], residual[own], gain[:]],
        writes=[total[own], y[own]],
        waits=[arrived[r]],
    )


def _add_two_shot(
    g: Graph,
    given: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    rows: Expr,
    divided: tuple[Expr, Expr],
    eps: float,
) -> None:
    """Each rank of a host adds the rows of its share, and the residual, and stores the
    sums on all ranks of the host, which normalise all rows."""
    (x, residual, gain), (total, y), (pieces, piece) = given, results, divided
    near, local, (_, columns), dtype = g.local_size, local_rank(g), x.shape, x.dtype
    share = g.let("share", ceildiv(rows, near))
    own_rows = g.let("own_rows", maximum(0, minimum(share, rows - local * share)))
    width = 8 * piece
    parts = g.symmetric("parts", (near, share * columns), dtype)
    expects = near * pieces
    scattered = g.events("scattered", (share,), expects=expects, cross_rank=True)

    def in_row(c: Expr) -> Tile:
        return span(c * width, minimum(width, columns - c * width))

    def in_share(i: Expr, c: Expr) -> tuple[Tile]:
        part = in_row(c)
        return (span(i * columns + part.start, part.size),)

    i, c = grid = g.grid(i=rows, c=pieces)
    # The shares of the next ranks first, so that no rank gets all rows at once.
    r = (i + (local + 1) * share) % rows
    to = near_rank(g, r // share)
    g.call(
        add_parts(dtype, 1),
        grid,
        name="scatter_parts",
        reads=[x[r, in_row(c)]],
        writes=[parts.on(to)[local, *in_share(r % share, c)]],
        notifies=[scattered.on(to)[r % share]],
    )
    sums, ready, kind = parts, scattered, dtype
    if near < g.world_size:
        sums, ready = exchange_hosts(
            g,
            parts,
            scattered,
            (own_rows, lambda i: (span(i * columns, columns),)),
            (pieces, in_share),
        )
        kind = "float32"
    gathered = g.symmetric("gathered", (rows, columns), dtype)
    arrived = g.events("gathered_row", (rows,), expects=pieces, cross_rank=True)
    i, c = grid = g.grid(i=own_rows, c=pieces)
    r, ranks = local * share + i, every_rank(g)
    count = near if kind == dtype else g.world_size // near
    g.call(
        add_parts(kind, count, near, result=dtype, has_residual=True),
        grid,
        name="add_share",
        reads=[whole(sums, *in_share(i, c)), residual[r, in_row(c)]],
        writes=[gathered.on(rank)[r, in_row(c)] for rank in ranks],
        waits=[ready[i]],
        notifies=[arrived.on(rank)[r] for rank in ranks],
    )
    (r,) = grid = g.grid(r=rows)
    own = span(r, 1), slice(None)
    g.call(
        copy_norm(dtype, eps),
        grid,
        reads=[gathered[own], gain[:]],
        writes=[total[own], y[own]],
        waits=[arrived[r]],
    )


class AllReduceNorm(Operation):
    """All-reduce, residual and RMSNorm as a reusable object.

    op(x, residual, gain, out=None, residual_out=None, stream=None): x [M, H] on every
    rank, each with its own values; residual [M, H] and gain [H], alike on all ranks.
    Returns (out, residual_out): residual_out [M, H] is the sum of x over ranks and the
    residual; out [M, H] is residual_out / sqrt(mean(residual_out ** 2) + eps) * gain.
    out may be x, residual_out may be residual. M is at least 1, H a multiple of 8.

    The dtype is that of x, bfloat16 or float16. The residual is added last in fp32, and
    the sum rounded once; the norm is computed in fp32 from the rounded sum. The rest as
    for `AllReduce`.

    eps: a positive number. Arrays, other options and errors as for
    `MatmulReduceScatter`.
    """

    inputs = (
        "x [rows, 8 * vectors]",
        "residual [rows, 8 * vectors]",
        "gain [8 * vectors]",
    )
    output = "out [rows, 8 * vectors], residual_out [rows, 8 * vectors]"
    over: Mapping[str, str] = {"out": "x", "residual_out": "residual"}

    def __init__(
        self,
        *,
        eps: float = EPS,
        world: World | None = None,
        schedule: str = "static",
        trace: bool | None = None,
        deterministic: str = "run",
    ):
        world = world_or_current(world)
        with world.refusing(f"the options of {type(self).__name__}"):
            self.eps = _checked(eps)
        self.options = {"eps": self.eps}
        super().__init__(
            world=world, schedule=schedule, trace=trace, deterministic=deterministic
        )

    def __call__(
        self,
        x: Any,
        residual: Any,
        gain: Any,
        out: Any = None,
        residual_out: Any = None,
        *,
        stream: Any = None,
    ) -> tuple[Any, Any]:
        """Run; returns `out` and `residual_out`, or new arrays. Collective."""
        outs = out, residual_out
        results: tuple[Any, Any] = self.call((x, residual, gain), outs, stream)
        return results

    def candidates(self) -> list[Candidate]:
        """Internal: one graph, with the algorithm chosen for each call."""
        return [
            Candidate(
                all_reduce_norm_graph,
                {"eps": self.eps},
                capacity=self._capacity,
                policy=self._choose,
                over_hosts=True,
            )
        ]

    def _capacity(self, dims: Mapping[str, int]) -> list[Mapping[str, int]]:
        """For all numbers of rows up to this one, as for `AllReduce`."""
        return [
            {**dims, "rows": n, "algorithm": algorithm, "piece": LEAST_PIECE}
            for algorithm, n in largest_sizes(self._exchange(dims))
        ]

    def _choose(
        self, tuning: Tuning, w_layout: str, dims: Mapping[str, int], workers: int
    ) -> Sequence[Choice]:
        return choose_algorithm(self._exchange(dims), workers)

    def _exchange(self, dims: Mapping[str, int]) -> Exchange:
        world = self.world
        return Exchange(dims["rows"], dims["vectors"], world.size, world.local_size)


def _checked(eps: float) -> float:
    """eps, unless it is no positive number."""
    expect_type(eps, (float, int), "eps")
    if not (math.isfinite(eps) and eps > 0):
        raise ArgumentError(
            "eps is out of range",
            where="argument eps",
            wanted="eps: a positive number",
            got=f"eps = {eps}",
            fix="pass rms_norm_eps of the model, such as 1e-6",
        )
    return float(eps)
