"""Graphs of one task, whose body is in a file of its name or in cuda_functions.cuh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etc_dist.ir import DeviceFunction, Graph, device_function, graph_function

FOLDER = Path(__file__).parent


@graph_function
def one_task(g: Graph, *, body: str, dtype: str, lane: str) -> None:
    """y [m] is what `body` makes of x [n]."""
    n, m = g.dims("n m")
    x, y = g.input("x", (n,), dtype), g.output("y", (m,), dtype)
    g.call(_function(body, lane), g.grid(i=1), reads=[x[:]], writes=[y[:]])


def _function(name: str, lane: str) -> DeviceFunction:
    def body(x: Any, y: Any) -> None:
        raise AssertionError("only the CUDA body runs here")

    body.__name__ = name
    own = FOLDER / f"{name}.cuh"
    source = own if own.exists() else FOLDER / "cuda_functions.cuh"
    return device_function(source=source, reads=1, writes=1, lane=lane)(body)
