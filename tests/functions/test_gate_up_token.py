"""The first GEMV of one token."""

from __future__ import annotations

import numpy as np

from etc_dist.functions.gate_up_token import gate_up_token
from etc_dist.functions.router import Router
from etc_dist.functions.routing import Routing
from etc_dist.functions.weight_layouts import silu


def test_activations_are_those_of_the_tokens_experts():
    gate = np.array([1, 2, 3, 4], np.float32)[:, None, None]  # of four experts
    x, logits = np.array([[1]], np.float32), np.array([[0, 1, 0, 2]], np.float32)
    active = np.empty((1, 2, 1), np.float32)
    body = gate_up_token(Routing(4, Router(2), "float32")).body
    body(x, logits, gate, -gate, gate, active)
    np.testing.assert_allclose(active[0, :, 0], silu(np.array([4.0, 2.0])) * [-4, -2])
