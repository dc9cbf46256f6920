"""Sizes of matrices for tests of tiles."""

from __future__ import annotations

from etc_dist.functions.tile_shape import TileShape


def odd_sizes(shape: TileShape) -> tuple[int, int, int]:
    """M, N and K of a few tiles, of which the last ones end at the edges; of tall ones,
    one down."""
    rows = shape.rows - 4 if shape.is_tall else min(72, shape.rows + 4)
    return rows, min(328, shape.columns + 72), 136
