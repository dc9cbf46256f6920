"""Index expressions: one meaning for Python, NumPy and the printed text."""

from __future__ import annotations

import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etc_dist.ir import Expr, Symbol, ceildiv, equal, maximum, minimum, select
from etc_dist.ir.expr import Const, Load, op, wrap
from etc_dist.ir.interval import interval

N, M, T = Symbol("n", "dim"), Symbol("m", "dim"), Symbol("t", "task")
NAMES = {"n": N, "m": M, "t": T}
FUNCTIONS = {
    "min": min,
    "max": max,
    "equal": lambda a, b: a == b,
    "select": lambda condition, a, b: a if condition else b,
}

Pair = tuple[Expr, str]


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (N + 0, "n"),
        (0 + N, "n"),
        (N - 0, "n"),
        (1 * N, "n"),
        (N * 1, "n"),
        (N // 1, "n"),
        (N * 0, "0"),
        (N % 1, "0"),
        (minimum(N, N), "n"),
        (minimum(3, 5) + maximum(3, 5), "8"),
        ((N + 2) - 1, "n + 1"),
        ((N - 2) + 2, "n"),
        ((N - 2) - 3, "n - 5"),
        ((N + 1) - 4, "n - 3"),
        (Const(-7) // 2, "-4"),
        (Const(-7) % 4, "1"),
        (ceildiv(N, 256), "(n + 255) // 256"),
        (ceildiv(7, 2), "4"),
        (select(Const(2) < 3, N, M), "n"),
        (select(equal(2, 3), N, M), "m"),
        (select(N < M, T, T), "t"),
    ],
)
def test_constants_and_neutral_elements_are_folded(expr, text):
    assert str(expr) == text


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (N + M - T, "n + m - t"),
        (N - (M - T), "n - (m - t)"),
        (N - (M + T), "n - (m + t)"),
        (N * M + T, "n * m + t"),
        (N * (M + T), "n * (m + t)"),
        ((N + M) * T, "(n + m) * t"),
        (N // M // T, "n // m // t"),
        (N // (M * T), "n // (m * t)"),
        (N % M * T, "n % m * t"),
        (N * (M % T), "n * (m % t)"),
        (minimum(N + M, T) * 2, "min(n + m, t) * 2"),
        (2 * maximum(N, M // T), "2 * max(n, m // t)"),
        (select(N + 1 < M, N, M) * 2, "select(n + 1 < m, n, m) * 2"),
        (select(N > M, N, 0), "select(m < n, n, 0)"),
        (select(N <= 3, N, 0), "select(n <= 3, n, 0)"),
        (select(equal(N, 3), N, 0), "select(equal(n, 3), n, 0)"),
        (Load("table", (N + 2, M), (N + 1, M)) + 1, "table[n + 1, m] + 1"),
    ],
)
def test_text_has_only_the_parentheses_it_needs(expr, text):
    assert str(expr) == text


@pytest.mark.parametrize(
    ("a", "b", "quotient", "remainder"),
    [(7, 2, 3, 1), (-7, 2, -4, 1), (7, -2, -4, -1), (-7, -2, 3, -1), (-8, 2, -4, 0)],
)
def test_division_rounds_to_minus_infinity(a, b, quotient, remainder):
    env = {"n": np.array([a]), "m": b}
    assert (Const(a) // b, Const(a) % b) == (Const(quotient), Const(remainder))
    assert (N // M).evaluate(env).tolist() == [quotient]
    assert (N % M).evaluate(env).tolist() == [remainder]


def test_a_load_reads_the_tensor_of_the_environment():
    load = Load("table", (N, M), (N * 2, M))
    table = np.arange(12, dtype=np.int32).reshape(4, 3)
    assert load.evaluate({"@table": table, "n": 1, "m": 2}) == 8
    rows = load.evaluate({"@table": table, "n": np.array([0, 1]), "m": 1})
    assert (rows.tolist(), rows.dtype) == ([1, 7], np.int64)


def test_only_the_chosen_expression_is_evaluated():
    inside = select(N < 3, Load("table", (Const(3),), (N,)), 99 // (N - 4))
    table = np.array([5, 6, 7], np.int32)
    assert inside.evaluate({"@table": table, "n": 2}) == 7
    numbers = inside.evaluate({"@table": table, "n": np.array([0, 7, 2, 5])})
    assert numbers.tolist() == [5, 33, 7, 99]
    with pytest.raises(ZeroDivisionError):
        inside.evaluate({"@table": table, "n": 4})


def test_symbols_and_loads_come_once_in_order_of_appearance():
    load = Load("table", (N,), (M,))
    expr = (T + load) * (N - T) + M
    assert [str(s) for s in expr.symbols] == ["t", "m", "n"]
    assert expr.loads == (load,)


def test_equal_structure_is_equal():
    assert Symbol("n", "dim") * 2 + M == N * 2 + M
    assert N * 2 + M != M + N * 2
    assert len({N * 2 + M, N * 2 + M}) == 1


# ----------------------------------------------------------------------- properties

LEAVES: st.SearchStrategy[Pair] = st.one_of(
    st.sampled_from([(symbol, name) for name, symbol in NAMES.items()]),
    st.integers(-9, 9).map(lambda v: (Const(v), f"({v})")),
)


COMPARISONS = [
    (operator.lt, "<"),
    (operator.le, "<="),
    (operator.gt, ">"),
    (operator.ge, ">="),
    (equal, "=="),
]


@st.composite
def larger(draw: st.DrawFn, parts: st.SearchStrategy[Pair]) -> Pair:
    """An operation on two expressions, with its text in plain Python."""
    name = draw(st.sampled_from(["+", "-", "*", "//", "%", "min", "max", "select"]))
    (a, a_text), (b, b_text) = draw(parts), draw(parts)
    if name == "select":
        (c, c_text), (d, d_text) = draw(parts), draw(parts)
        compare, sign = draw(st.sampled_from(COMPARISONS))
        choice = f"({c_text} if {a_text} {sign} {b_text} else {d_text})"
        return select(compare(a, b), c, d), choice
    if name in ("//", "%"):  # no divisor is zero
        sign = draw(st.sampled_from([("max", 1), ("min", -1)]))
        b, b_text = op(sign[0], b, sign[1]), f"{sign[0]}({b_text}, {sign[1]})"
    if name in ("min", "max"):
        return op(name, a, b), f"{name}({a_text}, {b_text})"
    return op(name, a, b), f"({a_text} {name} {b_text})"


EXPRESSIONS = st.recursive(LEAVES, larger, max_leaves=8)
VALUES = st.tuples(*[st.integers(-50, 50)] * 3)
many = settings(max_examples=20 * settings().max_examples)


@many
@given(EXPRESSIONS, VALUES)
def test_value_and_text_mean_what_python_computes(pair, values):
    expr, unfolded = pair
    env = dict(zip(NAMES, values, strict=True))
    expected = eval(unfolded, {**FUNCTIONS, **env})
    assert expr.evaluate(env) == expected
    assert eval(str(expr), {**FUNCTIONS, **env}) == expected


@many
@given(EXPRESSIONS)
def test_text_read_back_gives_the_same_expression(pair):
    names = {**NAMES, "min": minimum, "max": maximum}
    names |= {"select": select, "equal": equal}
    assert wrap(eval(str(pair[0]), names)) == pair[0]


@many
@given(EXPRESSIONS, st.lists(VALUES, min_size=1, max_size=5))
def test_arrays_are_evaluated_element_by_element(pair, rows):
    columns = dict(zip(NAMES, np.array(rows).T, strict=True))
    singles = [pair[0].evaluate(dict(zip(NAMES, row, strict=True))) for row in rows]
    whole = np.broadcast_to(pair[0].evaluate(columns), len(rows))
    assert whole.tolist() == singles


@many
@given(EXPRESSIONS, VALUES, VALUES)
def test_interval_contains_the_value(pair, values, opposite_values):
    ends = zip(NAMES, values, opposite_values, strict=True)
    ranges = {name: (min(a, b), max(a, b)) for name, a, b in ends}
    low, high = interval(pair[0], ranges)
    assert low <= pair[0].evaluate(dict(zip(NAMES, values, strict=True))) <= high
