"""The examples run as their first lines say, and their kernels compile."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16

import etc_dist
from etc_dist.emulate import Emulator
from etc_dist.errors import GraphError
from etc_dist.ops.tile_model import FAMILY
from etc_dist.runtime.cpu import simulate
from etc_dist.runtime.region_checks import refuse_empty
from etc_dist.schedule import schedule_static
from etc_dist.verify.verify import verify
from tests.conftest import expect_cpu_ranks
from tests.functions.compiled import check_compiled

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def graph(name: str, world_size: int, **options):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))[name](world_size, **options)


def launch(*command: str, ranks: int = 2, code: int = 0, cwd: Path = ROOT) -> str:
    """The output of an example on ranks of the CPU backend."""
    process = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "mpirun"), "-n", str(ranks), *command],
        env=os.environ | {"ETC_DIST_BACKEND": "cpu", "PYTHONPATH": str(ROOT)},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert process.returncode == code, process.stdout
    return " ".join(process.stdout.replace("[rank 0]", "").split())


def test_demo_reports_errors_proofs_and_timelines(tmp_path):
    (tmp_path / "demo-output").touch()  # so that the report goes to another folder
    output = launch(str(EXAMPLES / "demo.py"), cwd=tmp_path)
    assert "nothing can be written to demo-output: File exists." in output
    folder = Path(re.search(r"The pictures will be in (\S+)\.", output)[1])
    assert "backend cpu" in output and "Warning" not in output
    assert output.count(" same ") == 2
    assert output.count("proved free of deadlocks") == 2
    assert output.count("What to see: ") == 2
    assert re.search(r"\d+ of \d+ transfers on rank 0 begin before its last", output)
    for name in ("matmul_reduce_scatter", "all_gather_matmul"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        slices = json.loads((folder / f"{name}.json").read_text())["traceEvents"]
        assert {e["pid"] for e in slices} == {0, 1}
    shutil.rmtree(folder)


def test_demo_refuses_an_output_folder_before_it_runs(tmp_path):
    (tmp_path / "file").touch()
    options = ["--output", str(tmp_path / "file" / "folder")]
    output = launch(str(EXAMPLES / "demo.py"), *options, code=1)
    assert "folder: Not a directory. To do: name another folder by --output" in output
    assert "Traceback" not in output
    assert "GEMM" not in output


RANKS = {1: pytest.mark.mpi(ranks=[1]), 2: pytest.mark.mpi(ranks=[2])}
RESULTS = [
    (2, "add_row_sum", "y equals a + b on every rank: True"),
    (2, "ring_all_gather", "y holds the rows of all ranks, on every rank: True"),
    (2, "bin_sums", "total holds the sums of all bins, on every rank: True"),
    (2, "norm_matmul", "largest error against fp32: 2."),
    (1, "matmul_bias_gelu", "error against fp32: 1."),
    (1, "matmul_fp8", "largest error: 0.0"),
    (2, "split_k", "largest error against fp32: 1."),
    (2, "mlp", "inner 512 on each rank 11 calls in one kernel error against fp32: "),
    (1, "moe", "per expert 9 calls in one kernel error against fp32: "),
    (2, "moe", "per expert 12 calls in one kernel error against fp32: "),
]


@pytest.mark.parametrize(
    ("ranks", "name", "words"),
    [pytest.param(*case, marks=RANKS[case[0]]) for case in RESULTS],
)
def test_example_reports_its_result(ranks, name, words, world, monkeypatch, capfd):
    expect_cpu_ranks(world, ranks)
    monkeypatch.setenv("ETC_DIST_BACKEND", "cpu")
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = " ".join(capfd.readouterr().out.split())
    assert (words in printed) == (world.rank == 0), printed


@pytest.mark.parametrize("rows", [4, 64, 128, 328])
def test_add_row_sum_is_proved_at_partial_tiles(rows):
    plan = schedule_static(graph("add_row_sum", 2))
    assert verify(plan, {"rows": rows, "n": 200}, 132).events == -(-rows // 128) * 2


@pytest.mark.parametrize("rows", [1, 16, 256, 300])
def test_norm_matmul_is_proved_at_partial_tiles(rows):
    plan = schedule_static(graph("norm_matmul", 2))
    dims = {"rows": rows, "n": 200, "k": 64}
    assert verify(plan, dims, 132).events == -(-rows // 128) * 2


@pytest.mark.parametrize("k", [8, 600, 1032])
@pytest.mark.parametrize("slices", [1, 3, 40])
def test_split_k_is_proved_without_empty_slices(k, slices):
    plan = schedule_static(graph("split_k", 1))
    dims = {"m": 70, "n": 72, "k": k, "slices": slices}
    refuse_empty(plan.graph, plan.graph.environment(dims, 0))
    parts = min(slices, -(-k // 64))
    verified = verify(plan, dims, 4)
    assert verified.events == 4 and verified.tasks <= 4 * (1 + parts)


@pytest.mark.parametrize("slices", [1, 3])
def test_split_k_adds_its_slices(slices):
    function, rng = graph("split_k", 1), np.random.default_rng(1)
    shapes = {"x": (20, 328), "w": (72, 328)}
    arrays = {n: rng.integers(-2, 3, s).astype(bfloat16) for n, s in shapes.items()}
    dims = {"m": 20, "n": 72, "k": 328, "slices": slices}
    cpu = simulate(schedule_static(function), [arrays], dims).outputs[0]["y"]
    (emulated,) = Emulator(function, workers=4).run([arrays], dims)
    x, w = (array.astype(np.float32) for array in arrays.values())
    for y in (cpu, emulated["y"]):
        np.testing.assert_array_equal(y, (x @ w.T).astype(bfloat16))


def test_cuda_body_of_norm_matmul_fits_its_numpy_body():
    function = graph("norm_matmul", 1)
    rng = np.random.default_rng(1)
    x, gain, w = (rng.integers(-4, 5, s) for s in ((20, 72), (72,), (40, 72)))
    arrays = {"x": x, "gain": gain, "w": w}
    inputs = [{name: a.astype(bfloat16) for name, a in arrays.items()}]
    cpu = simulate(schedule_static(function), inputs, {"rows": 20, "n": 40, "k": 72})
    (emulated,) = Emulator(function).run(inputs)
    reference, y = (o["y"].astype(np.float32) for o in (cpu.outputs[0], emulated))
    np.testing.assert_allclose(y, reference, rtol=0, atol=abs(reference).max() / 100)


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_ring_all_gather_is_proved(world_size):
    plan = schedule_static(graph("ring_all_gather", world_size))
    events = 7 * (world_size - 1) * world_size
    assert verify(plan, {"rows": 100, "n": 8}, 132).events == events


KEYS = np.array([3, 1, 3, 3, 1, 5], np.int32)
BINS = {
    "keys": KEYS,
    "counts": np.array([0, 2, 0, 3, 0, 1], np.int32),
    "starts": np.array([0, 0, 2, 2, 5, 5], np.int32),
    "place": np.array([2, 0, 3, 4, 1, 5], np.int32),
}


def test_bin_sums_is_proved_for_given_keys():
    plan = schedule_static(graph("bin_sums", 1))
    dims = {"rows": 6, "bins": 6, "n": 8}
    assert verify(plan, dims, 4).unchecked != ()
    tensors = {name: [values] for name, values in BINS.items()}
    assert verify(plan, dims, 4, tensors=tensors).unchecked == ()


def test_rows_that_a_bin_does_not_expect_are_found():
    plan = schedule_static(graph("bin_sums", 1))
    counts = BINS["counts"] + np.array([0, 0, 1, -1, 0, 0], np.int32)
    tensors = {name: [values] for name, values in {**BINS, "counts": counts}.items()}
    with pytest.raises(GraphError) as caught:
        verify(plan, {"rows": 6, "bins": 6, "n": 8}, 4, tensors=tensors)
    assert "filled[2] on rank 0; the wait can never be met" in caught.value.got
    assert "filled[3] on rank 0, which expects 2 notif" in caught.value.got


@pytest.mark.parametrize(
    ("name", "few"),
    [("matmul_bias_gelu", {"shapes": FAMILY[:1]}), ("matmul_fp8", {})],
    ids=["matmul_bias_gelu", "matmul_fp8"],
)
def test_epilogues_of_examples_fit_their_numpy_halves(name, few):
    function = graph(name, 1, **few)
    emulator = Emulator(function)
    for rows in (8, 152):
        check_epilogue(function, emulator, rows)


def check_epilogue(function, emulator, rows):
    dims = {"shape": 0, "column_groups": 8, "m": rows, "n": 336, "k": 72}
    dims = {dim.name: dims[dim.name] for dim in function.dims}
    rng = np.random.default_rng(rows)
    shapes = {"x": (rows, 72), "w": (336, 72), "bias": (336,)}
    names = {tensor.name for tensor in function.inputs()}
    arrays = {
        n: rng.standard_normal(s).astype(bfloat16)
        for n, s in shapes.items()
        if n in names
    }
    (cpu,) = simulate(schedule_static(function), [arrays], dims).outputs
    (emulated,) = emulator.run([arrays], dims)
    for n, array in cpu.items():
        reference, result = (a.astype(np.float32) for a in (array, emulated[n]))
        np.testing.assert_allclose(result, reference, rtol=0.13, atol=0.01)
        assert abs(result - reference).mean() < 1e-3 * abs(reference).mean()


@pytest.mark.parametrize(
    "name",
    [
        "add_row_sum",
        "bin_sums",
        pytest.param("matmul_bias_gelu", marks=pytest.mark.exhaustive),
        "matmul_fp8",
        "norm_matmul",
        "ring_all_gather",
        "split_k",
    ],
)
def test_kernel_compiles_without_spills(name):
    check_compiled(graph(name, 1 if "matmul_" in name else 2))


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
def test_bin_sums_fit_numpy(world, rng):
    program = etc_dist.compile(graph("bin_sums", world.size), world)
    for bins in (1, 40, 200):
        keys = rng.integers(0, bins, 100).astype(np.int32)
        x = rng.integers(-9, 10, (100, 12)).astype(np.float32)
        total = on_device(world, np.full((bins, 12), np.nan, np.float32))
        operands = {"x": on_device(world, x), "keys": on_device(world, keys)}
        program.run(**operands, total=total)
        program.synchronize()
        expected = np.zeros((bins, 12), np.float32)
        np.add.at(expected, keys, x)
        np.testing.assert_array_equal(on_host(total), expected)
    program.close()


@pytest.mark.mpi
def test_norm_matmul_fits_numpy(world, rng):
    program = etc_dist.compile(graph("norm_matmul", world.size), world)
    shapes = {"x": (300, 128), "gain": (128,), "w": (264, 128)}
    whole = {name: rng.integers(-4, 5, s) for name, s in shapes.items()}
    operands = {n: on_device(world, a.astype(bfloat16)) for n, a in whole.items()}
    y = program.run(**operands)["y"]
    program.synchronize()
    x, gain, w = whole.values()
    expected = x / np.sqrt((x * x).mean(axis=1, keepdims=True)) * gain @ w.T
    error = np.linalg.norm(on_host(y) - expected) / np.linalg.norm(expected)
    assert error < 5e-3
    program.close()


@pytest.mark.mpi(ranks=[1, 4])
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
