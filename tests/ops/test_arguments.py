"""Sizes of graphs, as users ask for them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from etc_dist.errors import ArgumentError
from etc_dist.ops.arguments import sizes_for
from etc_dist.ops.matmul_reduce_scatter import matmul_reduce_scatter_graph


def test_sizes_become_ints():
    sizes = {"tile_size": np.uint8(64), "piece": [np.uint8(16), 16]}
    found = sizes_for(matmul_reduce_scatter_graph, {}, sizes)
    assert found == {"tile_size": 64, "piece": (16, 16)}
    assert {type(n) for n in (found["tile_size"], *found["piece"])} == {int}


@pytest.mark.parametrize("size", [16, (16,), (16, 0), (16, 2.0), "16"])
def test_sizes_come_in_their_number(size):
    words = rf"of .*piece \(2 of them\)\n +got: +piece = {re.escape(repr(size))}\n"
    with pytest.raises(ArgumentError, match=words):
        sizes_for(matmul_reduce_scatter_graph, {"dtype": "bfloat16"}, {"piece": size})
