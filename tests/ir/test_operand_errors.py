"""Refused declarations of operands."""

from __future__ import annotations

import pytest

from etc_dist.errors import ArgumentError, GraphError
from etc_dist.ir import Extent, Operand


@pytest.mark.parametrize("size", [0, -1, "two words"], ids=repr)
def test_extent_that_is_not_a_size_is_refused(size):
    with pytest.raises(GraphError) as caught:
        Operand((size,))
    assert caught.value.what == "an extent of an operand is not a size"
    assert caught.value.got == repr(size)


def test_the_name_of_an_extent_is_not_a_number():
    with pytest.raises(GraphError, match="is not a size[^$]*got:    '8'"):
        Operand((Extent(name="8"),))


@pytest.mark.parametrize("size", [1.5, True])
def test_extent_of_a_wrong_type_is_a_type_error(size):
    with pytest.raises(TypeError, match="an extent of Operand"):
        Operand((size,))


@pytest.mark.parametrize("name", ["most", "multiple", "times", "per"])
def test_numbers_of_an_extent_are_1_or_more(name):
    with pytest.raises(ArgumentError, match=f"{name} is out of range"):
        Extent(**{name: 0})
    with pytest.raises(TypeError, match=f"{name} expects an int"):
        Extent(**{name: 1.5})


def test_unknown_dtype_of_an_operand_is_refused():
    with pytest.raises(GraphError) as caught:
        Operand(dtype="float64")
    assert caught.value.got == "'float64'"
