"""Sums over ranks by flagged words: both bodies, over runs in a row."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.errors import WaitTimeoutError
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_static
from tests.graphs.flagged import flagged_sum

COLUMNS = 8 * 300  # two vectors of a thread


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [
        (2, "float16"),
        (4, "bfloat16"),
        pytest.param(8, "bfloat16", marks=pytest.mark.exhaustive),
    ],
)
def test_parts_are_added_in_rank_order(ranks, dtype, rng):
    graph, dims = flagged_sum(ranks, dtype=dtype), {"vectors": COLUMNS // 8}
    emulator = Emulator(graph, workers=1)
    for seed in range(3):
        wide = rng.standard_normal((ranks, COLUMNS))
        xs = (wide * 2.0 ** rng.integers(-8, 8, wide.shape)).astype(numpy_dtype(dtype))
        total = np.zeros(COLUMNS, np.float32)
        for x in xs:
            total += x.astype(np.float32)
        arrays = [{"x": x} for x in xs]
        plan = schedule_static(graph)
        for outputs in (
            *simulate(plan, arrays, dims, seed=seed, epochs=3).outputs,
            *emulator.run(arrays, dims, seed=seed, runs=3),
        ):
            np.testing.assert_array_equal(outputs["y"], total.astype(xs.dtype))


def test_words_that_never_come_are_named(kernels_without_stores):
    graph = flagged_sum(2)
    program = Emulator(graph, workers=1, kernels=kernels_without_stores)
    arrays = [{"x": np.ones(COLUMNS, numpy_dtype("bfloat16"))}] * 2
    with pytest.raises(WaitTimeoutError) as caught:
        program.run(arrays, {"vectors": COLUMNS // 8})
    assert "add_flagged[0, 0] waits for arrived[0]: have 0, want 1" in str(caught.value)


@pytest.fixture
def kernels_without_stores(tmp_path):
    """The kernels, without the stores of flagged words."""
    import shutil

    from etc_dist.runtime.build import kernels_folder

    folder = tmp_path / "kernels"
    shutil.copytree(kernels_folder(), folder)
    path = folder / "event" / "flags.cuh"
    text = path.read_text()
    assert text.count("ptx::store_words(") == 2
    path.write_text(text.replace("ptx::store_words(", "if (false) ptx::store_words("))
    return folder
