"""The tensors of the graphs of the dense MLP."""

from __future__ import annotations

from etc_dist.ir import Graph, Tensor


def add_tensors(
    g: Graph, dtype: str
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], Tensor]:
    """x and y [rows, hidden] of a rank's rows; gate and up [inner, hidden], and down
    [hidden, inner], its shard of the weights: x, y, (gate, up), down."""
    rows, hidden, inner = g.dims("rows hidden inner")
    x = g.input("x", (rows, hidden), dtype)
    gate = g.input("gate", (inner, hidden), dtype)
    up = g.input("up", (inner, hidden), dtype)
    down = g.input("down", (hidden, inner), dtype)
    return x, g.output("y", (rows, hidden), dtype), (gate, up), down
