"""Quantizing rows: both bodies against the rule, in fp64."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.quantize_rows import LEAST, ROWS, quantize_rows
from etc_dist.functions.scaled_weights import BLOCK, E4M3
from etc_dist.ir.function import TENSOR, TRANSFER
from etc_dist.ir.tensor import numpy_dtype
from tests.conftest import first_always
from tests.functions.both import both
from tests.functions.compiled import check_compiled
from tests.graphs.calls import Task, calls


def quantizes(dtype):
    """On both lanes."""
    x, blocks = f"x m/{ROWS} k {dtype}", f"m/{ROWS} k//{BLOCK}[:]"
    return calls(
        1,
        tasks=[
            Task(
                quantize_rows(dtype, lane),
                [x],
                [f"codes_{lane} m/{ROWS} k {E4M3}", f"scales_{lane} {blocks} float32"],
                name=f"on_{lane}",
            )
            for lane in (TRANSFER, TENSOR)
        ],
    )


@cache
def emulated(dtype):
    return Emulator(quantizes(dtype), workers=2)


def quantized(x):
    """Codes, in fp32, and scales, which both bodies compute to the same bits."""
    m, k = x.shape
    cpu, cuda = both(emulated(str(x.dtype)), {"x": x}, {"m": m, "k": k})
    codes, scales = (cpu[f"{name}_{TENSOR}"] for name in ("codes", "scales"))
    for outputs in cpu, cuda:
        for lane in TENSOR, TRANSFER:
            assert outputs[f"codes_{lane}"].tobytes() == codes.tobytes()
            assert outputs[f"scales_{lane}"].tobytes() == scales.tobytes()
    return codes.astype(np.float32), scales


# A part of a group; groups that one lane in a warp, or some of its loads, do not have.
@pytest.mark.parametrize(("m", "k"), [(1, 16), (9, 144), (17, 2320)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_groups_are_rounded_by_their_largest_element(dtype, m, k, rng):
    x = rng.standard_normal((m, k)) * np.exp2(rng.integers(-9, 9, (m, k)))
    x = x.astype(numpy_dtype(dtype))
    codes, scales = quantized(x)
    groups = range(0, k, BLOCK)
    wide = x.astype(np.float64)
    most = np.stack([np.abs(wide[:, k : k + BLOCK]).max(1) for k in groups], 1)
    np.testing.assert_array_equal(scales, most.astype(np.float32) / np.float32(448))
    scale = scales.astype(np.float64).repeat(BLOCK, 1)[:, :k]
    off = np.abs(codes * scale - wide)
    assert (off <= np.maximum(np.abs(wide) / 16, scale * 2**-10) * (1 + 1e-5)).all()
    assert np.abs(codes).max() == 448


def test_each_code_can_be_the_result():
    codes = np.arange(256, dtype=np.uint8).view(numpy_dtype(E4M3)).astype(np.float32)
    codes = codes[np.isfinite(codes)]
    x = np.full((2, BLOCK), 448, numpy_dtype("bfloat16"))
    x[:, : BLOCK - 1] = codes.reshape(2, -1)
    numbers, scales = quantized(x)
    assert (scales == 1).all()
    np.testing.assert_array_equal(numbers, x.astype(np.float32))


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, -(2.0**-130)])
def test_groups_of_zeros_and_of_tiny_numbers_have_the_least_scale(value):
    codes, scales = quantized(np.full((1, 272), value, numpy_dtype("bfloat16")))
    assert (codes == 0).all()
    assert (scales == np.float32(LEAST) / np.float32(448)).all()


def test_codes_of_numbers_that_are_not_finite_are_not_numbers():
    x = np.ones((2, 400), numpy_dtype("float16"))
    x[0, 5], x[0, 200], x[1, 399] = np.nan, np.inf, -np.inf
    codes, scales = quantized(x)
    places = np.zeros(x.shape, bool)
    places[0, 5] = places[0, 200] = places[1, 399] = True
    np.testing.assert_array_equal(np.isnan(codes), places)
    finite = np.float32(1) / np.float32(448)
    np.testing.assert_array_equal(
        scales, [[finite, np.inf, finite, finite], [finite, finite, finite, np.inf]]
    )
    assert (codes[0, 6:128] == 448).all() and (codes[0, 201:256] == 0).all()


@pytest.mark.parametrize("dtype", first_always([("bfloat16",), ("float16",)], 1))
def test_the_body_compiles(dtype):
    check_compiled(quantizes(dtype))
