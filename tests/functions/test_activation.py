"""The activations of experts in NumPy; tests/layers/test_moe.py runs the CUDA half."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.errors import ArgumentError
from etc_dist.functions.activation import Activation
from etc_dist.functions.router import Router
from etc_dist.ops.all_reduce_norm import checked_eps


def test_gate_and_up_are_clamped_and_shifted():
    activation = Activation(alpha=1.702, limit=7.0, shift=1.0)
    gate, up = np.array([9, -9, 1, np.nan]), np.array([9, -9, 2, 1])
    y = activation.apply(gate.astype(np.float32), up.astype(np.float32))
    gate, up = np.array([7, -9, 1, np.nan]), np.array([7, -7, 2, 1])
    reference = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    np.testing.assert_allclose(y, reference, rtol=1e-6)


def test_gelu_is_approximated_by_tanh():
    gate, up = np.array([-2, 0.5, 90], np.float32), np.array([1, 2, 3], np.float32)
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    y = Activation("gelu_tanh").apply(gate, up)
    np.testing.assert_allclose(y, gate * (1 + np.tanh(inner)) / 2 * up, rtol=1e-4)


def test_equal_activations_have_one_text():
    activation = Activation(alpha=np.float32(2), limit=np.int64(7))
    assert repr(activation) == repr(Activation(alpha=2, limit=7.0))


@pytest.mark.parametrize(
    ("activation", "words"),
    [
        (Activation("relu"), "unknown function"),
        (Activation(limit=-1.0), "limit: a finite number from 0 on"),
        (Activation(limit=10**400), "limit: a finite number from 0 on"),
        (Activation(alpha=float("inf")), "alpha: a finite number from 0 on"),
        (Activation("gelu_tanh", alpha=2.0), "alpha = 1 for gelu_tanh"),
    ],
)
def test_other_activations_are_refused(activation, words):
    with pytest.raises(ArgumentError, match=words):
        activation.check()


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("alpha", lambda number: Activation(alpha=number).check()),
        ("scale", lambda number: Router(1, scale=number).check(8)),
        ("eps", checked_eps),
    ],
)
@pytest.mark.parametrize("number", [True, np.ones(1), "1"], ids=repr)
def test_a_number_of_another_type_is_refused(name, check, number):
    with pytest.raises(TypeError, match=f"{name} expects "):
        check(number)
