"""The command etc-dist explain: the way of a call, from the code itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from etc_dist import cli, matmul_reduce_scatter
from etc_dist.explain import Calls, explain
from etc_dist.runtime.cpu.executor import CpuExecutor
from etc_dist.settings import Settings
from etc_dist.world import start, startup

ROOT = Path(__file__).parent.parent
WAY = [
    "ops/functional.py matmul_reduce_scatter",
    "ops/operation.py Operation.call",
    "ops/matmul_reduce_scatter.py returned_matmul_graph",
    "schedule/static.py schedule_static",
    "codegen/cuda.py generate",
    "verify/verify.py verify",
    "ops/functional.py matmul_reduce_scatter",
    "program.py Program.launch",
    "runtime/cpu/executor.py CpuExecutor.launch",
    "runtime/gpu.py GpuExecutor.launch",
    "worker/worker.cuh run_worker",
    "worker/tensor_lane.cuh TensorLane::compute",
    "functions/tile_matmul.cuh TileFamily::compute",
    "functions/rows_tile.cuh RowsTiles::multiply",
    "ptx/wgmma_columns.cuh wgmma_box",
]


@pytest.fixture(autouse=True)
def no_worlds(monkeypatch):
    """Let the operations run in the world that is started for them."""
    monkeypatch.setattr(startup, "_worlds", [])


def test_the_way_of_a_call_ends_at_the_tensor_cores(capsys):
    assert cli.main(["explain", "matmul_reduce_scatter"]) == 0
    output = capsys.readouterr().out
    steps = list(WAY)
    for place, line, function in re.findall(
        r"^  (\S+):(\d+) +([\w.:]+\w)", output, re.M
    ):
        definition = (ROOT / place).read_text().splitlines()[int(line) - 1 :][:2]
        name = re.split(r"\.|::", function)[-1]
        assert any(name in text for text in definition), function  # below a decorator
        if steps and steps[0] == f"{place.partition('/')[2]} {function}":
            steps.pop(0)
    assert steps == []
    later = output.partition("Later calls, which check NumPy arrays again:")[2]
    assert "Operation._run_new: Run a call that is not remembered" in later


def test_a_program_without_matmuls_ends_at_its_body():
    last = explain("all_reduce").splitlines()[-1]
    assert "kernels/functions/share_sum.cuh" in last and "share_sum::run" in last


def test_an_unknown_operation_is_refused(capsys):
    assert cli.main(["explain", "matmull"]) == 1
    assert "wanted: one of matmul_reduce_scatter, all_gather" in capsys.readouterr().err


@pytest.mark.torch
def test_a_later_call_crosses_few_functions_before_the_launch():
    import torch

    x, w = torch.ones(64, 64), torch.ones(64, 64)
    x, w = x.half(), w.half()
    calls = Calls()
    with start(Settings(backend="cpu")):
        out = matmul_reduce_scatter(x, w)
        matmul_reduce_scatter(x, w, out=out)
        with calls.observed():
            matmul_reduce_scatter(x, w, out=out)
    codes = [entry.code for entry in calls.entries]
    before = set(codes[: codes.index(CpuExecutor.launch.__code__)])
    assert len(before) <= 24
    assert len({code.co_filename for code in before}) <= 11
