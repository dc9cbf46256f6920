"""What the fused collectives share: one compiled program for all shapes, and its
calls."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from etc_dist.compiler import compile
from etc_dist.errors import ArgumentError, EtcDistError
from etc_dist.ir import GraphFunction
from etc_dist.program import Bound, Program
from etc_dist.runtime.arrays import Array, empty_like, identity, inspect
from etc_dist.runtime.stream import stream_for
from etc_dist.world import World, current

DTYPES = ("bfloat16", "float16")
W_LAYOUTS = ("nk", "kn")
REMEMBERED_CALLS = 256
"""Calls whose argument blocks are kept, so that repeating one costs microseconds."""


class Operation:
    """Base of the fused collectives; owns a program and thereby its symmetric buffers.

    dtype: "bfloat16" or "float16", of inputs and output. w_layout: "nk" for weights
    stored [N, K], "kn" for [K, N]. world: default the current one. options: passed to
    the graph function (tile sizes, for the CPU backend). Making one is collective.
    """

    graph_function: Callable[..., GraphFunction]

    def __init__(
        self,
        *,
        dtype: str = "bfloat16",
        w_layout: str = "nk",
        world: World | None = None,
        schedule: str = "static",
        options: Mapping[str, Any] | None = None,
    ):
        self.world = world or current()
        self.dtype, self.w_layout = dtype, w_layout
        if dtype not in DTYPES or w_layout not in W_LAYOUTS:
            self.world.refuse(
                ArgumentError(
                    f"{type(self).__name__} cannot be made",
                    where=f"{type(self).__name__}, rank {self.world.rank}",
                    wanted=f"dtype in {DTYPES}, w_layout in {W_LAYOUTS}",
                    got=f"dtype {dtype!r}, w_layout {w_layout!r}",
                    fix="choose among these",
                )
            )
        graph = type(self).graph_function(
            self.world.size, dtype=dtype, w_layout=w_layout, **(options or {})
        )
        self.program: Program = compile(graph, self.world, schedule=schedule)
        self._calls: OrderedDict[Any, Bound] = OrderedDict()

    def __call__(self, x: Any, w: Any, out: Any = None, *, stream: Any = None) -> Any:
        key = None
        if self.world.backend == "cuda":
            if out is None:
                out = self._make_output(x, w)
            key = (identity(x), identity(w), identity(out))
            bound = self._calls.get(key)
            if bound is not None:
                self.program.launch(bound, stream_for(stream, x))
                return out
        bound, out = self._bind(x, w, out)
        self.program.launch(bound, stream_for(stream, x))
        if key is not None:
            self._calls[key] = bound
            if len(self._calls) > REMEMBERED_CALLS:
                self._calls.popitem(last=False)
        return out

    def synchronize(self) -> None:
        """Wait for the last call on every rank; raises what ended it. Collective."""
        self.program.synchronize()

    def close(self) -> None:
        """Free the buffers; collective, idempotent."""
        self._calls.clear()
        self.program.close()

    def _rows(self, m: int) -> int:
        """Rows of this call on one rank; ArgumentError if x does not fit."""
        raise NotImplementedError

    def _tensors(
        self, x: Array, w: Array, y: Array, dims: Mapping[str, int]
    ) -> dict[str, Array]:
        """The graph's tensors from the caller's arrays: the same memory, other
        shapes."""
        raise NotImplementedError

    def _output_shape(self, m: int, n: int) -> tuple[int, int]:
        raise NotImplementedError

    def _make_output(self, x: Any, w: Any) -> Any:
        try:
            n = w.shape[0] if self.w_layout == "nk" else w.shape[1]
            return empty_like(inspect("x", x), self._output_shape(x.shape[0], n))
        except (AttributeError, IndexError, ArgumentError):
            return None  # _bind finds the words

    def _bind(self, x: Any, w: Any, out: Any) -> tuple[Bound, Any]:
        try:
            return self._fit(x, w, out)
        except EtcDistError as error:
            self.world.refuse(error)

    def _fit(self, x: Any, w: Any, out: Any) -> tuple[Bound, Any]:
        ax, aw = inspect("x", x), inspect("w", w)
        if len(ax.shape) != 2 or len(aw.shape) != 2:
            raise self._misfit("x [M, K] and w of two axes", f"x {ax}; w {aw}")
        m, k = ax.shape
        n, wk = aw.shape if self.w_layout == "nk" else reversed(aw.shape)
        if k != wk:
            text = "[N, K]" if self.w_layout == "nk" else "[K, N]"
            raise self._misfit(f"w {text} with K = {k} as in x", f"x {ax}; w {aw}")
        dims = {"rows": self._rows(m), "n": n, "k": k}
        shape = self._output_shape(m, n)
        if out is None:
            out = empty_like(ax, shape)
        ay = inspect("out", out)
        if ay.shape != shape:
            raise self._misfit(f"out {list(shape)}", f"out {ay}")
        _refuse_overlap(self, ay, ax, aw)
        return self.program.bind(self._tensors(ax, aw, ay, dims), dims), out

    def _misfit(self, wanted: str, got: str) -> ArgumentError:
        name = type(self).__name__
        return ArgumentError(
            f"the arguments do not fit {name}",
            where=f"{name}, rank {self.world.rank} of {self.world.size}",
            wanted=wanted,
            got=got,
            fix="correct the shapes; nothing was launched on any rank",
        )


def _refuse_overlap(op: Operation, y: Array, *inputs: Array) -> None:
    size = 2
    for name, array in zip("xw", inputs, strict=True):
        end = array.pointer + _count(array) * size
        if y.pointer < end and array.pointer < y.pointer + _count(y) * size:
            raise op._misfit(f"out apart from {name}", f"out overlaps {name}")


def _count(array: Array) -> int:
    count = 1
    for extent in array.shape:
        count *= extent
    return count
