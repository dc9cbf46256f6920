"""Index expressions as CUDA text: the same values as those of `evaluate`."""

from __future__ import annotations

import operator
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etc_dist.codegen.expression import linear, text
from etc_dist.codegen.names import dim_name
from etc_dist.ir import RANK, TASK, Expr, Symbol, equal, maximum, minimum, select
from etc_dist.ir.expr import Const, Load, op
from tests.codegen.as_python import as_python

N, I = Symbol("n", "dim"), Symbol("i", "coordinate")  # noqa: E741
BLOCKS = Symbol("blocks", "derived")
SYMBOLS = [N, BLOCKS, I, RANK, TASK]
TABLE = np.array([3, -1, 4, 1, -5, 9, 2, -6], np.int32)

# The functions of kernels/common/types.cuh and operand.cuh.
DEVICE = {
    "floordiv": lambda a, b: a // b,
    "floormod": lambda a, b: a % b,
    "minimum": min,
    "maximum": max,
    "tensor_table": lambda g: SimpleNamespace(load=lambda index: int(TABLE[index])),
}


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (
            (N - I) * 2 - (N - (I + 1)),
            "(g.dim_n - c.axis_i) * 2 - (g.dim_n - (c.axis_i + 1))",
        ),
        (N + I * 2, "g.dim_n + c.axis_i * 2"),
        (TASK // BLOCKS % 4, "floormod(floordiv(t, g.dim_blocks), 4)"),
        (minimum(N, RANK) - 1, "minimum(g.dim_n, g.rank) - 1"),
        (maximum(I, -3), "maximum(c.axis_i, -3)"),
        (select(I < N, I, 0), "(c.axis_i < g.dim_n ? c.axis_i : 0)"),
        (select(equal(I, 2), N, 0), "(c.axis_i == 2 ? g.dim_n : 0)"),
        (Load("table", (Const(8),), (I + 1,)), "tensor_table(g).load(c.axis_i + 1)"),
    ],
)
def test_symbols_are_arguments_or_coordinates(expr, expected):
    assert text(expr) == expected


def test_the_place_of_an_element_is_row_major():
    at = linear((I, RANK, TASK), (N, BLOCKS, Const(5)))
    assert value_of(at, dict(n=9, blocks=4, i=2, rank=3, t=1)) == (2 * 4 + 3) * 5 + 1


def value_of(cuda: str, env: dict[str, int]) -> int:
    """The value of the CUDA text; Python and C++ have the same precedence rules."""
    dims = {dim_name(name): value for name, value in env.items()}
    g = SimpleNamespace(rank=env["rank"], **dims)
    names = {"g": g, "c": SimpleNamespace(axis_i=env["i"]), "t": env["t"]}
    number = eval(as_python(cuda), {**DEVICE, **names})
    assert isinstance(number, int)
    return number


@st.composite
def larger(draw: st.DrawFn, parts: st.SearchStrategy[Expr]) -> Expr:
    name = draw(
        st.sampled_from(["+", "-", "*", "//", "%", "min", "max", "load", "select"])
    )
    a, b = draw(parts), draw(parts)
    if name == "select":
        compare = draw(st.sampled_from([operator.lt, operator.ge, equal]))
        return select(compare(a, b), draw(parts), draw(parts))
    if name == "load":
        return Load("table", (Const(len(TABLE)),), (a % len(TABLE),))
    if name in ("//", "%"):  # no divisor is zero
        b = draw(st.sampled_from([maximum(b, 1), minimum(b, -1)]))
    return op(name, a, b)


LEAVES = st.one_of(st.sampled_from(SYMBOLS), st.integers(-9, 9).map(Const))
ENVIRONMENTS = st.fixed_dictionaries(
    {symbol.name: st.integers(-50, 50) for symbol in SYMBOLS}
)


@settings(max_examples=300)
@given(st.recursive(LEAVES, larger, max_leaves=8), ENVIRONMENTS)
def test_device_and_host_compute_the_same(expr, env):
    assert value_of(text(expr), env) == expr.evaluate({**env, "@table": TABLE})
