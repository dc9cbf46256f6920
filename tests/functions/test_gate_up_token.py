"""The first GEMV of one token."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.functions.gate_up_token import gate_up_token
from etc_dist.functions.push_rows import push_rows
from etc_dist.functions.router import Router
from etc_dist.functions.routing import Routing
from etc_dist.functions.scaled_weights import E4M3, PER_BLOCK, PER_ROW, Scaling
from etc_dist.functions.weight_layouts import silu
from tests.functions.both import both
from tests.graphs.calls import Task, calls
from tests.graphs.scaled import draw_scaled_experts
from tests.layers.reference import draw


def test_activations_are_those_of_the_tokens_experts():
    gate = np.array([1, 2, 3, 4], np.float32)[:, None, None]  # of four experts
    x, logits = np.array([[1]], np.float32), np.array([[0, 1, 0, 2]], np.float32)
    active = np.empty((1, 2, 1), np.float32)
    body = gate_up_token(Routing(4, Router(2), "float32")).body
    body(x, logits, gate, -gate, gate, active)
    np.testing.assert_allclose(active[0, :, 0], silu(np.array([4.0, 2.0])) * [-4, -2])


@pytest.mark.parametrize(
    "scaling", [Scaling(PER_BLOCK, "bfloat16"), Scaling(PER_ROW, "float32")], ids=str
)
def test_gate_and_up_have_scales_of_one_matrix(scaling, rng):
    """Those of up begin within a block; the task has some of the columns."""
    inner, k, first, count = 208, 1296, 72, 64
    codes, scales, wide = draw_scaled_experts(rng, 3, 2 * inner, k, scaling)
    routing = Routing(3, Router(2), "bfloat16")
    tasks = [
        Task(push_rows(), ["given[:, :]"], ["logits[:, :]"], notifies=["done[0]"]),
        Task(
            gate_up_token(routing, scaling=scaling),
            [
                "x[:, :]",
                "logits[:, span(0, 3)]",
                f"gate_up[:, span({first}, {count}), :]",
                f"gate_up[:, span({inner + first}, {count}), :]",
                "down[:, span(0, 8), :]",
                "scales[:, :, :]",
            ],
            [f"active[:, :, span(0, {count})]"],
            waits=["done[0]"],
        ),
    ]
    graph = calls(
        1,
        tasks=tasks,
        dims="k inner r c",
        parts=f"""
            events done [1] expects 1
            input x [1, k] bfloat16
            input given [1, 4] float32
            local logits [1, 4] float32
            input gate_up [3, 2 * inner, k] {E4M3}
            input down [3, k, inner] {E4M3}
            input scales [3, r, c] {scaling.dtype}
            output active [1, 2, {count}] bfloat16
        """,
    )
    x = draw(rng, (1, k), "bfloat16")
    arrays = {
        "x": x,
        "given": np.array([[0, 2, 1, 0]], np.float32),
        "gate_up": codes,
        "down": np.zeros((3, k, inner), codes.dtype),
        "scales": scales,
    }
    dims = {"k": k, "inner": inner, "r": scales.shape[1], "c": scales.shape[2]}
    row = x[0].astype(np.float64)
    sums = (wide[[1, 2]] @ row).reshape(2, 2, inner)[:, :, first : first + count]
    expected = silu(sums[:, 0]) * sums[:, 1]
    for outputs in both(graph, arrays, dims):
        active = outputs["active"][0].astype(np.float64)
        np.testing.assert_allclose(active, expected, rtol=2**-7, atol=1e-3)
