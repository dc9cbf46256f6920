"""Operations on tensors of torch, on the CPU backend."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import etc_dist
from etc_dist import MatmulReduceScatter
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.settings import Settings
from tests.ops.tensors import LIBRARIES, Tensor

pytestmark = pytest.mark.mpi(ranks=[1])


@pytest.fixture
def op():
    world = etc_dist.start(Settings(backend="cpu"))
    yield MatmulReduceScatter(world=world)
    world.close()


def ones(rows: int):
    return np.ones((rows, 16), numpy_dtype("bfloat16"))


@pytest.mark.parametrize(
    "library", ["stand-in", pytest.param("torch", marks=pytest.mark.torch)]
)
def test_each_call_returns_a_new_output(library, op):
    as_tensor, values = LIBRARIES[library]
    w, size = ones(8), op.world.size
    x, weights = as_tensor(ones(4 * size)), as_tensor(w)
    first = op(x, weights)
    w *= 3
    second = op(x, weights)
    assert (values(first) == 16 * size).all()
    assert (values(second) == 48 * size).all()


def test_a_repeated_call_fills_the_output_that_is_given(op):
    x, w = Tensor(ones(4 * op.world.size)), Tensor(ones(8))
    out = x.new_empty((4, 8))
    for factor in (1, 2):
        w.array *= factor
        assert op(x, w, out) is out
        assert (out.array == 16 * op.world.size * factor).all()


def test_a_transposed_view_of_the_same_memory_is_another_call(op):
    x = Tensor(ones(16 * op.world.size))
    w = np.arange(256).reshape(16, 16) // 5 % 2
    w = w.astype(numpy_dtype("bfloat16"))
    for _ in range(2):
        for view in (w, w.T):
            expected = op.world.size * view.astype(np.float32).sum(axis=1)
            y = op(x, Tensor(view)).array.astype(np.float32)
            np.testing.assert_array_equal(y, np.broadcast_to(expected, y.shape))


def test_remembered_calls_keep_no_tensor_alive(op):
    w = Tensor(ones(8))
    alive = [weakref.ref(op(Tensor(ones(4 * op.world.size)), w)) for _ in range(3)]
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3
