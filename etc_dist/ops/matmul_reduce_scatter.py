"""GEMM + Reduce-Scatter: y is this rank's rows of the sum over ranks of x @ w.T."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from etc_dist.compiler import world_or_current
from etc_dist.errors import expect_choice
from etc_dist.functions.matmul import TILE, matmul_send, weight_columns, weight_shape
from etc_dist.functions.sum_slots import PIECE_COLUMNS, PIECE_ROWS
from etc_dist.functions.tile_matmul import TileShape
from etc_dist.ir import Graph, ceildiv, graph_function, tile
from etc_dist.ops.argument_table import ArgumentTable
from etc_dist.ops.few_rows import RowBlocks, with_few_rows
from etc_dist.ops.float_partials import float_partials_graph
from etc_dist.ops.matmul_policy import SHAPES
from etc_dist.ops.operation import Candidate, WeightOperation
from etc_dist.ops.slots import add_sum_slots, make_slots
from etc_dist.world import World

COLUMN_GROUP = 1
"""Columns of tiles that are sent to all owners before the next: measured fastest."""


@graph_function
def matmul_reduce_scatter_graph(
    g: Graph,
    *,
    dtype: str = "bfloat16",
    w_layout: str = "nk",
    tile_size: int = TILE,
    piece: tuple[int, int] = (PIECE_ROWS, PIECE_COLUMNS),
) -> None:
    """x [world, rows, k], w [n, k] or [k, n] -> y [rows, n] on each rank.

    Every rank computes its partial sum of all rows, tile by tile, and pushes each tile
    into a slot of the rank that owns it; the owner adds the slots in rank order. Over
    several hosts see `add_host_sums`. On the CPU backend tile_size and piece, the part
    of a tile that one task sums, may have other values."""
    rows, n, k = g.dims("rows n k")
    world, size = g.world_size, tile_size
    blocks = g.let("blocks", ceildiv(rows, size))
    columns = g.let("columns", ceildiv(n, size))
    x = g.input("x", (world, rows, k), dtype)
    w = g.input("w", weight_shape(w_layout, n, k), dtype)
    y = g.output("y", (rows, n), dtype)
    slots = make_slots(g, blocks, columns, size, dtype, COLUMN_GROUP)
    *_, i, j = slots.grid
    g.call(
        matmul_send(w_layout, dtype),
        slots.grid,
        reads=[
            x[slots.owner, tile(i, size), :],
            weight_columns(w_layout, w, tile(j, size)),
        ],
        writes=[slots.slot],
        notifies=[slots.ready],
        order=slots.order,
    )
    add_sum_slots(g, slots, y, piece)


@graph_function
def returned_matmul_graph(
    g: Graph,
    *,
    dtype: str = "bfloat16",
    w_layout: str = "nk",
    shapes: Sequence[TileShape] = SHAPES,
) -> None:
    """x [world * rows, k], w [n, k] or [k, n] -> y [rows, n] on each rank, for few
    rows. A row is sent to its owner once all of its tiles are computed. The dim `shape`
    selects one of `shapes_for(w_layout, shapes)`, by position."""
    rows, n, k, shape = g.dims("rows n k shape")
    tokens = g.let("tokens", g.world_size * rows)
    x = g.input("x", (tokens, k), dtype)
    w = g.input("w", weight_shape(w_layout, n, k), dtype)
    y = g.output("y", (rows, n), dtype)
    blocks = RowBlocks(g, tokens)
    tiles = blocks.tiles("tile", shape, shapes, w_layout)
    blocks.multiply_and_return("matmul", tiles, (x, w, y), None)


class MatmulReduceScatter(WeightOperation):
    """GEMM + Reduce-Scatter as a reusable object.

    op(x, w, out=None, stream=None): x [M, K] and w [N, K] on every rank, each rank with
    its own values; returns out [M / world_size, N]: rows [rank * M / world_size, ...)
    of the sum over ranks of x @ w.T. w may be a transposed view, w.T of a contiguous
    [K, N] array. M is a multiple of the world size; on GPUs K and N are multiples of 8.

    The dtype is that of x, bfloat16 or float16. The ranks' partial sums are added in
    fp32 in rank order: the same bits on every run. Each is rounded to the dtype before
    it is sent; in float16 it must be within +-65504. partials="float32" keeps them in
    fp32, for twice the bytes between ranks; then w must be contiguous. Over several
    hosts each host's sum is rounded once more, except with partials="float32".

    Arrays: NumPy on the CPU backend; CuPy, torch, DLPack or `__cuda_array_interface__`
    on GPUs, not copied. The first call with a dtype and a layout of w compiles a
    program. The first call with few rows compiles another one: on one host, at most
    1024 rows of all ranks, and not a multiple of 256 on each. The latter sends a row
    once all of its tiles are computed, selects tile shapes by the number of rows, and
    allocates memory for 1024 rows at once. schedule, trace: as for
    `etc_dist.compile`. deterministic: as for `Matmul`.

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
    ):
        world = world_or_current(world)
        with world.refusing(f"the options of {type(self).__name__}"):
            if partials is not None:
                expect_choice(partials, ["float32"], "partials")
        self.partials, self.options = partials, {"partials": partials}
        super().__init__(
            world=world, schedule=schedule, trace=trace, deterministic=deterministic
        )

    def candidates(self) -> list[Candidate]:
        """Internal: tiles that are sent at once, or whole rows where they are few."""
        if self.partials:
            return [Candidate(float_partials_graph, self.sizes, over_hosts=True)]
        many = Candidate(matmul_reduce_scatter_graph, self.sizes, over_hosts=True)
        given = many, self.world, self.deterministic
        return with_few_rows(returned_matmul_graph, *given)

    @classmethod
    def table(
        cls, ranks: int, *, partials: Any = None, **options: Any
    ) -> ArgumentTable:
        """Internal: with partial sums in fp32, w cannot be a transposed view."""
        w = "" if partials else "w"
        return ArgumentTable(
            cls.__name__, ranks, cls.inputs, cls.output, transposable=w
        )
