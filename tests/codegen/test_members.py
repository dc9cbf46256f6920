"""Members of generated structs."""

from __future__ import annotations

import re

import pytest

from etc_dist.codegen import generate
from etc_dist.codegen.members import constant
from etc_dist.layers.mlp_tiles import mlp_tiles_graph
from etc_dist.schedule import schedule_static


@pytest.mark.parametrize(
    ("value", "text"),
    [(3, "int k = 3"), (-2, "int k = -2"), (1e-6, "float k = 1e-06f")],
)
def test_a_python_float_is_a_constant_of_fp32(value, text):
    assert constant("k", value) == text


def test_each_call_has_its_own_values():
    text = generate(schedule_static(mlp_tiles_graph(1))).text
    for name in ("gate_up", "down"):
        assert re.search(
            rf"i32 number_packed_tile\(.*\) \{{\s*return g.dim_{name}_tile;", text
        )
