"""GEMM + All-Reduce: each rank gets the sum over ranks of x @ w.T, also with residual
and RMSNorm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etc_dist.compiler import world_or_current
from etc_dist.functions.rms_norm import add_rms_norm
from etc_dist.functions.scaled_weights import ScaledTensor, weight_input
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.functions.tile_shape import TileShape, shapes_for
from etc_dist.ir import Expr, Graph, Tensor, equal, graph_function, select, span
from etc_dist.ir.function import TRANSFER
from etc_dist.ops.all_reduce_norm import EPS, checked_eps
from etc_dist.ops.deterministic import BATCH
from etc_dist.ops.exchange_model import (
    TILES,
    TWO_SHOT,
    WARP_PIECES,
    AllReduceSizes,
    choose_algorithm,
    largest_sizes,
)
from etc_dist.ops.few_rows import SENT_WORK, sent_elements
from etc_dist.ops.multiply import Matrix, RowEvents, TiledMatmul, tiles_of_dims
from etc_dist.ops.operation import Candidate, ScalableOperation, WeightOperation
from etc_dist.ops.quantized_rows import Rows, rows_for
from etc_dist.ops.rank_tiles import RankTiles
from etc_dist.ops.row_sums import Norm, RowSums
from etc_dist.ops.tile_model import (
    FAMILY,
    Prediction,
    choices,
    dims_of,
    largest_tilings,
    ranked,
)
from etc_dist.ops.tile_sums import TileSums, strip_of
from etc_dist.ops.tuning import Tuning
from etc_dist.schedule.plan import Choice
from etc_dist.world import World

TILES_NAME = "matmul_"
"""The begin of the names of dims that select tiles."""


@graph_function
def matmul_all_reduce_graph(
    g: Graph,
    *,
    dtype: str = "bfloat16",
    w_layout: str = "nk",
    shapes: Sequence[TileShape] = FAMILY,
    eps: float | None = None,
) -> None:
    """x [rows, k], w [8 * vectors, k] or [k, 8 * vectors] on each rank -> y [rows, 8 *
    vectors], the sum over ranks of x @ w.T. A tile is stored on all ranks, or sent
    while others are computed. Over hosts, with eps, or by two exchanges, a row is sent
    once its tiles are computed. With a layout of float8 activations, x is quantized
    first.

    With eps also residual [rows, 8 * vectors] and gain [8 * vectors], as for
    `all_reduce_norm_graph`; residual_out may be written over residual.

    Dims as for `all_reduce_graph`, and those of `tiles_of_dims` and `TiledMatmul`."""
    rows, vectors, k, algorithm, piece = g.dims("rows vectors k algorithm piece")
    shape = rows, 8 * vectors
    x = g.input("x", (rows, k), dtype)
    w = weight_input(g, "w", w_layout, 8 * vectors, k, dtype)
    norm = None if eps is None else _norm(g, shape, dtype, eps)
    y = g.output("y", shape, dtype)
    is_near = norm is None and 1 < g.local_size == g.world_size
    tiles = tiles_of_dims(g, TILES_NAME, shapes, rows, w_layout, has_peers=is_near)
    x_rows, x_events = rows_for(g, TILES_NAME, tiles, x, 8 * vectors, None)
    if g.world_size == 1 and norm is None:
        TiledMatmul(g, TILES_NAME, tiles, dtype, x_rows, [w], y).add(x_events)
        return
    if is_near:
        _add_tile_sums(g, tiles, (x_rows, w, y), piece, algorithm, x_events)
        return
    product = g.local("product", shape, dtype)
    matmul = TiledMatmul(g, TILES_NAME, tiles, dtype, x_rows, [w], product)
    produced = matmul.complete("produced", tiles.rows)
    matmul.add(x_events)
    if g.world_size > 1:
        RowSums(g, Matrix(product), y, norm, piece, produced, TRANSFER).add(algorithm)
    elif norm is not None:
        (r,) = grid = g.grid(r=rows)
        row = span(r, 1), slice(None)
        g.call(
            add_rms_norm(dtype, norm.eps),
            grid,
            reads=[product[row], norm.residual[row], norm.gain[:]],
            writes=[norm.total[row], y[row]],
            waits=[produced.at(r)],
        )


def _add_tile_sums(
    g: Graph,
    tiles: Tiles,
    operands: tuple[Rows, Tensor | ScaledTensor, Tensor],
    piece: Expr,
    algorithm: Expr,
    waits: RowEvents | None,
) -> None:
    """Sums on one host: of tiles that are stored on all ranks, or of rows by two
    exchanges. The dim `early_strips`: as of `TileSums`. waits: the events of x."""
    (x, w, y), early_strips = operands, g.dims("early_strips")
    g.require(
        "GEMM + All-Reduce on one host has no such exchange",
        [algorithm],
        [(TILES,), (TWO_SHOT,)],
        "let `MatmulAllReduce` choose it",
    )
    is_stored = g.let("is_stored", select(equal(algorithm, TILES), 1, 0))
    num_parts = g.let("result_parts", 1 + is_stored * (g.world_size - 1))
    results = g.symmetric("results", (num_parts, *y.shape), y.dtype)
    own_result = Matrix(results, (g.let("own_result", is_stored * g.rank),))
    own_x = Matrix.of(x)
    matmul = RankTiles(g, TILES_NAME, tiles, y.dtype, own_x, [w], own_result)
    num_elements = sent_elements(2 * SENT_WORK, x.shape[1], y.shape)
    sums = TileSums(
        g,
        matmul,
        results,
        y,
        (num_elements, 8 * piece),
        is_stored,
        early_strips,
        waits,
    )
    produced = sums.add()
    RowSums(g, own_result, y, None, piece, produced, TRANSFER).add_two_shot(algorithm)


def _norm(g: Graph, shape: tuple[Any, Any], dtype: str, eps: float) -> Norm:
    residual: Tensor = g.input("residual", shape, dtype)
    gain = g.input("gain", shape[1:], dtype)
    total = g.output("residual_out", shape, dtype, over=residual)
    return Norm(residual, gain, total, eps)


class _MatmulSums(ScalableOperation):
    """Base: a matmul and an all-reduce of its result. Its graph has the options
    `graph_options`."""

    transposable = "w"
    scalable = ("w",)
    graph_options: Mapping[str, Any] = {}

    def candidates(self) -> list[Candidate]:
        """Internal: one graph, whose tiles and algorithm are chosen for each call."""
        options = {"shapes": self.family, **self.graph_options, **self.sizes}
        return [
            Candidate(
                matmul_all_reduce_graph,
                options,
                capacity=self._capacity,
                policy=self._choose,
                over_hosts=True,
            )
        ]

    def _capacity(
        self, w_layout: str, dims: Mapping[str, int], workers: int
    ) -> list[Mapping[str, int]]:
        """For all numbers of rows up to that of a call, and for the parts of k of all
        sizes."""
        tilings = largest_tilings(
            self._shapes(w_layout),
            workers,
            dims["rows"],
            in_order=self.deterministic == BATCH,
        )
        exchange, piece = self._exchange(dims), min(WARP_PIECES)
        early = {"early_strips": dims["vectors"]}  # more than there are: all whole ones
        exchanges = [
            {**dims, "rows": n, "algorithm": algorithm, "piece": piece}
            | (early if exchange.one_shot == TILES else {})
            for algorithm, n in largest_sizes(exchange)
        ]
        return [
            {**call, **dims_of(tiling, TILES_NAME)}
            for call in (dims, *exchanges)
            for tiling in tilings
        ]

    def _shapes(self, w_layout: str) -> Sequence[TileShape]:
        return shapes_for(w_layout, self.sizes.get("shapes", self.family))

    def _exchange(self, dims: Mapping[str, int]) -> AllReduceSizes:
        world = self.world
        return AllReduceSizes(
            dims["rows"],
            dims["vectors"],
            world.size,
            world.local_size,
            of_tiles="eps" not in self.graph_options,
        )

    def _choose(
        self, tuning: Tuning, w_layout: str, dims: Mapping[str, int], workers: int
    ) -> list[Choice]:
        sizes = dims["rows"], 8 * dims["vectors"], dims["k"]
        shapes, in_order = self._shapes(w_layout), self.deterministic == BATCH
        ranking, notes = ranked(
            sizes, workers, shapes, tuning, in_order=in_order, w_layout=w_layout
        )
        first, exchange = ranking[0], self._exchange(dims)
        waves = first.work.num_tiles / workers
        tiles = choices(TILES_NAME, sizes, workers, shapes, ranking, tuning, notes)
        exchanged = choose_algorithm(exchange, workers, WARP_PIECES, waves)
        if exchange.one_shot != TILES:
            return [*tiles, *exchanged]
        num_early = 0
        if exchanged[0].value == TILES:
            num_early = _num_early_strips(exchange, first, sizes[1], workers)
        why = ["of whole tiles, which are sent while others are computed"]
        return [*tiles, *exchanged, Choice("early_strips", num_early, lambda: why)]


def _num_early_strips(
    exchange: AllReduceSizes, first: Prediction, columns: int, workers: int
) -> int:
    """first: the tiles of a result with so many columns."""
    tiling = first.tiling
    num_whole = -(-columns // tiling.columns) - tiling.split_tile_columns
    share = exchange.early_share(first.us, num_whole * first.tiles_down / workers)
    return int(share * num_whole) // int(strip_of(tiling.columns).evaluate({}))


class MatmulAllReduce(_MatmulSums, WeightOperation):
    """GEMM + All-Reduce as a reusable object.

    op(x, w, out=None, stream=None): x [M, K] and w [N, K] on every rank, each with its
    own values; returns out [M, N], the sum over ranks of x @ w.T, the same bits on all
    ranks. w may be a transposed view, or scaled, as for `Matmul`. N is a multiple of 8,
    on GPUs also K; M is at least 1.

    The dtype is that of x, bfloat16 or float16. Each rank's product is rounded to the
    dtype; the products are added as by `AllReduce`. Arrays, options and errors as for
    `MatmulReduceScatter`; deterministic and activations as for `Matmul`.
    """

    inputs = "x [rows, k]", "w [8 * vectors, k]"
    output = "out [rows, 8 * vectors]"


class MatmulAllReduceNorm(_MatmulSums):
    """GEMM + All-Reduce, residual and RMSNorm as a reusable object: a row-parallel
    layer, and the norm before the next one.

    op(x, w, residual, gain, out=None, residual_out=None, stream=None): x and w as for
    `MatmulAllReduce`, residual [M, N], gain [N] and the results out and residual_out
    [M, N] as for `AllReduceNorm`; residual_out may be residual.

    eps: a positive number. Arrays, other options and errors as for `MatmulAllReduce`.
    """

    inputs = (
        "x [rows, k]",
        "w [8 * vectors, k]",
        "residual [rows, 8 * vectors]",
        "gain [8 * vectors]",
    )
    output = "out [rows, 8 * vectors], residual_out [rows, 8 * vectors]"
    over: Mapping[str, str] = {"residual_out": "residual"}

    def __init__(
        self,
        *,
        eps: float = EPS,
        world: World | None = None,
        schedule: str = "static",
        trace: bool | None = None,
        deterministic: str = "run",
        activations: str = "16-bit",
    ):
        world = world_or_current(world)
        with world.refusing(f"the options of {type(self).__name__}"):
            self.options = self.graph_options = {"eps": checked_eps(eps)}
        super().__init__(
            world=world,
            schedule=schedule,
            trace=trace,
            deterministic=deterministic,
            activations=activations,
        )

    def __call__(
        self,
        x: Any,
        w: Any,
        residual: Any,
        gain: Any,
        out: Any = None,
        residual_out: Any = None,
        *,
        stream: Any = None,
    ) -> tuple[Any, Any]:
        """Run; returns `out` and `residual_out`, or new arrays. Collective."""
        outs = out, residual_out
        results: tuple[Any, Any] = self.call((x, w, residual, gain), outs, stream)
        return results
