"""The tensors of the graphs of the dense MLP."""

from __future__ import annotations

from etc_dist.functions.scaled_weights import ScaledTensor, weight_input
from etc_dist.ir import Graph, Tensor

Weight = Tensor | ScaledTensor


def add_tensors(
    g: Graph, dtype: str, w_layout: str
) -> tuple[Tensor, Tensor, tuple[Weight, Weight], Weight]:
    """x and y [rows, hidden] of a rank's rows; gate and up [inner, hidden], and down
    [hidden, inner], its shard of the weights: x, y, (gate, up), down."""
    rows, hidden, inner = g.dims("rows hidden inner")
    x = g.input("x", (rows, hidden), dtype)
    gate, up, down = (
        weight_input(g, name, w_layout, *shape, dtype)
        for name, shape in (
            ("gate", (inner, hidden)),
            ("up", (inner, hidden)),
            ("down", (hidden, inner)),
        )
    )
    return x, g.output("y", (rows, hidden), dtype), (gate, up), down
