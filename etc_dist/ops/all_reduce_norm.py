"""All-reduce, residual and RMSNorm: what follows a row-parallel layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from etc_dist.compiler import world_or_current
from etc_dist.errors import ArgumentError, expect_type
from etc_dist.functions.rms_norm import add_rms_norm
from etc_dist.ir import Graph, graph_function, span
from etc_dist.ops.all_reduce import SumOperation
from etc_dist.ops.exchange_model import AllReduceSizes
from etc_dist.ops.multiply import Matrix
from etc_dist.ops.operation import Candidate
from etc_dist.ops.row_sums import Norm, RowSums
from etc_dist.world import World

EPS = 1e-6
LEAST_EPS = float(np.finfo(np.float32).tiny)
MOST_EPS = float(np.finfo(np.float32).max)


@graph_function
def all_reduce_norm_graph(
    g: Graph, *, dtype: str = "bfloat16", eps: float = EPS, has_flags: bool = False
) -> None:
    """x and residual [rows, 8 * vectors] on each rank, gain [8 * vectors] -> the sum of
    the residual and x over ranks, and its RMSNorm y, all of `dtype`; they may be
    written over residual and x. Dims and has_flags as for `all_reduce_graph`, but that
    `flag_tasks` are at least the rows; of two exchanges, a rank adds whole rows."""
    rows, vectors, algorithm, piece = g.dims("rows vectors algorithm piece")
    shape = rows, 8 * vectors
    x, residual = g.input("x", shape, dtype), g.input("residual", shape, dtype)
    gain = g.input("gain", (8 * vectors,), dtype)
    total = g.output("residual_out", shape, dtype, over=residual)
    y = g.output("y", shape, dtype, over=x)
    if g.world_size == 1:
        (r,) = grid = g.grid(r=rows)
        row = span(r, 1), slice(None)
        g.call(
            add_rms_norm(dtype, eps),
            grid,
            reads=[x[row], residual[row], gain[:]],
            writes=[total[row], y[row]],
        )
        return
    sums = RowSums(g, Matrix(x), y, Norm(residual, gain, total, eps), piece)
    sums.add(algorithm, g.dims("flag_tasks") if has_flags else None)


class AllReduceNorm(SumOperation):
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
            self.eps = checked_eps(eps)
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
        return [self.candidate(all_reduce_norm_graph, eps=self.eps)]

    def exchange(self, dims: Mapping[str, int], has_flags: bool) -> AllReduceSizes:
        """Internal: in rows."""
        world = self.world
        return AllReduceSizes(
            dims["rows"], dims["vectors"], world.size, world.local_size, has_flags
        )

    def dims_of(self, dims: Mapping[str, int], count: int) -> Mapping[str, int]:
        """Internal: `count` rows."""
        return {"rows": count}


def checked_eps(eps: float) -> float:
    """eps. Raises TypeError for others than numbers, ArgumentError unless it is a
    positive one of fp32."""
    expect_type(eps, (float, int), "eps")
    if not LEAST_EPS <= eps <= MOST_EPS:
        raise ArgumentError(
            "eps is out of range",
            where="argument eps",
            wanted="eps: a positive number of fp32",
            got=f"eps = {eps}",
            fix="pass rms_norm_eps of the model, such as 1e-6",
        )
    return float(eps)
