"""Matrix multiplication on each rank: y = x @ w.T, without communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from etc_dist.errors import expect_range
from etc_dist.functions.scaled_weights import PER_BLOCK, Scaling, weight_input
from etc_dist.functions.tile_shape import TileShape, shapes_for
from etc_dist.ir import Graph, graph_function
from etc_dist.ops.deterministic import BATCH
from etc_dist.ops.multiply import TiledMatmul, tiles_of_dims
from etc_dist.ops.operation import Candidate, WeightOperation
from etc_dist.ops.quantized_rows import rows_for
from etc_dist.ops.scaled_weight import FLOAT8
from etc_dist.ops.tile_model import (
    FAMILY,
    Tiling,
    choose,
    dims_of,
    largest_tilings,
    text_of,
)
from etc_dist.ops.tuning import Tuning, tuning_of
from etc_dist.schedule.plan import Choice


@graph_function
def matmul_graph(
    g: Graph,
    *,
    dtype: str = "bfloat16",
    w_layout: str = "nk",
    shapes: Sequence[TileShape] = FAMILY,
) -> None:
    """x [m, k], w [n, k] or [k, n] -> y [m, n] in `dtype`, on each rank its own.

    With a layout of float8 activations and tiles for them, x is quantized first, and a
    tile waits for its rows. Dims select the tiles: see `tiles_of_dims` and
    `TiledMatmul`."""
    m, n, k = g.dims("m n k")
    x = g.input("x", (m, k), dtype)
    w = weight_input(g, "w", w_layout, n, k, dtype)
    y = g.output("y", (m, n), dtype)
    tiles = tiles_of_dims(g, "", shapes, m, w_layout)
    rows, quantized = rows_for(g, "", tiles, x, n, None, is_local=True)
    TiledMatmul(g, "", tiles, dtype, rows, [w], y).add(quantized)


class Matmul(WeightOperation):
    """y = x @ w.T on each rank, as a reusable object.

    op(x, w, out=None, stream=None): x [M, K], w [N, K] -> out [M, N]. w may be a
    transposed view, w.T of a contiguous [K, N] array. On GPUs K and N are multiples of
    8. All are bfloat16 or float16, as x is. Sums are in fp32 and rounded once: the same
    bits on every run. One program serves all sizes, and selects tiles by M, N and K.
    Ranks make the same calls; arrays and errors as for `MatmulReduceScatter`.

    w may be a `ScaledWeight`, whose codes are widened to the dtype of x exactly. In
    fp32, the sums over each 128 elements of k are multiplied by the scale, and added in
    the order of k. On GPUs K is then a multiple of 16. There is a program for each kind
    and dtype of scales.

    deterministic="batch": a row of x has the same bits for any M. Slower for up to
    about 256 rows, since fewer tile shapes add over K in order.

    activations="float8", for w with scales of blocks of 128 x 128 and many rows: each
    128 elements of a row of x are rounded to float8 with a scale, max |x| / 448 in
    fp32, of at least 2**-100 / 448. The tensor cores add the products of 128 elements
    of k with about 14 bits. Their sums are multiplied by both scales and added in fp32.
    A row of x with NaN or infinity gives NaN. Less accurate, and never chosen for you.
    """

    inputs = "x [m, k]", "w [n, k]"
    output = "out [m, n]"

    def candidates(self) -> list[Candidate]:
        """Internal: one graph, whose tiles are chosen for each call."""
        is_divided = self.deterministic != BATCH  # else k never is
        return [
            Candidate(
                matmul_graph,
                {**self.sizes, "shapes": self._family},
                capacity=self._capacity if is_divided else None,
                policy=self._choose,
            )
        ]

    def policy(self, m: int, n: int, k: int, *, transposed: bool = False) -> str:
        """The tiles for x [m, k] and w [n, k], as text: without scales, or for float8
        activations. transposed: w is the transposed view of a [k, n] array. Raises
        WorldError before a first call."""
        for name, size in zip("mnk", (m, n, k), strict=True):
            expect_range(size, 1, None, name)
        workers, dims = self.program.workers, {"m": m, "n": n, "k": k}
        layout = "kn" if transposed else "nk"
        if self.activations == FLOAT8:
            layout = Scaling(PER_BLOCK, "float32", quantizes=True).w_layout
        choices = self._choose(tuning_of(self.world), layout, dims, workers)
        shape_idx, num_groups, split, num_parts = (choice.value for choice in choices)
        tiling = Tiling(shape_idx, 8 * num_groups, split, num_parts)
        return text_of(self._shapes(layout), tiling)

    def _capacity(
        self, w_layout: str, dims: Mapping[str, int], workers: int
    ) -> list[Mapping[str, int]]:
        """With memory for the parts of all sizes at once: fewer rows may need more of
        it than many, and it cannot grow in a capture."""
        _, divided = largest_tilings(self._shapes(w_layout), workers, 1)
        return [dims, {**dims, "m": 1, **dims_of(divided)}]

    @property
    def _family(self) -> Sequence[TileShape]:
        shapes: Sequence[TileShape] = self.sizes.get("shapes", self.family)
        return shapes

    def _shapes(self, w_layout: str) -> Sequence[TileShape]:
        return shapes_for(w_layout, self._family)

    def _choose(
        self, tuning: Tuning, w_layout: str, dims: Mapping[str, int], workers: int
    ) -> list[Choice]:
        return choose(
            (dims["m"], dims["n"], dims["k"]),
            workers,
            self._shapes(w_layout),
            tuning,
            in_order=self.deterministic == BATCH,
            w_layout=w_layout,
        )
