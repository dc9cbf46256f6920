"""Arrays of the world's backend, so that one test body runs on both."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist import ScaledWeight, World
from etc_dist.ir.tensor import numpy_dtype

Host = np.ndarray[Any, Any]


def ones(world: World) -> tuple[Host, Host]:
    """x and w of 1 that fit MatmulReduceScatter, on the CPU backend."""
    x, w = np.ones((8 * world.size, 8)), np.ones((8, 8))
    return x.astype(numpy_dtype("bfloat16")), w.astype(numpy_dtype("bfloat16"))


def cancelling(
    rng: np.random.Generator, m: int, n: int, k: int, dtype: str = "bfloat16"
) -> tuple[Host, Host]:
    """x [m, k] and w [n, k] whose product is 0 but for the rounding of sums, which
    depends on their order."""
    x, w = (rng.standard_normal((rows, k // 2)) for rows in (m, n))
    x, w = np.concatenate([x, x], 1), np.concatenate([w, -w], 1)
    return x.astype(numpy_dtype(dtype)), w.astype(numpy_dtype(dtype))


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

    def put_as(self, array: Host, dtype: str) -> Any:
        return self.put(array.astype(numpy_dtype(dtype)))

    def put_scaled(self, codes: Host, scales: Host) -> ScaledWeight:
        """A weight of float8, which CuPy has as its bits."""
        bits = codes if self._cupy is None else codes.view(np.uint8)
        return ScaledWeight(self.put(bits), self.put(scales))

    def get(self, array: Any) -> Host:
        """`array` in float32, on the host."""
        host = array if self._cupy is None else array.get()
        return host.astype(np.float32)

    def poisoned(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self.put_as(np.full(shape, np.nan), dtype)
