"""The driver's arguments for the encoding of tensor maps."""

from __future__ import annotations

from typing import Any

import pytest

from etc_dist.errors import ArgumentError, WorldError
from etc_dist.ir.function import TmaBox
from etc_dist.runtime import tensor_map


class Driver:
    """Keeps its arguments: number of axes, extents, pitches, sides."""

    def __init__(self, code: int = 0):
        self.code = code

    def cuTensorMapEncodeTiled(self, *arguments: Any) -> int:
        _, element, axes, _, extents, pitches, sides = arguments[:7]
        self.type = element.value
        self.axes = axes.value
        self.promotion = arguments[10].value
        # The innermost axis has no pitch.
        self.encoded = [*extents], [*pitches][: self.axes - 1], [*sides]
        return self.code


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(tensor_map, "_driver", lambda: driver)
    return driver


def encode(shape: tuple[int, ...], box: TmaBox) -> Any:
    return tensor_map.encode(1 << 20, shape, "bfloat16", 2, box)


def test_a_matrix_has_three_axes_and_a_stack_of_one(driver: Driver) -> None:
    assert encode((40, 64), TmaBox(16, 32)).size == tensor_map.MAP_BYTES
    assert driver.axes == 3
    assert driver.encoded == ([64, 40, 1], [128, 40 * 128], [32, 16, 1])


def test_float8_is_copied_as_bytes(driver: Driver) -> None:
    box = TmaBox(16, 128)
    tensor_map.encode(1 << 20, (40, 144), "float8_e4m3fn", 1, box)
    assert driver.type == 0
    assert driver.encoded == ([144, 40, 1], [144, 40 * 144], [128, 16, 1])


def test_l2_fetches_a_line_of_128_bytes_at_once(driver: Driver) -> None:
    encode((40, 64), TmaBox(16, 64))
    assert driver.promotion == 2


def test_the_axes_of_stacks_are_one(driver: Driver) -> None:
    encode((3, 5, 40, 64), TmaBox(16, 32))
    assert driver.encoded == ([64, 40, 15], [128, 40 * 128], [32, 16, 1])


@pytest.mark.parametrize("shape", [(0, 768), (3, 0, 768), (0, 16, 768)])
def test_a_tensor_without_elements_has_the_map_of_a_box(
    driver: Driver, shape: tuple[int, ...]
) -> None:
    encode(shape, TmaBox(16, 64))
    assert driver.encoded == ([64, 16, 1], [128, 16 * 128], [64, 16, 1])


def test_invalid_values_are_the_arrays_and_other_codes_the_drivers_fault(
    driver: Driver,
) -> None:
    driver.code = 1
    with pytest.raises(ArgumentError) as caught:
        encode((40, 60), TmaBox(16, 32))
    assert caught.value.got == "shape [40, 60] bfloat16"
    driver.code = 999
    with pytest.raises(WorldError) as failed:
        encode((40, 64), TmaBox(16, 32))
    assert failed.value.got == "error 999 of the CUDA driver"
