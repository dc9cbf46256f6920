"""Dense matrix multiplication."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.errors import GraphError
from etc_dist.functions.matmul import matmul_store

X = np.array([[1, 2], [0, -1]], np.float32)
W = np.array([[3, 1], [0, 2], [1, 0]], np.float32)


@pytest.mark.parametrize(("layout", "w"), [("nk", W), ("kn", W.T)])
def test_both_layouts_give_x_times_w_transposed(layout, w):
    y = np.empty((2, 3), np.float32)
    matmul_store(layout, "float16").body(X, w, y)
    assert y.tolist() == [[5, 4, 1], [-1, -2, 0]]


@pytest.mark.parametrize("options", [("NK", "bfloat16"), ("nk", "int32")])
def test_options_that_do_not_fit_are_refused(options):
    with pytest.raises(GraphError, match=r"(w_layout|dtype) of matmul_store\(\)"):
        matmul_store(*options)
