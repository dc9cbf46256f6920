"""What the region of an operand may not be declared as."""

from __future__ import annotations

import pytest

from etc_dist.errors import GraphError
from etc_dist.ir import DeviceFunction, Operand


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "two words"], ids=repr)
def test_an_extent_is_a_number_a_name_or_none(size):
    with pytest.raises(GraphError) as caught:
        Operand((size,))
    assert caught.value.what == "an extent of an operand is not a size"
    assert caught.value.got == repr(size)


def test_the_dtype_of_an_operand_is_known():
    with pytest.raises(GraphError) as caught:
        Operand(dtype="float64")
    assert caught.value.got == "['float64']"


@pytest.mark.parametrize("tile", [{2: Operand()}, {0: (64,)}, [Operand()]], ids=repr)
def test_a_tile_describes_operands_by_position(tile):
    with pytest.raises(GraphError) as caught:
        DeviceFunction("f", print, "f.cuh", "tensor", 1, 1, tile=tile)
    assert caught.value.what == (
        "tile= of device function f does not describe its operands"
    )
    assert caught.value.wanted == "a dict from positions, 0 to 1, to Operand(...)"
