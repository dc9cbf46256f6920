"""Dense matrix multiplication on tiles of many shapes; CUDA half in
`kernels/functions/tile_matmul.cuh`.

All compute x @ w.T with fp32 accumulators and w stored [n, k] or [k, n], or [n, k] in
float8 with scales, or two such products (gate and up). With the latter x may be float8
with scales, too. An epilogue computes what is stored from the sums: see
`functions/epilogue.py`. The fastest shape depends on the sizes: see
`ops/tile_model.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from etc_dist.errors import GraphError, expect_choice
from etc_dist.functions.add_partials import sum_in_order
from etc_dist.functions.epilogue import (
    PER_COLUMN,
    PER_ELEMENT,
    Epilogue,
    store,
    swiglu,
)
from etc_dist.functions.scaled_weights import (
    ALL_SCALINGS,
    BLOCK,
    E4M3,
    MOST_E4M3,
    ScaledTensor,
    weight_regions,
)
from etc_dist.functions.tile_shape import (
    COLUMNS_BIT,
    LOADED_BIT,
    WIDE_COLUMNS,
    TileShape,
    codes_of,
    packed_shapes,
    shapes_for,
    strip_columns,
    unpacked,
)
from etc_dist.functions.weight_layouts import (
    CHUNK_COLUMNS,
    DEPTH,
    DTYPES,
    STAGE_K,
    two_byte,
    weight_shape,
)
from etc_dist.ir import (
    DeviceFunction,
    Expr,
    Extent,
    Graph,
    Operand,
    Region,
    Tensor,
    TmaBox,
    ceildiv,
    equal,
    minimum,
    select,
)
from etc_dist.ir.expr import Const, wrap
from etc_dist.ir.function import COMPUTE, LOAD, TENSOR

BUFFER_BYTES = 16384
"""Shared memory through which the epilogue stores a tile."""
SLICE = 64
"""Of the N of wgmma: a task of `sum_parts` adds so many of a tile's columns, or of the
rows of a swapped tile."""
GROUP_WORDS = 1024
"""fp32 sums of 8 of the N, by 128 of the M of wgmma."""
SLICE_WORDS = SLICE // 8 * GROUP_WORDS
PART = Extent(multiple=GROUP_WORDS)
"""The words of a part, or of a slice of it."""
WITH_PARTS = (store, swiglu)
"""The epilogues of tiles that may use split-K among tasks."""


def _sums(
    epilogue: Epilogue, w_layout: str, arrays: Sequence[Any], *first_rows: int
) -> tuple[list[Any], Sequence[Any]]:
    """x @ w.T in fp32 for each of the weights, and the other arrays. first_rows: those
    of weights that are scaled; of all, if there is one."""
    x, *operands = arrays
    weights, operands = operands[: epilogue.weights], operands[epilogue.weights :]
    scaling = ALL_SCALINGS.get(w_layout)
    if scaling is None:
        transposed = weights if w_layout == "kn" else [w.T for w in weights]
        wide = x.astype(np.float32)
        return [wide @ w.astype(np.float32) for w in transposed], operands
    scales, operands = operands[: epilogue.weights], operands[epilogue.weights :]
    x_scales = operands.pop(0) if scaling.quantizes else None
    starts = (first_rows * epilogue.weights)[: epilogue.weights]
    of_weights = zip(weights, scales, starts, strict=True)
    return [scaling.multiply(x, *of, x_scales) for of in of_weights], operands


def multiply_tile(
    epilogue: Epilogue,
    w_layout: str,
    *arrays: Any,
    packed_tile: int,
    first_row: int = 0,
    up_row: int | None = None,
    is_biased: bool = False,
) -> None:
    """Internal: the NumPy body of `matmul`. up_row: the first row of up, if it differs
    from that of gate."""
    up_row = first_row if up_row is None else up_row
    sums, operands = _sums(epilogue, w_layout, arrays, first_row, up_row)
    if is_biased:
        pairs = zip(sums, operands, strict=False)
        sums = [of_weight + bias.astype(np.float32) for of_weight, bias in pairs]
        operands = operands[epilogue.weights :]
    if not epilogue.reduces:
        _apply(epilogue, sums, operands)
        return
    columns = sums[0].shape[1]
    is_swapped, tile_columns = unpacked(packed_tile)
    width = strip_columns(tile_columns, is_swapped, epilogue.gated)
    kinds = (*epilogue.reads, PER_ELEMENT, *epilogue.writes)
    num_reads = len(epilogue.reads)
    for strip_idx, start in enumerate(range(0, columns, width)):
        part = slice(start, start + width)

        def of_strip(n: int, strip_idx: int = strip_idx, part: slice = part) -> Any:
            if kinds[n] in (PER_ELEMENT, PER_COLUMN):
                return operands[n][..., part]
            return operands[n][strip_idx] if n >= num_reads else operands[n]

        arrays_of_strip = [of_strip(n) for n in range(len(operands))]
        _apply(epilogue, [s[:, part] for s in sums], arrays_of_strip)


def _multiply_part(
    epilogue: Epilogue,
    w_layout: str,
    *arrays: Any,
    packed_tile: int,
    first_row: int = 0,
) -> None:
    # Slices have the places of the CUDA half; in a slice, sums are row-major. If the
    # columns are the M of wgmma, each slice has gate and up; else up follows gate.
    all_sums, [part] = _sums(epilogue, w_layout, arrays, first_row)
    is_swapped, columns = unpacked(packed_tile)
    gated_words = SLICE_WORDS if is_swapped else columns * GROUP_WORDS // 8
    for sums_idx, sums in enumerate(all_sums):
        words = part[sums_idx * gated_words // 2 :]
        for start in range(0, sums.shape[1 - is_swapped], SLICE):
            end = start + SLICE
            values = sums[start:end] if is_swapped else sums[:, start:end]
            words[start // SLICE * SLICE_WORDS :][: values.size] = values.ravel()


def _sum_parts(epilogue: Epilogue, *arrays: Any, packed_tile: int) -> None:
    all_parts, ys = arrays[: epilogue.weights], arrays[epilogue.weights :]
    y, (is_swapped, _) = ys[0], unpacked(packed_tile)
    up_words = SLICE_WORDS // 2 if is_swapped else 0
    sums = []
    for parts_idx, parts in enumerate(all_parts):
        values = parts[:, parts_idx * up_words :][:, : y.size]
        sums.append(sum_in_order(values).reshape(y.shape))
    _apply(epilogue, sums, ys)


def _apply(epilogue: Epilogue, sums: Sequence[Any], arrays: Sequence[Any]) -> None:
    """Call the epilogue's NumPy half. A float8 y is passed in fp32, then rounded as on
    GPUs: clamped to the largest numbers."""
    num_reads = len(epilogue.reads)
    y = arrays[num_reads]
    if epilogue.dtype != E4M3:
        epilogue.half.body(*sums, *arrays)
        return
    wide = y.astype(np.float32)
    epilogue.half.body(*sums, *arrays[:num_reads], wide, *arrays[num_reads + 1 :])
    y[...] = np.clip(wide, -MOST_E4M3, MOST_E4M3).astype(y.dtype)


class Tiles:
    """The tiles of one matrix multiplication of a graph `g`. In a run, the number
    `shape` selects one of `shapes`. Sizes of tiles are numbers of the graph, whose
    names begin with `name`.

    all_rows: the rows of x, to divide them evenly among tiles. Tiles then have at most
    the shape's rows, a multiple of 8, and their number does not change: bulk copies
    beyond the edge of x take longer than copies of fewer rows.

    w_layout: "nk" for weights [n, k], "kn" for [k, n], or one of SCALINGS for float8
    codes [n, k] with scales. Then `shape` selects one of `shapes_for(w_layout,
    shapes)`. With one of FLOAT8_SCALINGS x is a `ScaledTensor`, too.

    columns: of each tile, in place of the shape's: a multiple of 8 that the shape
    allows, see `TileShape.serves_columns`.

    has_peers: whether tiles of the program may be stored on several ranks. Tiles of one
    program share their code only if it is equal.

    stage_bytes: of each stage in the ring, at least those of the shapes, where all
    functions of the program that load have the same; 0: each shape has its own."""

    def __init__(
        self,
        g: Graph,
        name: str,
        shape: Expr | int,
        shapes: Sequence[TileShape],
        all_rows: Expr | None = None,
        w_layout: str = "nk",
        columns: Expr | None = None,
        *,
        has_peers: bool = False,
        stage_bytes: int = 0,
    ) -> None:
        self._g, self._name, self._shape = g, name, wrap(shape)
        self._has_peers, self._stage_bytes = has_peers, stage_bytes
        self.w_layout = w_layout
        self._shapes = shapes = tuple(shapes_for(w_layout, shapes))
        self._scaling = ALL_SCALINGS.get(w_layout)
        self.quantizes = self._scaling is not None and self._scaling.quantizes
        """Whether x is float8, too."""
        self._numbers: dict[str, Expr] = {}
        self._packed = packed_shapes(self._shapes)
        most = own_rows = self._number("rows", [s.rows for s in shapes])
        if all_rows is not None:
            num_tiles = ceildiv(all_rows, most)
            even = minimum(most, ceildiv(ceildiv(all_rows, num_tiles), 8) * 8)
            own_rows = g.let(f"{name}_even_rows", even)
        self.rows = self._x_box = own_rows
        self._has_columns = columns is not None
        if columns is None:
            columns = self._number("columns", [s.columns for s in shapes])
        self.columns = columns
        """Rows of w in a tile."""
        mask = ~(63 << COLUMNS_BIT) if self._has_columns else ~0
        packed = self._number("packed", [code & mask for code in self._packed])
        if self._has_columns:
            packed += columns // 8 * (1 << COLUMNS_BIT)
        loaded_bits = own_rows // 8 * (1 << LOADED_BIT)
        self.values = {"packed_tile": g.let(f"{name}_tile", packed + loaded_bits)}
        """Pass as `values=` of `g.call`."""

    def matmul(
        self,
        dtype: str,
        epilogue: Epilogue = store,
        *,
        is_part: bool = False,
        may_have_no_rows: bool = False,
        is_biased: bool = False,
    ) -> DeviceFunction:
        """x tile [rows, k], w tile [columns, k] in `dtype`, and the epilogue's reads ->
        y tile [rows, columns] in this rank's memory, and the epilogue's other writes.
        For a gated epilogue: gate and up tiles [columns / 2, k] -> y tile [rows,
        columns / 2], for shapes with `may_be_gated`. With the layout "kn" the w tile is
        [k, columns], and no epilogue is gated. Tiles may end at the tensors' edges; the
        columns of y are a multiple of 8.

        is_part: for split-K. A task has a part of k, and writes its sums [words] in
        fp32, without the epilogue. `sum_parts` with the same epilogue reads them.
        may_have_no_rows: some tasks have none; these load nothing. is_biased: biases
        [columns] of each weight follow the weights and their scales, and are added to
        the sums. Raises GraphError for these and an epilogue that does not only
        round."""
        self._check_gated(epilogue)
        self._check_mirrors(epilogue)
        if is_biased or any(shape.is_wide for shape in self._shapes):
            self._check_rounds(epilogue)
        self._require_tile(epilogue.gated)
        if is_part:
            self._check_parts(epilogue, is_biased)
        if self.w_layout == "kn":
            box = TmaBox(STAGE_K, CHUNK_COLUMNS)
        else:
            depth = STAGE_K if self._scaling is None else BLOCK
            box = TmaBox(self._weight_box_rows(epilogue.gated), depth)
        boxes = [box] * epilogue.weights
        function = self._function(dtype, epilogue, boxes, is_part, is_biased)
        if not may_have_no_rows:
            return function
        return replace(function, constants={**function.constants, "kMayHaveNoRows": 1})

    def sum_parts(self, dtype: str, epilogue: Epilogue = store) -> DeviceFunction:
        """Sums [parts, words] of a slice of a tile -> y [rows, columns] of the slice:
        parts added in order, in fp32, then the epilogue. For a gated epilogue: those of
        gate and those of up -> y. `store_on_ranks` adds parts that `store` has."""
        self._check_mirrors(epilogue)
        self._check_parts(store if epilogue.mirrors else epilogue)
        element, num_reads = two_byte(dtype), epilogue.weights
        parts = Operand((None, PART), "float32", leading=True)
        _, [y, *copies] = epilogue.operands(element)
        is_swapped, (rows, columns) = equal(self.is_swapped, 1), self._most(epilogue)
        size = (
            select(is_swapped, minimum(rows, SLICE), rows),
            select(is_swapped, columns, minimum(columns, SLICE)),
        )
        extents = zip(y.extents or (), size, strict=True)
        y = replace(y, size=[replace(extent, most=most) for extent, most in extents])
        writes = [y, *(replace(y, mirrors=num_reads) for _ in copies)]
        return DeviceFunction(
            name="sum_tile_parts",
            body=partial(_sum_parts, epilogue),
            source="functions/sum_tile_parts.cuh",
            lane=TENSOR,
            reads=num_reads,
            writes=len(writes),
            roles=(LOAD, COMPUTE),
            shared=BUFFER_BYTES,
            tile=dict(enumerate([*[parts] * num_reads, *writes])),
            epilogue=epilogue.half,
            constants=self._constants(dtype, epilogue, (2,) * len(writes)),
        )

    def _most(self, epilogue: Epilogue) -> tuple[Expr, Expr]:
        """The most rows and columns of y in a tile."""
        gated = epilogue.gated
        return self.rows, self.columns // 16 * 8 if gated else self.columns

    def _constants(
        self, dtype: str, epilogue: Epilogue, axes: tuple[int, ...]
    ) -> dict[str, Any]:
        expect_choice(dtype, DTYPES, "dtype")
        scaled = {} if self._scaling is None else self._scaling.constants
        return {
            "kIsHalf": int(dtype == "float16"),
            "kGated": int(epilogue.gated),
            "kReduces": int(epilogue.reduces),
            "kWeights": epilogue.weights,
            "kWeightIsKN": int(self.w_layout == "kn"),
            "kAxes": axes,
            "kTiles": codes_of(self._packed),
            **({"kHasPeers": 1} if self._has_peers else {}),
            **({"kStageBytes": self._stage_bytes} if self._stage_bytes else {}),
            **scaled,
        }

    @property
    def is_swapped(self) -> Expr:
        """1 if the tiles are swapped, else 0."""
        return self._number("is_swapped", [int(s.swapped) for s in self._shapes])

    @property
    def part_words(self) -> Expr:
        """The fp32 sums of a part, in whole slices."""
        slices = [-(-s.wgmma_n // SLICE) for s in self._shapes]
        return self._number("part_words", [n * SLICE_WORDS for n in slices])

    @property
    def k_boxes(self) -> Expr:
        """A task's part of k is a multiple of this, times STAGE_K, or ends where k
        ends."""
        return self._number("k_boxes", [s.depth // STAGE_K for s in self._shapes])

    def weight_tiles(
        self,
        weights: Sequence[Tensor | ScaledTensor],
        columns: Any,
        k_span: Any = slice(None),
        place: tuple[Expr | int, ...] = (),
    ) -> list[Region]:
        """The regions of the weights for some columns of y, of all k, or a part from a
        multiple of `k_boxes` boxes on; then those of their scales. place: of the
        weights in stacks."""
        return weight_regions(self.w_layout, weights, columns, k_span, place)

    def x_scales(
        self,
        scales: Tensor,
        rows: Any,
        k_span: Any,
        place: tuple[Expr | int, ...] = (),
    ) -> Region:
        """The region of the scales of some rows of x, of all k, or a part as above."""
        assert self._scaling is not None
        return self._scaling.x_region(scales, rows, k_span, place)

    def _check_gated(self, epilogue: Epilogue) -> None:
        if epilogue.gated and self.w_layout == "kn":
            raise GraphError(
                "weights [k, n] have no gated epilogues",
                where=f"Tiles({self._name!r}).matmul()",
                wanted="an epilogue of one weight",
                got=str(epilogue),
                fix="store gate and up as [n, k]",
            )

    def _require_tile(self, gated: bool) -> None:
        """Refuse runs whose numbers select no tile: CUDA bodies do not check them."""
        of_shapes = {
            n: shape.widths(gated=gated, w_layout=self.w_layout)
            for n, shape in enumerate(self._shapes)
            if shape.may_be_gated or not gated
        }
        numbers = [self._shape]
        values: list[tuple[int, ...]] = [(n,) for n in of_shapes]
        if self._has_columns:
            numbers.append(self.columns)
            values = [(n, width) for n, widths in of_shapes.items() for width in widths]
        self._g.require(
            f"Tiles({self._name!r}) has no {'gated ' * gated}tile of these numbers",
            numbers,
            values,
            "choose them by choose() of etc_dist/ops/tile_model.py",
        )

    def _check_mirrors(self, epilogue: Epilogue) -> None:
        if epilogue.mirrors and not self._has_peers:
            raise GraphError(
                "the tiles have no code that stores them on several ranks",
                where=f"Tiles({self._name!r})",
                wanted="has_peers=True, or results in this rank's memory",
                got=f"{epilogue}, has_peers=False",
                fix="pass has_peers=True to all Tiles of the program",
            )

    def _check_rounds(self, epilogue: Epilogue) -> None:
        if not (epilogue.reads or epilogue.writes or epilogue.dtype):
            return
        raise GraphError(
            "tiles with biases or with as many rows as their tasks do not have the "
            "epilogue",
            where=f"Tiles({self._name!r}).matmul()",
            wanted="an epilogue that only rounds: store, swiglu or activated(...)",
            got=str(epilogue),
            fix="choose such an epilogue, or tiles without biases and below "
            f"{WIDE_COLUMNS} columns",
        )

    def _check_parts(self, epilogue: Epilogue, is_biased: bool = False) -> None:
        if is_biased:
            raise GraphError(
                "parts of a tile have no biases",
                where=f"Tiles({self._name!r})",
                wanted="whole tiles, by matmul(dtype, epilogue, is_biased=True)",
                got="is_part=True, is_biased=True",
                fix="multiply whole tiles, or add the biases after sum_parts",
            )
        if any(shape.is_wide for shape in self._shapes):
            raise GraphError(
                "wide tiles are not divided along k",
                where=f"Tiles({self._name!r})",
                wanted="whole tiles, by matmul(dtype, epilogue)",
                got=f"parts of tiles of {WIDE_COLUMNS} columns",
                fix="multiply whole ones, or choose tiles of fewer columns",
            )
        if epilogue not in WITH_PARTS:
            raise GraphError(
                "parts of a tile do not have the epilogue",
                where=f"Tiles({self._name!r})",
                wanted="store or swiglu",
                got=str(epilogue),
                fix="apply the epilogue to whole tiles, by matmul(dtype, epilogue)",
            )

    def strip_columns(self, *, gated: bool = False) -> Expr:
        """Columns of y in a strip of a tile."""
        of_each = [s.strip_columns(gated) for s in self._shapes]
        return self._number("gated_strip" if gated else "strip", of_each)

    def strips(self, *, gated: bool = False) -> Expr:
        """Strips of a tile."""
        share = 2 if gated else 1
        of_each = [s.columns // share // s.strip_columns(gated) for s in self._shapes]
        return self._number("gated_strips" if gated else "strips", of_each)

    def half_columns(self) -> Expr:
        """Rows of gate, and of up, of a gated tile."""
        if self._has_columns:
            return self._let("half_columns", self.columns // 16 * 8)
        return self._number("half_columns", [s.columns // 2 for s in self._shapes])

    def _scale_step(self, gated: bool) -> Expr:
        """Rows of w in steps of which the scales of a tile change. It begins at a
        multiple of this."""
        columns = [s.columns // (2 if gated else 1) for s in self._shapes]
        return chosen(self._shape, tuple(min(n & -n, BLOCK) for n in columns))

    def _weight_box_rows(self, gated: bool) -> Expr:
        """Rows of w, or of gate and of up, in one TMA box."""
        return self.half_columns() if gated else self._let("w_box", self.columns)

    def _let(self, name: str, value: Expr) -> Expr:
        """`value` as a number of the graph, which is made once per name."""
        if name not in self._numbers:
            self._numbers[name] = self._g.let(f"{self._name}_{name}", value)
        return self._numbers[name]

    def _number(self, name: str, values: Sequence[int]) -> Expr:
        """values[shape], as a number of the graph that is made once per name."""
        return self._let(name, chosen(self._shape, tuple(values)))

    def _function(
        self,
        dtype: str,
        epilogue: Epilogue,
        weights: Sequence[TmaBox],
        is_part: bool,
        is_biased: bool,
    ) -> DeviceFunction:
        element, streams = two_byte(dtype), range(1, 1 + len(weights))
        depth = DEPTH
        if not is_part:  # parts end where a stage of their shape does
            depth = replace(DEPTH, multiple=max(s.depth for s in self._shapes))
        gated = epilogue.gated
        rows, columns = (
            Extent(name=name, most=most)
            for name, most in zip(
                ("rows", "columns"), self._most(epilogue), strict=True
            )
        )
        w_columns = columns
        if self.quantizes:
            w_columns = replace(columns, begins=self._scale_step(gated))
        w_shape = weight_shape(self.w_layout, w_columns, depth)
        x_dtype, w_dtype, scales = element, element, list[Operand]()
        if self._scaling is not None:
            w_dtype, scales = E4M3, [self._scaling.operand] * len(weights)
        if self.quantizes:
            x_dtype = E4M3
            of_x = Operand((None, None), "float32", leading=True, by_element=True)
            scales.append(of_x)
        x = Operand((rows, depth), x_dtype, leading=True, apart=True)
        w = Operand(w_shape, w_dtype, leading=True, apart=True)
        strip = self.strip_columns(gated=gated) if epilogue.reduces else None
        bias = Operand((replace(columns, begins=8),), element, leading=True)
        biases = [bias] * (len(weights) * is_biased)
        before = [*scales, *biases]
        reads, writes = epilogue.operands(element, strip, len(before))
        body: Any = multiply_tile
        body = partial(body, is_biased=True) if is_biased else body
        if is_part:
            body, writes = _multiply_part, [Operand((PART,), "float32", leading=True)]
        operands = [x, *[w] * len(weights), *before, *reads, *writes]
        axes = tuple(len(operand.extents or ()) for operand in (*reads, *writes))
        return DeviceFunction(
            name="tile_matmul",
            body=partial(body, epilogue, self.w_layout),
            source="functions/tile_matmul.cuh",
            lane=TENSOR,
            reads=1 + len(weights) + len(before) + len(reads),
            writes=len(writes),
            roles=(LOAD, COMPUTE),
            streams=tuple(streams),
            shared=BUFFER_BYTES,
            boxes={
                0: TmaBox(self._x_box, self._shapes[0].box_k),
                **dict(zip(streams, weights, strict=True)),
            },
            tile=dict(enumerate(operands)),
            epilogue=epilogue.half,
            constants={
                **self._constants(dtype, epilogue, axes),
                "kIsPart": int(is_part),
                **({"kIsBiased": 1} if is_biased else {}),
            },
            starts={"first_row": (1, -2)} if scales else {},
        )


@lru_cache
def chosen(number: Expr, values: tuple[int, ...]) -> Expr:
    """values[number]."""
    value: Expr = Const(values[-1])
    for n, choice in reversed(list(enumerate(values[:-1]))):
        value = select(equal(number, n), choice, value)
    return value
