"""CUDA bodies that read and write float8."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

import etc_dist
from etc_dist.emulate import Emulator
from etc_dist.functions.epilogue import E4M3
from etc_dist.ir import device_function
from etc_dist.runtime.cpu import simulate
from tests.graphs.calls import one_call


@device_function(source=Path(__file__).with_name("float8.cuh"), reads=1, writes=2)
def halve(x, y, z):
    y[...] = x.astype(np.float32) / 2
    z[...] = y


HALVES = one_call(1, halve, [f"x n {E4M3}"], ["y n float32", f"z n {E4M3}"])


def test_each_number_of_float8_is_read_and_written():
    program = Emulator(HALVES)
    # NOTE: without 0xff, the NaN of elements that are not written.
    x = np.array([*range(255), 0], np.uint8).view(ml_dtypes.float8_e4m3fn)
    [found] = program.run([{"x": x}])
    (cpu,) = simulate(program.plan, [{"x": x}], {"n": 256}).outputs
    for name, bits in (("y", np.uint32), ("z", np.uint8)):
        numbers = ~np.isnan(cpu[name])
        assert numbers.sum() == 255
        expected, got = (a[name].view(bits)[numbers] for a in (cpu, found))
        np.testing.assert_array_equal(got, expected)
        assert np.isnan(found[name][~numbers].astype(np.float32)).all()


def test_a_body_of_float8_compiles():
    assert "spills     0 bytes" in etc_dist.build(HALVES).show()
