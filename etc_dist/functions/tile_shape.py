"""The shapes of a matrix multiplication's tiles, as GPUs have them; CUDA half in
`kernels/functions/tile_shape.cuh`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from etc_dist.errors import ArgumentError, GraphError, expect_choice
from etc_dist.functions.scaled_weights import (
    ALL_SCALINGS,
    BLOCK,
    FLOAT8_SCALINGS,
    SCALINGS,
)
from etc_dist.functions.weight_layouts import CHUNK_COLUMNS, STAGE_K, W_LAYOUTS

MOST_SCALED_ROWS = 128
"""The most rows of x of a tile of scaled weights: a thread has its sums of a block of k
in addition to those of all blocks before."""
FLOAT8_COLUMNS = (96, 112, 128, 144, 160, 192)
"""Of tiles of float8 activations, for the same reason. None meets more than two blocks
of weights."""
MOST_PART_COLUMNS = 128
"""Of such a tile's columns that are multiplied at once: of wider ones, half."""
TURNS_COLUMNS = 64
"""In swapped tiles with at most so many columns, the two warpgroups multiply alternate
boxes along k."""
MOST_BY_WARPS = 16
"""The most rows of x of a tile of scaled weights that warps multiply without wgmma."""
MOST_FEW_ROWS = 64
"""The most rows of x in a swapped tile for few rows."""
MOST_WIDE_ROWS, WIDE_COLUMNS = 144, 256
"""In swapped tiles in which each task has its own number of rows: see `RowTiles`."""
MOST_TALL_ROWS, TALL_COLUMNS = 256, 128
"""In swapped tiles for more rows, the most of them, and the columns."""
SWAPPED_BIT, ROWS_BIT, COLUMNS_BIT, LOADED_BIT = 8, 12, 18, 24
"""In the number that the CUDA half reads: the bit of swapped tiles, and the lowest bits
of its rows and columns and of the rows of x that are loaded, in units of 8. The packed
shape has the bits below the last."""


@dataclass(frozen=True)
class TileShape:
    """A task's tile of y: `rows` of x by `columns` rows of w.

    swapped: rows of w are the M of wgmma, and rows of x its N. For few rows of x, or
    for a number of rows between two multiples of 128, which then need little padding.
    scaled: the weights are of one byte, with scales.
    float8: so are weights and x.

    Raises ArgumentError for a shape that GPUs do not have.
    """

    rows: int
    columns: int
    _: KW_ONLY
    swapped: bool = False
    scaled: bool = False
    float8: bool = False

    def __post_init__(self) -> None:
        if self.is_wide:
            fits = self.rows % 16 == 0 and self.rows <= MOST_WIDE_ROWS
            fits = fits and self.columns == WIDE_COLUMNS
        elif self.is_tall:
            fits = self.rows <= MOST_TALL_ROWS and self.rows % 16 == 0
            fits = fits and self.columns == TALL_COLUMNS
        elif self.swapped:
            unit = 8 if self.alternates else 16
            fits = self.rows >= 8 and self.rows % 8 == 0
            fits = fits and 0 < self.columns <= 128 and self.columns % unit == 0
        else:
            fits = self.rows == 128 and 0 < self.columns <= 256
            fits = fits and self.columns % 16 == 0
        fits = fits and (self.may_be_scaled or not self.scaled)
        if self.float8:
            is_plain = not (self.swapped or self.scaled)
            fits = fits and is_plain and self.columns in FLOAT8_COLUMNS
        if not fits:
            raise ArgumentError(
                f"GPUs have no tiles of {self}",
                where="TileShape",
                wanted="(1) not swapped: 128 rows, and columns in steps of 16, up to "
                "256; (2) swapped: 8 to 64 rows in steps of 8, and columns in steps of "
                "8 up to 64, or of 16 from 80 to 128; (3) swapped: 128 columns, and 80 "
                f"to 256 rows in steps of 16, or {WIDE_COLUMNS} columns, and up to "
                f"{MOST_WIDE_ROWS} rows in steps of 16; (4) scaled: the same as (2) "
                f"and (3) with at most {MOST_SCALED_ROWS} rows; (5) float8: 128 rows, "
                f"not swapped, and {', '.join(map(str, FLOAT8_COLUMNS))} columns",
                got=str(self),
                fix="choose a shape of FAMILY in etc_dist/ops/tile_model.py",
            )

    def serves(self, *, gated: bool, in_order: bool) -> bool:
        """Whether a matmul may have this shape. in_order: the matmul must add over k in
        order."""
        return (self.may_be_gated or not gated) and (self.adds_in_order or not in_order)

    def __str__(self) -> str:
        suffix = ", swapped" * self.swapped + ", scaled" * self.scaled
        suffix += ", float8" * self.float8
        return f"{self.rows} x {self.columns}{suffix}"

    @property
    def is_tall(self) -> bool:
        """Whether it is swapped, but for more than a few rows of x."""
        return self.swapped and self.rows > MOST_FEW_ROWS

    @property
    def is_wide(self) -> bool:
        """Whether it is swapped, and each task has its own number of rows of x."""
        return self.swapped and self.columns > TALL_COLUMNS

    @property
    def may_be_gated(self) -> bool:
        """Whether gate and up can share a tile: each has a multiple of 8 columns, in
        separate warps; of float8 activations, each is a part of the columns."""
        is_narrow = self.swapped and self.columns < TURNS_COLUMNS
        is_one = self.float8 and self.parts_of_columns == 1
        return not (self.columns % 16 == 8 or is_narrow or is_one)

    def serves_columns(self, columns: int, *, gated: bool, w_layout: str) -> bool:
        """Whether a tile may have so many columns: those of the shape, or fewer if it
        is swapped and for few rows of x, or wide. The mainloop of such tiles does not
        depend on the number of columns."""
        if self.is_wide and not gated and w_layout == "nk":
            return columns in (self.columns // 2, self.columns)
        if not self.swapped or self.is_tall or (gated and self.alternates):
            return columns == self.columns
        least, unit = (8, 8) if self.alternates else (TURNS_COLUMNS + 16, 16)
        if w_layout == "kn":
            unit = CHUNK_COLUMNS
        return columns % unit == 0 and least <= columns <= self.columns

    def widths(self, *, gated: bool, w_layout: str = "nk") -> list[int]:
        """The columns that a tile may have."""
        kinds: dict[str, Any] = {"gated": gated, "w_layout": w_layout}
        eighths = range(8, self.columns + 1, 8)
        return [n for n in eighths if self.serves_columns(n, **kinds)]

    @property
    def alternates(self) -> bool:
        """Whether the two warpgroups multiply alternate boxes along k."""
        return self.swapped and self.columns <= TURNS_COLUMNS

    @property
    def wgmma_n(self) -> int:
        """The N of wgmma."""
        return self.rows if self.swapped else self.columns

    @property
    def may_be_transposed(self) -> bool:
        """Whether w may be stored [k, n]: whole boxes of columns are loaded."""
        return self.columns % CHUNK_COLUMNS == 0 and not self.is_wide

    @property
    def may_be_scaled(self) -> bool:
        """Whether a tile of scaled weights may have the same sizes."""
        is_narrow = self.swapped and not self.is_wide
        return is_narrow and self.rows <= MOST_SCALED_ROWS

    @property
    def k_parts(self) -> int:
        """The number of partial sums over k of an element of y."""
        return 2 if self.alternates else 1

    @property
    def by_warps(self) -> bool:
        """Whether warps multiply without wgmma."""
        return self.scaled and self.rows <= MOST_BY_WARPS

    @property
    def adds_in_order(self) -> bool:
        """Whether an element of y is the sum over k in the order of wgmma: it has the
        same bits on all such tiles."""
        return self.k_parts == 1 and not self.by_warps

    def strip_columns(self, gated: bool) -> int:
        """Columns of y in a strip, over which an epilogue may reduce a row: those that
        one warp stores."""
        return strip_columns(self.columns, self.swapped, gated)

    @property
    def parts_of_columns(self) -> int:
        """Of float8 activations: the parts of a tile that are multiplied in turn."""
        return -(-self.columns // MOST_PART_COLUMNS)

    @property
    def depth(self) -> int:
        """Elements of k in a stage. Wide stages stream weights faster, but several
        stages must fit in shared memory."""
        if self.float8:
            return BLOCK
        rows = self.rows + self.columns * self.weight_bytes // 2
        return (4 if rows <= 128 else 2 if rows <= 208 else 1) * STAGE_K

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage."""
        row_bytes = self.rows * self.x_bytes + self.columns * self.weight_bytes
        return row_bytes * self.depth

    @property
    def weight_bytes(self) -> int:
        """Of an element of w."""
        return 1 if self.scaled or self.float8 else 2

    @property
    def x_bytes(self) -> int:
        """Of an element of x."""
        return 1 if self.float8 else 2

    @property
    def box_k(self) -> int:
        """Elements of k in a box of x, of 128 bytes."""
        return STAGE_K * 2 // self.x_bytes

    @property
    def code(self) -> tuple[int, ...]:
        """A key: shapes with equal keys have the same mainloop."""
        return int(not self.swapped), self.rows, self.columns, self.depth

    @classmethod
    def of(
        cls, packed: int, *, scaled: bool = False, float8: bool = False
    ) -> TileShape:
        """From the number that the CUDA half reads."""
        (swapped, columns), rows = unpacked(packed), (packed >> ROWS_BIT & 63) * 8
        kinds = {"swapped": swapped, "scaled": scaled, "float8": float8}
        return cls(rows, columns, **kinds)

    def packed(self, number: int) -> int:
        """The shape in bits below LOADED_BIT, as the CUDA half reads it. number: that
        of its code in a program."""
        fields = (
            (number, 8),
            (int(self.swapped), 1),
            (self.depth // self.box_k, 3),
            (self.rows // 8, 6),
            (self.columns // 8, 6),
        )
        value = 0
        for field, bits in reversed(fields):
            value = value << bits | field
        return value


def packed_shapes(shapes: Sequence[TileShape]) -> list[int]:
    """The packed shapes. Codes are numbered with swapped tiles first, by rows."""
    codes = sorted({shape.code for shape in shapes})
    return [shape.packed(codes.index(shape.code)) for shape in shapes]


def codes_of(packed: Sequence[int]) -> tuple[int, ...]:
    """A packed shape for each code, by number."""
    codes = {shape & 255: shape for shape in packed}
    return tuple(codes[number] for number in sorted(codes))


def strip_columns(columns: int, is_swapped: bool, gated: bool) -> int:
    """As `TileShape.strip_columns`, of a tile with so many columns."""
    own_columns = columns // (2 if gated else 1)
    return own_columns // 2 if is_swapped and own_columns > 64 else own_columns


def unpacked(packed_tile: int) -> tuple[bool, int]:
    """Whether a packed shape is swapped, and its columns."""
    return bool(packed_tile >> SWAPPED_BIT & 1), (packed_tile >> COLUMNS_BIT & 63) * 8


def shapes_for(w_layout: str, shapes: Sequence[TileShape]) -> Sequence[TileShape]:
    """Those of `shapes` that serve weights [n, k] ("nk") or [k, n] ("kn"); for scaled
    weights (one of SCALINGS), also scaled ones, and all as scaled shapes; for float8
    activations, those of them.
    GraphError if none does, ArgumentError for another layout."""
    expect_choice(w_layout, (*W_LAYOUTS, *ALL_SCALINGS), "w_layout")
    is_float8 = w_layout in FLOAT8_SCALINGS
    candidates = [shape for shape in shapes if shape.float8 == is_float8]
    if w_layout not in SCALINGS:
        candidates = [shape for shape in candidates if not shape.scaled]
    if w_layout == "kn":
        candidates = [shape for shape in candidates if shape.may_be_transposed]
    if w_layout in SCALINGS:
        candidates = [replace(s, scaled=True) for s in candidates if s.may_be_scaled]
    if candidates:
        return candidates
    where = f"shapes_for({w_layout!r}, ...)"
    if not shapes:
        raise GraphError(
            "no tile shapes are given",
            where=where,
            wanted="at least one TileShape",
            got="none",
            fix="pass FAMILY of etc_dist/ops/tile_model.py, or some of it",
        )
    wanted = "tiles of 16-bit activations"
    if is_float8:
        wanted = "tiles with float8=True: FLOAT8_FAMILY"
    elif w_layout in SCALINGS:
        wanted = "tiles with may_be_scaled"
    elif w_layout == "kn":
        wanted = f"tiles with a multiple of {CHUNK_COLUMNS} columns"
    raise GraphError(
        "no tiles serve the weights",
        where=where,
        wanted=wanted,
        got=", ".join(map(str, shapes)),
        fix="choose other shapes, or store the weights as [n, k] of the elements of x",
    )
