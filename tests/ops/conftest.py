"""What the op tests share: arrays of the world's backend, and a reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from etc_dist import AllGatherMatmul, MatmulReduceScatter, World
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.ops.operation import Operation

Host = np.ndarray[Any, Any]


class Arrays:
    """NumPy arrays on the CPU backend, CuPy arrays on GPUs: the only place that
    knows."""

    def __init__(self, backend: str):
        self._cupy: Any = None
        if backend == "cuda":
            import cupy

            self._cupy = cupy

    def put(self, array: Host) -> Any:
        return array if self._cupy is None else self._cupy.asarray(array)

    def get(self, array: Any) -> Host:
        """`array` in float32, on the host."""
        host = array if self._cupy is None else array.get()
        return host.astype(np.float32)

    def poisoned(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self.put(np.full(shape, np.nan, numpy_dtype(dtype)))


@pytest.fixture(scope="session")
def arrays(world: World) -> Arrays:
    return Arrays(world.backend)


@pytest.fixture
def make(world: World) -> Iterator[Callable[..., Operation]]:
    """Makes operations that are closed after the test."""
    made: list[Operation] = []

    def make(kind: type[Operation], **options: Any) -> Operation:
        made.append(kind(world=world, **options))
        return made[-1]

    yield make
    for operation in made:
        operation.close()


class Problem:
    """This rank's inputs of one collective at a shape, and what it must return.

    `m`, `n`, `k` are those of the whole product, as in the docstrings of the ops: x is
    [m, k] for a reduce-scatter and [m / ranks, k] for an all-gather.
    """

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
        rows = m if kind is MatmulReduceScatter else m // world.size
        # Each rank has its own values; without rng so small that every sum is exact.
        own = np.random.default_rng([world.rank, m, n, k]) if rng is None else rng
        if rng is not None:
            own = rng.spawn(world.size)[world.rank]

        def draw(*extents: int) -> Host:
            if rng is None:
                return own.integers(-1, 2, extents).astype(numpy_dtype(dtype))
            return own.standard_normal(extents).astype(numpy_dtype(dtype))

        x, w = draw(rows, k), draw(n, k)
        self._arrays = arrays
        self.expected = _reference(world, kind, x, w)
        self.x = arrays.put(x)
        self.w = arrays.put(w if w_layout == "nk" else np.ascontiguousarray(w.T))
        self.out = arrays.poisoned(self.expected.shape, dtype)

    def error(self, out: Any) -> float:
        """The relative error of `out`, in the Frobenius norm."""
        off = self._arrays.get(out) - self.expected
        return float(np.linalg.norm(off) / np.linalg.norm(self.expected))

    def check_exact(self, out: Any) -> None:
        np.testing.assert_array_equal(self._arrays.get(out), self.expected)


def _reference(world: World, kind: type[Operation], x: Host, w: Host) -> Host:
    """By NumPy and MPI alone, in fp32."""
    from mpi4py import MPI

    x, w = x.astype(np.float32), w.astype(np.float32)
    if kind is AllGatherMatmul:
        return np.concatenate(MPI.COMM_WORLD.allgather(x)) @ w.T
    total = sum(MPI.COMM_WORLD.allgather(x @ w.T))
    own = len(total) // world.size
    return total[world.rank * own : (world.rank + 1) * own]


@pytest.fixture
def problem(world: World, arrays: Arrays) -> Callable[..., Problem]:
    def problem(*arguments: Any, **options: Any) -> Problem:
        return Problem(world, arrays, *arguments, **options)

    return problem
