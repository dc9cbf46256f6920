"""What a device function may be made of, and in which words the rest is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from etc_dist.errors import GraphError
from etc_dist.ir import DeviceFunction, device_function


def copy(x: Any, y: Any) -> None:
    y[...] = x


def made(**terms: Any) -> DeviceFunction:
    return device_function(**{"source": "", "reads": 1, "writes": 1, **terms})(copy)


def refused(**terms: Any) -> GraphError:
    with pytest.raises(GraphError) as caught:
        made(**terms)
    assert caught.value.where == "device function copy"
    return caught.value


@pytest.mark.parametrize("name", ["reads", "writes"])
@pytest.mark.parametrize("count", ["1", -1, 1.5, None, True], ids=repr)
def test_operands_are_counted(name, count):
    error = refused(**{name: count})
    assert error.what == f"{name}= of device function copy is no count"
    assert error.got == repr(count)
    assert error.fix.startswith("count the regions that the body is given")


def test_picks_may_be_any_sequence():
    assert made(gathers=range(1)).gathers == (0,)


@pytest.mark.parametrize("name", ["gathers", "reads_before_wait"])
@pytest.mark.parametrize("given", [0, None, ["x"], [[0]], "0", [0.0]], ids=repr)
def test_gathers_and_early_reads_are_lists_of_positions(name, given):
    error = refused(**{name: given})
    assert error.what == f"{name}= of device function copy names what it does not read"
    assert (error.wanted, error.got) == (
        "a list of positions of its 1 reads",
        repr(given),
    )
    assert error.fix.endswith(f"counted from 0: {name}=[0]")


@pytest.mark.parametrize(
    "constants",
    [
        *(3, 0, ["kSize"], {"k": "s"}, {"k": 1.5}, {"k": True}),
        *({"two words": 1}, {3: 3}, {"class": 3}),
    ],
    ids=repr,
)
def test_constants_are_named_integers(constants):
    error = refused(constants=constants)
    assert error.what == "constants= of device function copy are no named integers"
    assert error.got == repr(constants)
    assert error.fix == 'write constants={"kName": 3}'


@pytest.mark.parametrize("source", [3, None], ids=repr)
def test_a_source_is_a_path(source):
    error = refused(source=source)
    assert error.what == "the source of device function copy is no path"
    assert error.got == repr(source)
    assert error.fix == 'write source=Path(__file__).with_suffix(".cuh")'


@pytest.mark.parametrize("source", ["", "functions/not_yet.cuh", "/nowhere/copy.cuh"])
def test_a_source_need_not_exist_before_the_build(source):
    assert made(source=source).source == source


@pytest.mark.parametrize("body", [3, partial(copy, 3)], ids=["number", "partial"])
def test_a_device_function_is_made_of_a_function_with_a_name(body):
    with pytest.raises(GraphError) as caught:
        device_function(source="", reads=0, writes=0)(body)
    assert "@device_function(...) does not stand above" in caught.value.what
    assert caught.value.fix == "write @device_function(...) above a def"
