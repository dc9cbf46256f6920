"""The markers of tests: deselected, skipped and refused tests."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import check_marks, runs_here

ROOT = Path(__file__).parents[2]
MARKERS = ("gpu", "gpu(devices=2)", "exhaustive", "mpi(ranks=[4])")
TESTS = "import pytest\n" + "".join(
    f"@pytest.mark.{marker}\ndef test_{number}(): pass\n"
    for number, marker in enumerate(MARKERS)
)


@pytest.mark.parametrize(
    ("options", "gpus", "words"),
    [
        (
            [],
            0,
            [
                "left out, there is no GPU: 2 tests",
                "left out, for other numbers of ranks: 1 tests",
                "left out, for --all only: 1",
            ],
        ),
        (["--all"], 1, ["needs 2 GPUs, and 1 can be used", "2 passed, 1 skipped"]),
        pytest.param(["--all"], 2, ["3 passed"], marks=pytest.mark.exhaustive),
    ],
)
def test_marked_tests_run_where_they_can(options, gpus, words, tmp_path):
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_marked.py").write_text(TESTS)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nfor i in $(seq {gpus}); do echo GPU $i; done\n")
    smi.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for name in ("CUDA_VISIBLE_DEVICES", "ETC_DIST_BACKEND", "LAUNCH_OUTCOMES"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml")]
    process = subprocess.run(
        [*command, "-p", "no:cacheprovider", str(tmp_path), *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert all(part in process.stdout for part in words), (
        process.stdout + process.stderr
    )


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        (pytest.mark.gpu(device=2), "the gpu marker takes devices= only, not device"),
        (pytest.mark.gpu(2), "the gpu marker takes devices= only, not 2"),
        (pytest.mark.mpi(size=2), "the mpi marker takes ranks= only, not size"),
        (pytest.mark.mpi(ranks=[2, 3]), r"ranks= takes .* of 1, 2, 4, not \[2, 3\]"),
        (pytest.mark.exhaustive(2), "the exhaustive marker takes nothing, not 2"),
    ],
)
def test_a_marker_with_an_unknown_argument_is_refused(mark, words):
    item = SimpleNamespace(
        nodeid="test",
        iter_markers=lambda name: [mark.mark] * (name == mark.name),
        get_closest_marker=lambda name: mark.mark if name == mark.name else None,
    )
    with pytest.raises(pytest.UsageError, match=words):
        check_marks(item)


@pytest.mark.parametrize(
    ("numbers", "sizes", "sizes_of_all"),
    [
        ([], [2, 3, 8], [1, 2, 3, 4, 8]),
        ([1], [1, 3, 8], [1, 2, 3, 4, 8]),
        ([2], [2, 3, 8], [2, 3, 4, 8]),
        ([2, 4], [2, 3, 4, 8], [2, 3, 4, 8]),
        ([4], [4, 8], [4, 8]),
    ],
)
def test_a_test_runs_on_the_numbers_of_ranks_that_it_names(
    numbers, sizes, sizes_of_all
):
    """Every number that no test may name takes all tests that can run on it."""
    for is_all, expected in ((False, sizes), (True, sizes_of_all)):
        assert [n for n in (1, 2, 3, 4, 8) if runs_here(numbers, n, is_all)] == expected
