"""Arrays and streams of all libraries."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from etc_dist.errors import ArgumentError
from etc_dist.runtime.arrays import (
    UNKNOWN,
    empty_like,
    identity,
    inspect,
    library_of,
    order_of,
)
from etc_dist.runtime.stream import stream_for


class Tensor:
    """The attributes of a torch tensor on GPU 3 that a call reads."""

    dtype, shape = "torch.bfloat16", (4, 8)
    device = SimpleNamespace(type="cuda", index=3)
    bytes, requires_grad = 64, False

    def data_ptr(self) -> int:
        return 4096

    def storage_offset(self) -> int:
        return 0

    def element_size(self) -> int:
        return 2

    def untyped_storage(self) -> SimpleNamespace:
        return SimpleNamespace(nbytes=lambda: self.bytes)

    def is_neg(self) -> bool:
        return False

    is_conj = is_neg

    def stride(self) -> tuple[int, int]:
        return (8, 1)

    def get_device(self) -> int:
        return 3


Tensor.__module__ = "torch"


class Parameter(Tensor):
    pass


def test_a_type_derived_from_a_library_s_counts_as_its_own():
    assert library_of(Tensor) == library_of(Parameter) == "torch"
    assert library_of(np.ndarray) == library_of(list) == ""


def test_equal_memory_and_layout_give_equal_identities():
    tensor, copy, transposed = Parameter(), Parameter(), Parameter()
    transposed.stride = lambda: (1, 4)
    assert identity(tensor) == identity(copy) != identity(transposed)
    assert identity(None) is None
    assert identity(np.zeros(2)) is UNKNOWN


def test_a_tensor_is_launched_on_torch_s_current_stream_of_its_gpu(
    monkeypatch: pytest.MonkeyPatch,
):
    current = {3: 1234}
    library = SimpleNamespace(_cuda_getCurrentRawStream=current.__getitem__)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(_C=library))
    # CuPy is not needed: streams are compared by their handles.
    monkeypatch.setattr("etc_dist.runtime.stream._from_handle", lambda handle: handle)
    assert stream_for("cuda", None, Parameter()) == 1234
    assert stream_for("cuda", 5678, Parameter()) == 5678
    assert stream_for("cuda", None, np.zeros(2)) is None
    assert stream_for("cpu", None, Parameter()) is None


@pytest.mark.parametrize(("backend", "stream"), [("cpu", 5), ("cuda", "abc")])
def test_only_streams_of_the_backend_are_accepted(backend, stream):
    with pytest.raises(ArgumentError, match="not a stream of this backend"):
        stream_for(backend, stream, np.zeros(2))


@pytest.mark.parametrize("shape", [(4, 8), (1, 8), (8, 1), (0, 8), (2, 4, 8), (5,)])
def test_order_is_that_of_the_strides(shape):
    array = np.zeros(shape, np.int16)
    wide = np.zeros((*shape[:-1], 2 * shape[-1]), np.int16)[..., ::2]
    is_plain = array.flags.f_contiguous
    assert inspect("x", array).order == "C"
    assert inspect("x", array.T).order == ("C" if is_plain else "F")
    assert order_of(shape, [step // 2 for step in array.strides]) == "C"
    if array.size > 1:
        assert inspect("x", wide).order == inspect("x", wide.T).order == ""


def test_order_of_a_tensor_comes_from_its_strides():
    x = Tensor()
    x.bytes = 128
    assert (inspect("x", x).order, inspect("x", x).device) == ("C", 3)
    for strides, order in ((1, 4), "F"), ((16, 1), ""):
        x.stride = lambda strides=strides: strides
        assert inspect("x", x).order == order


@pytest.mark.parametrize(
    ("attribute", "value", "text"),
    [
        ("bytes", 0, "a storage of 0 bytes"),
        ("bytes", 62, "of 62 bytes for elements that end at byte 64"),
        ("data_ptr", lambda: 0, "a storage of 64 bytes"),
        ("storage_offset", lambda: 1, "elements that end at byte 66"),
        ("is_neg", lambda: True, "a view whose negation"),
        ("device", SimpleNamespace(type="meta"), "on the device meta"),
    ],
)
def test_a_tensor_without_its_elements_is_refused(attribute, value, text):
    x = Tensor()
    setattr(x, attribute, value)
    with pytest.raises(ArgumentError, match=f"memory of x [^$]*{text}"):
        inspect("x", x)


def test_a_tensor_whose_gradient_would_be_lost_is_refused(monkeypatch):
    enabled = [True]
    torch = SimpleNamespace(is_grad_enabled=lambda: enabled[0])
    monkeypatch.setitem(sys.modules, "torch", torch)
    x = Tensor()
    before = identity(x)
    x.requires_grad = True
    assert identity(x) != before
    with pytest.raises(ArgumentError, match=r"x needs a gradient[^$]*etc_dist\.torch"):
        inspect("x", x)
    enabled[0] = False
    assert identity(x) == before
    assert inspect("x", x).owner is x


def test_a_masked_array_is_refused():
    masked = np.ma.array([1.0, 2.0], mask=[True, False])
    with pytest.raises(ArgumentError, match=r"x is a masked array[^$]*x\.filled"):
        inspect("x", masked)


def test_an_array_that_needs_cupy_is_refused_without_it(monkeypatch):
    class Other:
        def __dlpack__(self):
            raise AssertionError

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(TypeError, match="x expects .* where CuPy is not installed"):
        inspect("x", Other())


@pytest.mark.parametrize(("stream", "expected"), [(None, 7), (7, 7), (9, 9)])
def test_a_tensor_is_made_on_the_stream_of_its_use(stream, expected, monkeypatch):
    current = [7]

    @contextmanager
    def use(handle):
        current.append(handle)
        yield
        current.pop()

    torch = SimpleNamespace(
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda device: current[-1]),
        cuda=SimpleNamespace(ExternalStream=lambda ptr, device: ptr, stream=use),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(
        Tensor, "new_empty", lambda x, shape, dtype: current[-1], raising=False
    )
    stream_argument = None if stream is None else SimpleNamespace(ptr=stream)
    assert (empty_like(Tensor(), (4,), stream_argument), current) == (expected, [7])
