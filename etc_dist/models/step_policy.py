"""The numbers of a step that its arrays leave open: rows, tiles and slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from etc_dist.functions.attend import HEADS
from etc_dist.functions.tile_matmul import TileShape
from etc_dist.models.config import ModelConfig
from etc_dist.ops.matmul_policy import SHAPES, choose

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""The numbers of rows of a step. Others are padded to the next one, so that there are
few shapes to prove."""
SLICE_POSITIONS = 128
"""Positions that a slice of attention has at least: the warps of a worker have some
each."""
MOST_SLICES = 16


def padded(rows: int) -> int:
    return next(count for count in ROWS if rows <= count)


@dataclass(frozen=True)
class StepPolicy:
    """Chooses the dims of a model's steps. `workers`: of a GPU; None for the CPU
    backend, on which few tasks are fast."""

    config: ModelConfig
    workers: int | None
    shapes: Sequence[TileShape] = SHAPES

    def dims(self, rows: int, longest: int) -> dict[str, int]:
        """For `rows` rows, which attend to up to `longest` positions each."""
        shapes = {
            f"{name}_shape": self._shape(rows, n, k, gated=name == "gate_up")
            for name, (n, k) in self._matmuls().items()
        }
        return {**shapes, "slices": self._slices(rows, longest)}

    def capacity(self, most_rows: int, positions: int) -> list[Mapping[str, int]]:
        """The choices for each number of rows up to `most_rows`, at the full length."""
        counts = (rows for rows in ROWS if rows <= most_rows)
        return [{"rows": rows, **self.dims(rows, positions)} for rows in counts]

    def _matmuls(self) -> dict[str, tuple[int, int]]:
        """The n and k of each."""
        config = self.config
        heads = config.heads * config.head_dim
        width = heads + 2 * config.kv_heads * config.head_dim
        return {
            "qkv": (width, config.hidden),
            "o": (config.hidden, heads),
            "gate_up": (2 * config.inner, config.hidden),
            "down": (config.hidden, config.inner),
            "head": (config.vocabulary, config.hidden),
        }

    def _shape(self, rows: int, n: int, k: int, *, gated: bool) -> int:
        if self.workers is not None:
            return choose(rows, n, k, self.workers, self.shapes, gated=gated)
        tasks = {
            number: -(-rows // s.rows) * -(-n // s.columns)
            for number, s in enumerate(self.shapes)
            if s.may_be_gated or not gated
        }
        return min(tasks, key=tasks.__getitem__)

    def _slices(self, rows: int, longest: int) -> int:
        """A power of two, so that there are few shapes to prove."""
        if self.workers is None:
            return 1
        heads = self.config.kv_heads
        tasks = rows * heads * -(-self.config.heads // heads // HEADS)
        useful = min(self.workers // tasks, longest // SLICE_POSITIONS, MOST_SLICES)
        return 1 << max(0, useful.bit_length() - 1)
