"""Dense matrix multiplication."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.errors import GraphError
from etc_dist.functions.matmul import matmul_gated, matmul_store, silu
from etc_dist.ir import Graph, graph_function
from etc_dist.ir.tensor import numpy_dtype

X = np.array([[1, 2], [0, -1]], np.float32)
W = np.array([[3, 1], [0, 2], [1, 0]], np.float32)


@pytest.mark.parametrize(("layout", "w"), [("nk", W), ("kn", W.T)])
def test_both_layouts_give_x_times_w_transposed(layout, w):
    y = np.empty((2, 3), np.float32)
    matmul_store(layout, "float16").body(X, w, y)
    assert y.tolist() == [[5, 4, 1], [-1, -2, 0]]


def test_gated_results_are_silu_of_gate_times_up():
    y = np.empty((2, 3), np.float32)
    matmul_gated("float16").body(X, W, 2 * W, y)
    product = X @ W.T
    np.testing.assert_allclose(y, silu(product) * 2 * product)


@graph_function
def gated_tile(g: Graph) -> None:
    k = g.dims("k")
    x = g.input("x", (256, k), "bfloat16")
    gate, up = (g.input(name, (128, k), "bfloat16") for name in ("gate", "up"))
    y = g.output("y", (256, 128), "bfloat16")
    g.call(
        matmul_gated("bfloat16"),
        g.grid(one=1),
        reads=[x[:, :], gate[:, :], up[:, :]],
        writes=[y[:, :]],
    )


def test_the_cuda_body_is_right_for_any_two_neighbouring_gates(folder):
    """Which share a division. A row of x with a single 1 selects a column of gate."""
    gates = np.array([-1e30, -300, -90, -45, -20, -1, 0, 1, 20, 90, 300, 1e30])
    pairs = np.stack(np.meshgrid(gates, gates), axis=-1).reshape(-1, 2)
    k, columns = 72, 4  # all pairs, four columns of gate for each k
    gate = np.zeros((128, k), numpy_dtype("bfloat16"))
    gate[:columns] = pairs.reshape(k, columns).T
    x = np.zeros((256, k), gate.dtype)
    x[:k] = np.eye(k)
    given = {"x": x, "gate": gate, "up": np.ones_like(gate)}
    [found] = Emulator(gated_tile(1), folder=folder).run([given], {"k": k})
    exact = gate[:columns].T.astype(np.float64)
    wanted = exact / (1 + np.exp(np.minimum(-exact, 700)))
    got = found["y"][:k, :columns].astype(np.float64)
    np.testing.assert_allclose(got, wanted, rtol=2**-8, atol=1e-17)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("NK", "bfloat16"), GraphError),
        (("nk", "int32"), GraphError),
        (("nk", np.float32), TypeError),
    ],
)
def test_options_that_do_not_fit_are_refused(options, error):
    with pytest.raises(error, match=r"(w_layout|dtype) of matmul_store\(\)"):
        matmul_store(*options)
