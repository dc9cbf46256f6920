"""GEMM + Reduce-Scatter: y is this rank's rows of the sum over ranks of x @ w.T."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from etc_dist.compiler import world_or_current
from etc_dist.errors import expect_choice
from etc_dist.functions.scaled_weights import weight_input
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import Graph, graph_function
from etc_dist.ops.few_rows import (
    MOST_RETURNED,
    multiply_and_return,
    with_few_rows,
)
from etc_dist.ops.multiply import tiles_of_dims
from etc_dist.ops.operation import Candidate, WeightOperation
from etc_dist.ops.quantized_rows import rows_for
from etc_dist.ops.rank_tiles import rank_tiles_candidate
from etc_dist.ops.return_rows import add_returned_matmul
from etc_dist.ops.scaled_weight import FLOAT8
from etc_dist.ops.tile_model import FAMILY
from etc_dist.world import World

FLOAT_FAMILY = tuple(
    shape
    for shape in FAMILY
    if shape.swapped and shape.columns == 128 and shape.rows in (16, 64, 128, 192, 256)
)
"""Those of tiles of fp32 partial sums, whose epilogues take long to compile."""


@graph_function
def matmul_reduce_scatter_graph(
    g: Graph,
    *,
    dtype: str = "bfloat16",
    w_layout: str = "nk",
    shapes: Sequence[TileShape] | None = None,
    partials: str | None = None,
) -> None:
    """x [world, rows, k], w [n, k] or [k, n] -> y [rows, n] on each rank.

    Every rank computes its partial sums of all rows, tile by tile. It pushes some
    columns of a block of rows to the rank that owns it once their tiles are computed.
    The owner adds the partial sums in rank order. With a layout of float8 activations,
    x is quantized first. See `tiles_of_dims` and `TiledMatmul`
    for the dims that select tiles. shapes: of tiles, FAMILY or with partials="float32"
    FLOAT_FAMILY. partials: their dtype; None: `dtype`."""
    rows, n, k = g.dims("rows n k")
    x = g.input("x", (g.world_size, rows, k), dtype)
    w = weight_input(g, "w", w_layout, n, k, dtype)
    y = g.output("y", (rows, n), dtype)
    shapes = shapes or (FLOAT_FAMILY if partials else FAMILY)
    tiles = tiles_of_dims(g, "", shapes, rows, w_layout)
    add_returned_matmul(g, "", tiles, x, w, y, partials=partials)


@graph_function
def returned_matmul_graph(
    g: Graph,
    *,
    dtype: str = "bfloat16",
    w_layout: str = "nk",
    shapes: Sequence[TileShape] = FAMILY,
) -> None:
    """x [world * rows, k], w [n, k] or [k, n] -> y [rows, n] on each rank, for few
    rows. Columns of rows are sent to their owners once their tiles are computed. Dims
    select the tiles: see `tiles_of_dims` and `TiledMatmul`."""
    rows, n, k = g.dims("rows n k")
    tokens = g.let("tokens", g.world_size * rows)
    x = g.input("x", (tokens, k), dtype)
    w = weight_input(g, "w", w_layout, n, k, dtype)
    y = g.output("y", (rows, n), dtype)
    tiles = tiles_of_dims(g, "", shapes, tokens, w_layout)
    x_rows, x_events = rows_for(g, "", tiles, x, n, None)
    multiply_and_return(g, "", tiles, (x_rows, w, y), x_events)


class MatmulReduceScatter(WeightOperation):
    """GEMM + Reduce-Scatter as a reusable object.

    op(x, w, out=None, stream=None): x [M, K] and w [N, K] on every rank, each rank with
    its own values; returns out [M / world_size, N]: rows [rank * M / world_size, ...)
    of the sum over ranks of x @ w.T. w may be a transposed view, w.T of a contiguous
    [K, N] array, or scaled, as for `Matmul`. M is a multiple of the world size; on GPUs
    K and N are multiples of 8.

    The dtype is that of x, bfloat16 or float16. The ranks' partial sums are added in
    fp32 in rank order: the same bits on every run. Each is rounded to the dtype before
    it is sent; in float16 it must be within +-65504. partials="float32" keeps them in
    fp32, for twice the bytes between ranks. Over several hosts each host's sum is
    rounded once more, except with partials="float32".

    Arrays: NumPy on the CPU backend; CuPy, torch, DLPack or `__cuda_array_interface__`
    on GPUs, not copied. The first call with a dtype and a layout of w compiles a
    program, whose tiles are chosen for each number of rows. The first call with few
    rows, at most 1536 of all ranks on one host, compiles another one, which allocates
    memory for 1536 rows at once. schedule, trace: as for `etc_dist.compile`.
    deterministic, activations: as for `Matmul`. With activations="float8" the partial
    sums that are sent stay in the dtype, or in fp32.

    Raises on every rank: ArgumentError if any rank's arrays do not fit or the ranks'
    shapes differ, TypeError if an argument of any rank has a wrong type.
    """

    inputs = "x [ranks * rows, k]", "w [n, k]"
    output = "out [rows, n]"

    def __init__(
        self,
        *,
        partials: str | None = None,
        world: World | None = None,
        schedule: str = "static",
        trace: bool | None = None,
        deterministic: str = "run",
        activations: str = "16-bit",
    ):
        world = world_or_current(world)
        with world.refusing(f"the options of {type(self).__name__}"):
            if partials is not None:
                expect_choice(partials, ["float32"], "partials")
        self.partials, self.options = partials, {"partials": partials}
        super().__init__(
            world=world,
            schedule=schedule,
            trace=trace,
            deterministic=deterministic,
            activations=activations,
        )

    def candidates(self) -> list[Candidate]:
        """Internal: tiles that are sent at once, or whole rows where they are few."""
        has_own_family = self.partials and self.activations != FLOAT8
        many = rank_tiles_candidate(
            partial(matmul_reduce_scatter_graph, partials=self.partials),
            self.world,
            self.deterministic,
            self.sizes,
            shapes=FLOAT_FAMILY if has_own_family else self.family,
            divides=self.partials is None or self.world.size == 1,
        )
        if self.partials:
            return [many]
        return with_few_rows(
            returned_matmul_graph,
            many,
            self.world,
            self.deterministic,
            MOST_RETURNED,
            shapes=self.family,
        )
