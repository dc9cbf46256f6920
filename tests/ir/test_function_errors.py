"""Refused arguments of device functions."""

from __future__ import annotations

import pickle
from copy import deepcopy
from functools import partial
from typing import Any

import pytest

from etc_dist.errors import GraphError
from etc_dist.ir import DeviceFunction, Extent, Operand, device_function


def copy(x: Any, y: Any) -> None:
    y[...] = x


def made(**terms: Any) -> DeviceFunction:
    return device_function(**{"source": "", "reads": 1, "writes": 1, **terms})(copy)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("source", 3, "a str or Path, got int"),
        ("reads", "1", "an int, got str"),
        ("writes", True, "an int, got bool"),
        ("gathers", 0, "a Sequence, got int"),
        ("reads_before_wait", [0.0], "an int, got float"),
        ("constants", ["kSize"], "a Mapping, got list"),
        ("constants", {3: 3}, "a str, got int"),
        ("constants", {"k": "3"}, "an int or float or tuple, got str"),
        ("tile", {0: (64,)}, "an Operand, got tuple"),
    ],
)
def test_term_of_a_wrong_type_is_a_type_error(name, value, expected):
    with pytest.raises(TypeError) as caught:
        made(**{name: value})
    message = str(caught.value)
    assert message.endswith(f"{name}= of device function copy expects {expected}")


@pytest.mark.parametrize("body", [3, partial(copy, 3)], ids=["number", "partial"])
def test_body_that_is_not_a_function_is_a_type_error(body):
    with pytest.raises(TypeError, match="expects a function, got"):
        device_function(source="", reads=0, writes=0)(body)


def test_body_that_assigns_to_the_name_of_its_result_is_refused():
    def double(x: Any, y: Any) -> None:
        y = 2 * x  # noqa: F841

    with pytest.raises(GraphError) as caught:
        device_function(source="", reads=1, writes=1)(double)
    assert caught.value.what == (
        "the body of device function double does not write its operand y"
    )
    assert caught.value.fix == "in double, assign to y[...]"


@pytest.mark.parametrize("value", [2**31, 1e39, float("nan")])
def test_constant_that_a_cuda_body_cannot_hold_is_refused(value):
    with pytest.raises(GraphError, match="numbers that its CUDA body cannot hold"):
        made(constants={"kEps": value})


@pytest.mark.parametrize(
    "body", [lambda x: None, lambda x, y, z: None, lambda x, *, y: None]
)
def test_body_takes_each_operand_as_a_positional_parameter(body):
    with pytest.raises(GraphError, match="a parameter for each operand") as caught:
        device_function(source="", reads=1, writes=1)(body)
    assert caught.value.wanted == "2 positional parameters: 1 reads, then 1 writes"
    for fits in (lambda *operands: None, lambda x, y, z=0, *, i: None):
        device_function(source="", reads=1, writes=1)(fits)


def test_number_of_operands_is_not_negative():
    with pytest.raises(GraphError, match="a negative number of operands"):
        made(reads=-1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("gathers", (1,)), ("reads_before_wait", (-1,)), ("tile", {2: Operand()})],
)
def test_operand_that_does_not_exist_is_refused(name, value):
    with pytest.raises(GraphError) as caught:
        made(**{name: value})
    assert caught.value.what == (
        f"{name}= of device function copy names an operand that does not exist"
    )


@pytest.mark.parametrize("name", ["two words", "_hidden", ""])
def test_constants_have_names_for_cpp(name):
    with pytest.raises(GraphError) as caught:
        made(constants={name: 1})
    assert caught.value.got == repr(name)


def test_gathers_may_be_any_sequence():
    assert made(gathers=range(1)).gathers == (0,)


@pytest.mark.parametrize("source", ["", "functions/not_yet.cuh", "/nowhere/copy.cuh"])
def test_a_source_need_not_exist_before_the_build(source):
    assert made(source=source).source == source


@pytest.mark.parametrize("name", ["like", "mirrors"])
def test_an_operand_that_is_like_none_is_refused(name):
    with pytest.raises(GraphError, match="names an operand that does not exist"):
        made(tile={0: Operand(**{name: 9})})


def test_a_device_function_is_not_pickled():
    with pytest.raises(TypeError, match=r"device function copy cannot be pickled"):
        pickle.dumps(made())


def test_a_device_function_is_its_own_copy():
    function = made()
    assert deepcopy(function) is function


def test_a_multiple_of_an_extent_that_is_not_declared_is_refused():
    tile = {0: Operand(("m", Extent(name="n", times=64))), 1: Operand(("m", None))}
    with pytest.raises(
        GraphError, match="a multiple or a part of an unknown"
    ) as caught:
        DeviceFunction("f", print, "f.cuh", "tensor", 1, 1, tile=tile)
    assert caught.value.got == "64 * n"
