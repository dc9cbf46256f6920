"""The correctness check of each benchmark passes on the CPU backend, which measures
nothing, and finds wrong results."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from benchmarks import decoder, decoder_launches, run
from benchmarks.decoder import Decoder
from benchmarks.device import Device, open_device
from benchmarks.harness import SMALL
from benchmarks.protocol import failures
from benchmarks.records import read
from benchmarks.subjects import decode, soak
from benchmarks.tables import ACCURACY
from etc_dist.models import Model
from etc_dist.settings import Settings
from etc_dist.world import start
from tests.conftest import expect_cpu_ranks
from tests.world.jobs import run_on_hosts

SCRIPT = Path(run.__file__)


@contextmanager
def device_of_cpu() -> Iterator[Device]:
    with start(Settings.load({**os.environ, "ETC_DIST_BACKEND": "cpu"})) as world:
        yield open_device(world)


ONE, TWO = pytest.mark.mpi(ranks=[1]), pytest.mark.mpi(ranks=[2])


def run_subject(command: str, capfd: pytest.CaptureFixture[str]) -> str:
    """Run a benchmark in this process, on all ranks; what it printed."""
    code = run.main([*command.split(), "--cpu"])
    printed = capfd.readouterr()
    assert code == 0, printed.out + printed.err
    return printed.out


@pytest.mark.parametrize(
    ("ranks", "command"),
    [
        pytest.param(1, "matmul --layout kn", marks=ONE),
        pytest.param(1, "matmul_float8 --dtype float16", marks=ONE),
        pytest.param(1, "matmul_float8 --activations float8", marks=ONE),
        pytest.param(1, "random_matmul --seeds 1", marks=ONE),
        pytest.param(1, "random_mixture --seeds 1", marks=ONE),
        pytest.param(1, "mixture_float8 --seeds 1", marks=ONE),
        pytest.param(1, "mlp_float8 --seeds 1", marks=ONE),
        pytest.param(1, "random_decode --seeds 1 --steps 2", marks=ONE),
        pytest.param(
            1, "random_decode --seeds 1 --steps 2 --model small-sinks", marks=ONE
        ),
        pytest.param(1, "attention --models small,small-tied", marks=ONE),
        pytest.param(
            1, "prompt --models small-biases,small-experts,small-sinks", marks=ONE
        ),
        pytest.param(2, "prompt --models small-experts", marks=TWO),
        pytest.param(1, "prompt --context 130", marks=[ONE, pytest.mark.exhaustive]),
        pytest.param(1, "moe --tokens 1,50", marks=ONE),
        pytest.param(1, "moe --models small --tokens 40,50 --experts 5", marks=ONE),
        pytest.param(1, "soak --calls 4", marks=ONE),
        pytest.param(2, "soak --calls 20", marks=[TWO, pytest.mark.exhaustive]),
        pytest.param(1, "task_cost", marks=ONE),
        pytest.param(1, "serve", marks=ONE),
        pytest.param(1, "speculation --tokens 8", marks=ONE),
        pytest.param(
            1,
            "decode --models small-experts --batches 2 --context 4 --routing zipf "
            "--per-launch 2",
            marks=ONE,
        ),
        pytest.param(2, "matmul_reduce_scatter", marks=TWO),
        pytest.param(2, "all_gather_matmul", marks=TWO),
        pytest.param(2, "mlp --schedule dynamic", marks=TWO),
        pytest.param(2, "float8_all_gather --seeds 1", marks=TWO),
        pytest.param(2, "float8_reduce_scatter --seeds 1", marks=TWO),
        pytest.param(2, "random_mlp_ranks --seeds 1", marks=TWO),
        pytest.param(2, "all_reduce --seeds 1", marks=TWO),
        pytest.param(2, "all_reduce_norm --seeds 1", marks=TWO),
        pytest.param(2, "matmul_all_reduce --seeds 1", marks=TWO),
        pytest.param(2, "moe --parallel tensor", marks=[TWO, pytest.mark.exhaustive]),
        pytest.param(2, "moe --parallel expert --routing zipf", marks=TWO),
        pytest.param(
            2,
            "decode --models small-fp8 --batches 2 --context 4 --per-launch 2 --sample",
            marks=TWO,
        ),
        pytest.param(
            2,
            "decode --models small-experts --per-launch 2 --sample",
            marks=[TWO, pytest.mark.exhaustive],
        ),
        pytest.param(
            2,
            "decode --models small-biases,small-tied --batches 2",
            marks=[TWO, pytest.mark.exhaustive],
        ),
        pytest.param(2, "decode --models small-dense --batches 2", marks=TWO),
        pytest.param(1, "first_token", marks=[ONE, pytest.mark.exhaustive]),
    ],
)
def test_results_are_checked_and_nothing_is_measured(
    ranks: int,
    command: str,
    world: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    expect_cpu_ranks(world, ranks)
    path = tmp_path / "some.jsonl"
    printed = run_subject(f"{command} --record {path}", capfd)
    assert ("checks results and measures nothing" in printed) == (world.rank == 0)
    assert "_ms" not in printed
    if "--experts 5" in command:
        assert printed.count("active_experts 5, routing 5 experts") == 2
    assert not path.exists()


def test_a_benchmark_is_a_script(tmp_path: Path) -> None:
    mpirun = [sys.executable, str(SCRIPT.parents[1] / "launch" / "mpirun"), "-n", "1"]
    command = [*mpirun, str(SCRIPT), "matmul", "--cpu"]
    process = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "bitwise_equal True" in process.stdout


@pytest.mark.exhaustive
def test_errors_of_float8_weights_are_recorded_without_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    assert (
        run.main(["float8_accuracy", "--outliers", "100", "--record", str(path)]) == 0
    )
    _, record, _ = read(path)
    assert 0 < record.error < 1.1 * record.bf16_error < record.codes_error
    [row] = ACCURACY.rows([record])
    assert row["outliers"] == "x 100"


def test_the_cost_of_a_step_is_measured_without_a_gpu(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run_subject("step_cost --rows 8", capfd).count("host_us") == 1


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({}, []),
        ({"error": 4e-3}, ["error 4.00e-03, wanted 3.0e-03"]),
        ({"error": float("nan")}, ["error nan, wanted 3.0e-03"]),
        ({"baseline_error": 7e-3}, ["baseline_error 7.00e-03, wanted 6.0e-03"]),
        ({"bitwise_equal": False}, ["the bits of three runs differ"]),
    ],
)
def test_wrong_results_are_failures(changes: dict[str, Any], texts: list[str]) -> None:
    case: Any = SimpleNamespace(dtype="bfloat16", leeway=1.0, baseline_leeway=2.0)
    values = {"error": 2e-3, "baseline_error": 5e-3, "bitwise_equal": True, **changes}
    assert failures(values, case) == texts


@pytest.mark.parametrize(("value", "flag"), [(1.0, 0), (2.0, 1)])
def test_soak_marks_a_call_whose_bits_differ(value: float, flag: int) -> None:
    device, out = Device(cast(Any, None)), np.zeros(4, np.float16)
    case = object.__new__(soak.Case)
    case.workload, case.refresh = cast(Any, SimpleNamespace(device=device)), None
    case.out, case.first = out, np.ones(4, np.float16)
    case.calls = [lambda: out.fill(value)]
    flags = np.zeros(1, np.int8)
    case.run(0, flags, 0)
    assert flags[0] == flag


def test_steps_of_other_bits_or_without_a_result_are_counted() -> None:
    alone = cast(Any, SimpleNamespace(gather=lambda own_value: [own_value]))
    device, out = Device(alone), np.ones(4, np.float16)
    results = iter([1.0, 2.0, None, 1.0])

    def step() -> None:
        if (value := next(results)) is not None:
            out.fill(value)

    assert decode.mismatches(device, step, [out], 4) == 2


def choose_the_worst_expert(arrays: dict[str, Any]) -> None:
    experts = arrays["experts"]
    experts[0, 0, 0] = next(n for n in range(16) if n not in experts[0, 0])


@pytest.mark.parametrize(
    ("model", "change", "text"),
    [
        (SMALL, lambda a: a["logits"].fill(0), "error 1.00e+00, wanted 1.6e-02"),
        (SMALL, lambda a: a["next_ids"].fill(1), "an id is not that of the largest"),
        (SMALL, lambda a: a["next_ids"].fill(-1), "an id whose logit is "),
        ("small-experts", choose_the_worst_expert, "an expert whose logit"),
        ("small-biases", lambda a: a["qkv_bias"].fill(0), "error "),
        ("small-sinks", lambda a: a["sinks"].fill(0), "error "),
        ("small-dense", lambda a: a["w_shared_down"].fill(0), "error "),
        ("small-dense", lambda a: a["w_dense_up"].fill(0), "error "),
        ("small-dense", lambda a: a["correction"].fill(0), "an expert whose logit"),
        ("small-sinks", lambda a: a["o_bias"].fill(0), "error "),
        ("small-sinks", lambda a: a["down_bias"].fill(0), "error "),
    ],
)
def test_wrong_results_of_a_step_are_failures(
    model: str,
    change: Callable[[dict[str, Any]], None],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with device_of_cpu() as device:
        step = Decoder(device, model, 2, 70, "static")
        run_program = step.program.run

        def changed(**arguments: Any) -> None:
            run_program(**arguments)
            change(arguments)

        monkeypatch.setattr(step.program, "run", changed)
        _, wrong = decode.check(step, 2)
        assert any(line.startswith(text) for line in wrong)


@pytest.mark.parametrize(
    "model", [SMALL, "small-experts", "small-tied", "small-biases", "small-dense"]
)
def test_requests_of_a_step_may_have_lengths_of_their_own(model: str) -> None:
    lengths = [5, 130, 64, 65, 1]  # of 6 rows, the last one is padding
    with device_of_cpu() as device:
        step = Decoder(device, model, 5, 130, "static", lengths=lengths)
        arrays = step.arrays(5, step.config.layers)
        assert arrays["position"].tolist() == [4, 129, 63, 64, 0, -1]
        assert len(step.cache[0]) == 1 + 3 + 1 + 2 + 1
        _, wrong = decode.check(step, 5)
        assert wrong == []
        step.lengths[0] += 1  # a longer row has another result
        arrays = step.arrays(5, step.config.layers)
        row = step.bytes_read(arrays, 5) - step.bytes_read(arrays, 1)
        assert row == 3 * 2 * 12 * 64 * 2 * (130 + 64 + 65 + 1)


def test_the_error_of_a_step_may_grow_with_its_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deep = replace(decoder.SMALL_MODELS[SMALL], layers=16)
    monkeypatch.setitem(decoder.SMALL_MODELS, SMALL, deep)
    with device_of_cpu() as device:
        step = Decoder(device, SMALL, 2, 20, "static")
        errors, wrong = decode.check(step, 2, 16)
        assert wrong == [] and errors["error"] > decode.ERROR


def test_differing_bits_and_growth_are_faults_of_a_soak() -> None:
    most = soak.HOST_TOLERANCE
    values = {"mismatches": 2, "growth_bytes": 1, "host_growth_bytes": most + 1}
    assert [fault.split()[0] for fault in soak.faults(values)] == ["2", "the", "a"]
    values = {"mismatches": 0, "growth_bytes": 0, "host_growth_bytes": most}
    assert soak.faults(values) == []


def test_other_ids_of_single_launches_are_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with device_of_cpu() as device:
        step = Decoder(device, SMALL, 2, 4, "static", steps=2)
        arrays = step.arrays(2, step.config.layers, step.steps)
        step.call(arrays)()
        _, wrong = decoder_launches.single_launches(step, arrays, 2)
        assert wrong == []
        arrays["next_ids"][1, 0] += 1
        _, wrong = decoder_launches.single_launches(step, arrays, 2)
        assert wrong == [decoder_launches.OTHER_IDS]
        steps = Model.steps

        def changed(model: Model, *arguments: Any, count: int, **options: Any) -> Any:
            return steps(model, *arguments, count=count, **options) + (count > 1)

        monkeypatch.setattr(Model, "steps", changed)
        _, wrong = decoder_launches.model_calls(step, 2, 1)
        assert wrong == [decoder_launches.OTHER_IDS + " of a model"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", ["predict", "soak --calls 20"])
def test_results_are_checked_over_two_hosts(command: str) -> None:
    source = (
        f"from benchmarks import run; exit(run.main({[*command.split(), '--cpu']}))"
    )
    code, output = run_on_hosts(source, 2)
    assert code == 0, output
    assert ("FAILED" not in output and "bitwise" in output) or "mismatches 0" in output
