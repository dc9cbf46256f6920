"""GEMM + All-Reduce: each rank gets the sum over ranks of x @ w.T, also with residual
and RMSNorm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etc_dist.compiler import world_or_current
from etc_dist.functions.rms_norm import add_rms_norm
from etc_dist.functions.scaled_weights import ScaledTensor, weight_input
from etc_dist.functions.tile_matmul import Tiles, TileShape, shapes_for
from etc_dist.ir import Expr, Graph, Tensor, equal, graph_function, select, span
from etc_dist.ir.function import TRANSFER
from etc_dist.ops.all_reduce_norm import EPS, checked_eps
from etc_dist.ops.deterministic import BATCH
from etc_dist.ops.exchange_model import (
    ALGORITHMS,
    ONE_SHOT,
    STRIPS,
    TILES,
    TILES_US,
    WARP_PIECES,
    AllReduceSizes,
    choose_algorithm,
    largest_sizes,
)
from etc_dist.ops.few_rows import SENT_WORK, sent_elements
from etc_dist.ops.multiply import Matrix, TiledMatmul, tiles_of_dims
from etc_dist.ops.operation import Candidate, Operation, WeightOperation
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
from etc_dist.ops.tile_sums import StoredSums, TileSums
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
    vectors], the sum over ranks of x @ w.T. A row, or a strip of
    its columns, is sent once its tiles are computed.
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
    if g.world_size == 1 and norm is None:
        TiledMatmul(g, TILES_NAME, tiles, dtype, x, [w], y).add()
        return
    if is_near:
        _add_tile_sums(g, tiles, (x, w, y), piece, algorithm)
        return
    product = g.local("product", shape, dtype)
    matmul = TiledMatmul(g, TILES_NAME, tiles, dtype, x, [w], product)
    produced = matmul.complete("produced", tiles.rows)
    matmul.add()
    if g.world_size > 1:
        RowSums(g, Matrix(product), y, norm, piece, produced, TRANSFER).add(algorithm)
    elif norm is not None:
        (r,) = grid = g.grid(r=rows)
        own = span(r, 1), slice(None)
        g.call(
            add_rms_norm(dtype, norm.eps),
            grid,
            reads=[product[own], norm.residual[own], norm.gain[:]],
            writes=[norm.total[own], y[own]],
            waits=[produced.at(r)],
        )


def _add_tile_sums(
    g: Graph,
    tiles: Tiles,
    operands: tuple[Tensor, Tensor | ScaledTensor, Tensor],
    piece: Expr,
    algorithm: Expr,
) -> None:
    """Sums on one host: of strips of tiles while others are computed, of tiles that are
    stored on all ranks, or of rows."""
    x, w, y = operands
    is_tiled = equal(algorithm, STRIPS)
    tiled = g.let("is_tiled", select(is_tiled, 1, 0))
    stored = g.let("is_stored", select(equal(algorithm, TILES), 1, 0))
    parts = g.let("result_parts", 1 + (tiled + stored) * (g.world_size - 1))
    results = g.symmetric("results", (parts, *y.shape), y.dtype)
    own = Matrix(results, (g.let("own_result", tiled * g.rank),))
    matmul = RankTiles(g, TILES_NAME, tiles, y.dtype, x, [w], own)
    strip = g.let("strip_tiles", select(is_tiled, matmul.strip, matmul.across))
    produced = matmul.complete_strips("produced", strip, 1 - stored)
    sums = StoredSums(g, matmul, results, y, 8 * piece, stored)

    def add_whole_tiles() -> None:
        own_columns = g.let("own_columns", (1 - stored) * matmul.whole)
        matmul.add_whole_tiles(columns=own_columns)
        sums.add()

    matmul.add(add_whole_tiles=add_whole_tiles)
    RowSums(g, own, y, None, piece, produced, TRANSFER).add(algorithm)
    elements = sent_elements(2 * SENT_WORK, x.shape[1], y.shape)
    TileSums(g, matmul, results, y, elements, produced, tiled).add()


def _norm(g: Graph, shape: tuple[Any, Any], dtype: str, eps: float) -> Norm:
    residual: Tensor = g.input("residual", shape, dtype)
    gain = g.input("gain", shape[1:], dtype)
    total = g.output("residual_out", shape, dtype, over=residual)
    return Norm(residual, gain, total, eps)


class _MatmulSums(Operation):
    """Base: a matmul and an all-reduce of its result. Its graph has the options
    `graph_options`."""

    transposable = "w"
    scalable = ("w",)
    graph_options: Mapping[str, Any] = {}

    def candidates(self) -> list[Candidate]:
        """Internal: one graph, whose tiles and algorithm are chosen for each call."""
        options = {**self.graph_options, **self.sizes}
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
        exchanges = [
            {**dims, "rows": n, "algorithm": chosen, "piece": min(WARP_PIECES)}
            for algorithm, n in largest_sizes(self._exchange(dims))
            for chosen in (algorithm, *self._in_place_of(algorithm))
        ]
        return [
            {**call, **dims_of(tiling, TILES_NAME)}
            for call in (dims, *exchanges)
            for tiling in tilings
        ]

    def _shapes(self, w_layout: str) -> Sequence[TileShape]:
        return shapes_for(w_layout, self.sizes.get("shapes", FAMILY))

    def _exchange(self, dims: Mapping[str, int]) -> AllReduceSizes:
        world = self.world
        return AllReduceSizes(
            dims["rows"], dims["vectors"], world.size, world.local_size
        )

    def _choose(
        self, tuning: Tuning, w_layout: str, dims: Mapping[str, int], workers: int
    ) -> list[Choice]:
        sizes = dims["rows"], 8 * dims["vectors"], dims["k"]
        shapes, in_order = self._shapes(w_layout), self.deterministic == BATCH
        ranking, notes = ranked(
            sizes, workers, shapes, tuning, in_order=in_order, w_layout=w_layout
        )
        exchange = self._exchange(dims)
        algorithm, *others = choose_algorithm(exchange, workers, WARP_PIECES)
        if self._in_place_of(algorithm.value):
            whole = stored_on_ranks(ranking, is_measured=bool(notes))
            if exchange.gains_by_strips(ranking[0].work.num_tiles / workers):
                algorithm = _sent(STRIPS, "while tiles are computed")
            elif whole is not None:
                algorithm = _sent(TILES, "which their epilogues store on all ranks")
                if whole is not ranking[0]:
                    why = "without split-K, since these are stored on all ranks"
                    ranking, notes = [whole, *ranking], [why]
        tiles = choices(TILES_NAME, sizes, workers, shapes, ranking, tuning, notes)
        return [*tiles, algorithm, *others]

    def _in_place_of(self, algorithm: int) -> Sequence[int]:
        """The algorithms that may be chosen in place of another one, as they send tiles
        while others are computed, or by their epilogues."""
        is_near = 1 < self.world.size == self.world.local_size
        sums_tiles = is_near and "eps" not in self.graph_options
        return (STRIPS, TILES) if sums_tiles and algorithm == ONE_SHOT else ()


def stored_on_ranks(
    ranking: Sequence[Prediction], *, is_measured: bool
) -> Prediction | None:
    """The tiles that epilogues store on all ranks, without split-K; None if the first
    ones are faster with another exchange. is_measured: so are the first ones, and they
    stay."""
    first, whole = ranking[0], next(p for p in ranking if p.tiling.parts == 1)
    gains = not is_measured and whole.us < first.us + TILES_US
    return whole if whole is first or gains else None


def _sent(algorithm: int, how: str) -> Choice:
    return Choice("algorithm", algorithm, lambda: [f"{ALGORITHMS[algorithm]}, {how}"])


class MatmulAllReduce(_MatmulSums, WeightOperation):
    """GEMM + All-Reduce as a reusable object.

    op(x, w, out=None, stream=None): x [M, K] and w [N, K] on every rank, each with its
    own values; returns out [M, N], the sum over ranks of x @ w.T, the same bits on all
    ranks. w may be a transposed view, or scaled, as for `Matmul`. N is a multiple of 8,
    on GPUs also K; M is at least 1.

    The dtype is that of x, bfloat16 or float16. Each rank's product is rounded to the
    dtype; the products are added as by `AllReduce`. Arrays, options and errors as for
    `MatmulReduceScatter`; deterministic as for `Matmul`.
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
    ):
        world = world_or_current(world)
        with world.refusing(f"the options of {type(self).__name__}"):
            self.options = self.graph_options = {"eps": checked_eps(eps)}
        super().__init__(
            world=world, schedule=schedule, trace=trace, deterministic=deterministic
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
