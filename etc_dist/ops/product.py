"""The fused collectives around one matrix product: x [M, K] and w."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etc_dist.ir import GraphFunction
from etc_dist.ops.arguments import refuse_unknown
from etc_dist.ops.operation import Operation
from etc_dist.runtime.arrays import Array, described
from etc_dist.world import World, given_world

DTYPES = ("bfloat16", "float16")
W_LAYOUTS = ("nk", "kn")


class ProductOperation(Operation):
    """Base of the fused collectives.

    dtype: "bfloat16" or "float16", of inputs and output. w_layout: "nk" for weights
    stored [N, K], "kn" for [K, N]. world: default the current one. trace: record the
    timeline of each run. options: sizes passed to the graph function (of tiles, for the
    CPU backend). Making one is collective.
    """

    names = ("x", "w")
    graph_function: Callable[..., GraphFunction]

    def __init__(
        self,
        *,
        dtype: str = "bfloat16",
        w_layout: str = "nk",
        world: World | None = None,
        schedule: str = "static",
        trace: bool | None = None,
        options: Mapping[str, Any] | None = None,
    ):
        world = given_world(world)
        name = type(self).__name__
        known = {"dtype": (dtype, DTYPES), "w_layout": (w_layout, W_LAYOUTS)}
        refuse_unknown(world, name, **known)
        self.dtype, self.w_layout = dtype, w_layout
        own = {"dtype": dtype, "w_layout": w_layout}
        super().__init__(self.graph_function, own, world, schedule, trace, options)

    def __call__(self, x: Any, w: Any, out: Any = None, *, stream: Any = None) -> Any:
        return self._call((x, w), out, stream)

    def _columns(self, w: Sequence[int]) -> int:
        return w[0] if self.w_layout == "nk" else w[1]

    def _check(self, inputs: Sequence[Array]) -> None:
        x, w = inputs
        if len(x.shape) != 2 or len(w.shape) != 2:
            raise self.misfit("x [M, K] and w of two axes", described(x, w))
        k = w.shape[1] if self.w_layout == "nk" else w.shape[0]
        if {x.dtype, w.dtype} != {self.dtype}:
            raise self.misfit(f"x and w of {self.dtype}", described(x, w))
        if x.shape[1] != k:
            text = "[N, K]" if self.w_layout == "nk" else "[K, N]"
            wanted = f"w {text} with K = {x.shape[1]} as in x"
            raise self.misfit(wanted, described(x, w))
