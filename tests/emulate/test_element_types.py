"""CUDA bodies that read and write float8 and float16."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import etc_dist
from etc_dist.emulate import Emulator
from etc_dist.functions.epilogue import E4M3
from etc_dist.ir import device_function
from etc_dist.runtime.cpu import simulate
from tests.graphs.calls import one_call

HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
# NOTE: of each, one NaN that is not that of elements that are not written.
CODES = {
    E4M3: np.array([*range(255), 0], np.uint8).view(ml_dtypes.float8_e4m3fn),
    "float16": np.where(np.isnan(HALVES), np.float16("nan"), HALVES),
}


@device_function(source=Path(__file__).with_name("scale.cuh"), reads=1, writes=2)
def scale(x, y, z):
    y[...] = x.astype(np.float32) * np.float32(0.75)
    z[...] = y


def scaled(dtype):
    return one_call(1, scale, [f"x n {dtype}"], ["y n float32", f"z n {dtype}"])


@pytest.mark.parametrize("dtype", CODES)
def test_each_number_is_read_and_rounded(dtype):
    program, x = Emulator(scaled(dtype)), CODES[dtype]
    [outputs] = program.run([{"x": x}])
    (cpu,) = simulate(program.plan, [{"x": x}], {"n": len(x)}).outputs
    is_number = ~np.isnan(x.astype(np.float32))
    for name in "yz":
        expected, actual = (a[name][is_number].view(np.uint8) for a in (cpu, outputs))
        np.testing.assert_array_equal(actual, expected)
        assert np.isnan(outputs[name][~is_number].astype(np.float32)).all()


def test_a_body_of_float8_compiles():
    assert "spills     0 bytes" in etc_dist.build(scaled(E4M3)).show()
