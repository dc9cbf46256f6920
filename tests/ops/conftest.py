"""Fixtures of the tests of operations: operations, inputs and a reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from etc_dist import AllGatherMatmul, Matmul, World
from etc_dist.errors import WorldError
from etc_dist.functions.tile_shape import shapes_for
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.ops.operation import Operation
from etc_dist.ops.tile_model import FAMILY, FLOAT8_FAMILY, Tiling, dims_of
from etc_dist.schedule.plan import Choice
from etc_dist.settings import Settings
from etc_dist.world import start
from tests.ops.arrays import Arrays, Host


@pytest.fixture(scope="session")
def arrays(world: World) -> Arrays:
    return Arrays(world.backend)


@pytest.fixture
def cpu_world() -> Iterator[World]:
    """A separate world, which a test may break."""
    cpu_world = start(Settings(backend="cpu", world_limit=30.0))
    yield cpu_world
    with suppress(WorldError):  # a peer may have left it
        cpu_world.close()


@pytest.fixture
def make(world: World) -> Iterator[Callable[..., Operation]]:
    """Makes operations that are closed after the test."""
    operations: list[Operation] = []

    def make(kind: type[Operation], **options: Any) -> Operation:
        operations.append(kind(world=world, **options))
        return operations[-1]

    yield make
    for operation in operations:
        operation.close()


class Problem:
    """This rank's inputs of one operation at a shape, and the expected result.

    `m`, `n`, `k` are those of the whole product, as in the docstrings of the ops: x is
    [m / ranks, k] for an all-gather, else [m, k]."""

    def __init__(
        self,
        world: World,
        arrays: Arrays,
        kind: type[Operation],
        shape: tuple[int, int, int],
        dtype: str = "bfloat16",
        w_layout: str = "nk",
        rng: np.random.Generator | None = None,
    ):
        m, n, k = shape
        rows = m // world.size if kind is AllGatherMatmul else m
        # Each rank has its own values: normal ones by `rng`, else -1, 0 and 1, with so
        # many zeros in long rows that the sums of each rank are exact.
        if rng is None:
            small = np.random.default_rng([world.rank, m, n, k])
            x, w = (small.integers(-1, 2, extents) for extents in ((rows, k), (n, k)))
            x *= small.random(x.shape) * k < 1024
        else:
            rank_rng = rng.spawn(world.size)[world.rank]
            x, w = (
                rank_rng.standard_normal(extents) for extents in ((rows, k), (n, k))
            )
        x, w = x.astype(numpy_dtype(dtype)), w.astype(numpy_dtype(dtype))
        self._arrays, self._dtype = arrays, numpy_dtype(dtype)
        self.expected = _reference(world, kind, x, w)
        self.x = arrays.put(x)
        # A transposed view, as w.T of weights that are stored [k, n].
        self.w = arrays.put(w) if w_layout == "nk" else arrays.put(w.T.copy()).T
        self.out = arrays.poisoned(self.expected.shape, dtype)

    def error(self, out: Any) -> float:
        """The relative error of `out`, in the Frobenius norm."""
        off = self._arrays.get(out) - self.expected
        return float(np.linalg.norm(off) / np.linalg.norm(self.expected))

    def check_exact(self, out: Any) -> None:
        rounded = self.expected.astype(self._dtype).astype(np.float32)
        np.testing.assert_array_equal(self._arrays.get(out), rounded)


def _reference(world: World, kind: type[Operation], x: Host, w: Host) -> Host:
    """By NumPy and MPI alone, in fp32."""
    from mpi4py import MPI

    x, w = x.astype(np.float32), w.astype(np.float32)
    if kind is Matmul:
        return x @ w.T
    if kind is AllGatherMatmul:
        return np.concatenate(MPI.COMM_WORLD.allgather(x)) @ w.T
    total = sum(MPI.COMM_WORLD.allgather(x @ w.T))
    num_rows = len(total) // world.size
    return total[world.rank * num_rows : (world.rank + 1) * num_rows]


@pytest.fixture
def problem(world: World, arrays: Arrays) -> Callable[..., Problem]:
    def problem(*arguments: Any, **options: Any) -> Problem:
        return Problem(world, arrays, *arguments, **options)

    return problem


@pytest.fixture
def make_each_tile(
    make: Callable[..., Operation], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Operation, int]]:
    """Makes a Matmul that multiplies m + n rows by tile n of its program, with k of the
    last column divided for some; and returns it and their number."""

    def make_each_tile(
        w_layout: str, m: int, k: int, **options: Any
    ) -> tuple[Operation, int]:
        tilings = []
        shapes = shapes_for(w_layout, (*FAMILY, *FLOAT8_FAMILY))
        for shape_idx, shape in enumerate(shapes):
            is_split = shape_idx % 3 > 0 and k > shape.depth
            tilings.append(
                Tiling(shape_idx, shape.columns, int(is_split), 1 + is_split)
            )

        def choose(
            op: Matmul, tuning: Any, layout: str, dims: dict[str, int], workers: int
        ) -> list[Choice]:
            choices = dims_of(tilings[dims["m"] - m])
            return [Choice(dim, value, list) for dim, value in choices.items()]

        monkeypatch.setattr(Matmul, "_choose", choose)
        return make(Matmul, **options), len(tilings)

    return make_each_tile
