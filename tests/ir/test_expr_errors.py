"""Refusals of index expressions: values that are known only when the program runs."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.errors import GraphError
from etc_dist.ir import Symbol, ceildiv, equal, select
from etc_dist.ir.expr import wrap

N, M = Symbol("n", "dim"), Symbol("m", "dim")


@pytest.mark.parametrize(
    "condition", [N < 3, N > 3, N <= M, N > M, N >= 0, equal(N, 3)]
)
def test_a_comparison_has_no_truth_value(condition):
    with pytest.raises(TypeError, match=r"has no truth value.*write select\("):
        if condition:
            pass


def test_a_chained_comparison_is_refused():
    with pytest.raises(TypeError, match=r"comparison 0 <= n has no truth value"):
        assert 0 <= N < M
    with pytest.raises(TypeError, match=r"minimum\(\) and maximum\(\)"):
        max(N, M)


@pytest.mark.parametrize("value", [True, 1, np.bool_(True), np.array(True)])
def test_a_comparison_does_not_equal_a_number(value):
    with pytest.raises(TypeError, match="comparison n < 3 has no truth value"):
        assert (N < 3) == value


def test_comparisons_are_equal_by_structure():
    assert (N < 3) == (N < 3) and hash(N < 3) == hash(N < 3)
    assert len({N < 3, N < 2, N <= 3, M < 3}) == 4


def test_a_comparison_is_not_a_number():
    with pytest.raises(TypeError, match=r"got the comparison n < 3.*select"):
        wrap(N < 3)
    with pytest.raises(TypeError, match="unsupported operand"):
        assert (N < 3) + 1


@pytest.mark.parametrize("condition", [True, N == M, N, 1])
def test_select_takes_a_comparison_only(condition):
    with pytest.raises(TypeError, match=r"expects a comparison.*equal\(a, b\)"):
        select(condition, N, M)


@pytest.mark.parametrize("divisor", [0, -3, np.int64(-3)])
def test_ceildiv_takes_a_positive_divisor(divisor):
    with pytest.raises(GraphError, match="ceildiv has no divisor below 1"):
        ceildiv(N, divisor)
