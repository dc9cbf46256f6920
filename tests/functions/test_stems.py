"""Each device function has its files under one name."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("__init__", "philox", "plain_numbers", "routing", "weight_layouts")
"""Files that have parts of functions."""
NAMES = sorted(
    path.stem
    for path in (ROOT / "etc_dist" / "functions").glob("*.py")
    if path.stem not in PARTS
)


@pytest.mark.parametrize("name", NAMES)
def test_python_cuda_and_test_files_share_a_name(name):
    assert (ROOT / "kernels" / "functions" / f"{name}.cuh").is_file()
    assert (ROOT / "tests" / "functions" / f"test_{name}.py").is_file()
