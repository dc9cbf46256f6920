"""The examples run as their first lines say, and their kernels compile."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import etc_dist
from etc_dist.codegen import generate
from etc_dist.runtime.build import compile_cubin, kernels_folder
from etc_dist.schedule import schedule_static
from etc_dist.schedule.verify import verify

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def graph(name: str, world_size: int):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))[name](world_size)


def launch(*command: str) -> str:
    """The words that an example prints on two ranks of the CPU backend."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "mpirun"), "-n", "2", *command],
        env=os.environ | {"ETC_DIST_BACKEND": "cpu", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
    return " ".join(done.stdout.replace("[rank 0]", "").split())


def test_demo_reports_errors_proofs_and_timelines(tmp_path):
    said = launch(str(EXAMPLES / "demo.py"), "--output", str(tmp_path))
    assert "backend cpu" in said
    assert said.count(" same ") == 2
    assert said.count("proved free of deadlocks") == 2
    for name in ("matmul_reduce_scatter", "all_gather_matmul"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        slices = json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"]
        assert {e["pid"] for e in slices} == {0, 1}


def test_add_row_sum_says_that_its_result_is_right():
    said = launch(str(EXAMPLES / "add_row_sum.py"))
    assert "y equals a + b on every rank: True" in said


def test_ring_all_gather_says_that_its_result_is_right():
    said = launch(str(EXAMPLES / "ring_all_gather.py"))
    assert "y holds the rows of all ranks, on every rank: True" in said


def test_mlp_compares_itself_with_fp32():
    said = launch(str(EXAMPLES / "mlp.py"))
    assert "96 rows, hidden 256, inner 512 on each rank 5 calls in one kernel" in said
    assert "error against fp32: " in said


@pytest.mark.parametrize("rows", [4, 64, 128, 328])
def test_add_row_sum_is_proved_at_partial_tiles(rows):
    plan = schedule_static(graph("add_row_sum", 2))
    assert verify(plan, {"rows": rows, "n": 200}, 132).events == -(-rows // 128) * 2


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_ring_all_gather_is_proved(world_size):
    plan = schedule_static(graph("ring_all_gather", world_size))
    events = 7 * (world_size - 1) * world_size
    assert verify(plan, {"rows": 100, "n": 8}, 132).events == events


@pytest.mark.parametrize("name", ["add_row_sum", "ring_all_gather"])
def test_kernel_compiles_without_spills(name):
    source = generate(schedule_static(graph(name, 2)))
    includes = [kernels_folder(), *(path.parent for path in source.sources)]
    cubin, log = compile_cubin(source.text, includes)
    assert cubin
    assert "0 bytes spill stores" in log


@pytest.mark.mpi
def test_add_row_sum_fits_numpy(world, rng):
    program = etc_dist.compile(graph("add_row_sum", world.size), world)
    a, b = (on_device(world, rng.random((200, 72), np.float32)) for _ in range(2))
    results = program.run(a=a, b=b)
    program.synchronize()
    np.testing.assert_array_equal(on_host(results["y"]), on_host(a) + on_host(b))
    np.testing.assert_allclose(on_host(results["total"]), on_host(a + b).sum(1), 1e-5)
    program.close()


@pytest.mark.mpi
def test_ring_all_gather_fits_numpy(world, rng):
    program = etc_dist.compile(graph("ring_all_gather", world.size), world)
    every = rng.random((world.size, 50, 12), np.float32)
    for _ in range(3):
        y = program.run(x=on_device(world, every[world.rank]))["y"]
        program.synchronize()
        np.testing.assert_array_equal(on_host(y), every.reshape(-1, 12))
    program.close()


def on_device(world, array):
    if world.backend == "cpu":
        return array
    import cupy

    return cupy.asarray(array)


def on_host(array):
    return array if isinstance(array, np.ndarray) else array.get()
