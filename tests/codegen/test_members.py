"""Members of generated structs."""

from __future__ import annotations

import pytest

from etc_dist.codegen.members import constant


@pytest.mark.parametrize(
    ("value", "text"),
    [(3, "int k = 3"), (-2, "int k = -2"), (1e-6, "float k = 1e-06f")],
)
def test_a_python_float_is_a_constant_of_fp32(value, text):
    assert constant("k", value) == text
