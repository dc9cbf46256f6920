"""Runs are verified with the data that their index expressions loaded."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from etc_dist import Program
from etc_dist.codegen.names import address_name
from etc_dist.runtime import run_check
from etc_dist.runtime.gpu import GpuExecutor
from etc_dist.schedule import schedule_static
from etc_dist.verify.verify import verify
from tests.graphs.permute import inputs, permute
from tests.graphs.ragged import (
    attended,
    ragged_attention,
    scatter,
    scattered,
    sequences,
)
from tests.graphs.ring import ring
from tests.ops.arrays import Arrays

pytestmark = pytest.mark.mpi


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The data that runs are verified with, on rank 0."""
    checks: list[Any] = []

    def noted(plan: Any, dims: Any, workers: int, tensors: Any) -> Any:
        checks.append(tensors)
        return verify(plan, dims, workers, tensors)

    monkeypatch.setattr(run_check, "verify", noted)
    return checks


def run(program: Program, operands: dict[str, Any]) -> Any:
    arrays = Arrays(program.backend)
    y = program.run(**{name: arrays.put(array) for name, array in operands.items()})[
        "y"
    ]
    program.synchronize()
    return arrays.get(y)


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_a_correct_run_passes_with_other_data_on_each_rank(
    schedule, checked, make_program
):
    program = make_program(ragged_attention(checked.size), schedule=schedule)
    operands = sequences(checked.rank)
    np.testing.assert_array_equal(run(program, operands), attended(operands))


def test_data_of_every_rank_and_of_local_tensors_are_verified(
    checked, make_program, verified
):
    run(
        make_program(permute(checked.size)), inputs(np.roll([0, 2, 1, 1], checked.rank))
    )
    if checked.rank == 0:
        (tensors,) = verified
        assert set(tensors) == {"expert", "count", "first", "place"}
        assert [e.tolist() for e in tensors["expert"]] == [
            np.roll([0, 2, 1, 1], rank).tolist() for rank in range(checked.size)
        ]
        assert tensors["count"][0].tolist() == [1, 2, 1, 0]


def test_equal_data_are_verified_once(checked, make_program, verified):
    program = make_program(scatter(checked.size))
    for places in ([0, 1, 2, 3], [3, 2, 1, 0], [0, 1, 2, 3]):
        run(program, scattered(places))
    assert len(verified) == (2 if checked.rank == 0 else 0)


def test_data_that_differ_on_one_rank_only_are_verified(
    checked, make_program, verified
):
    program, last = make_program(scatter(checked.size)), checked.size - 1
    for places in ([0, 1, 2, 3], [3, 2, 1, 0]):
        run(program, scattered(places if checked.rank == last else [0, 1, 2, 3]))
    assert len(verified) == (2 if checked.rank == 0 else 0)


def test_a_program_without_loads_is_not_checked(checked, make_program, monkeypatch):
    program = make_program(ring(checked.size, num_expected=1))
    monkeypatch.setattr(program._executor, "loaded", None)
    x, count = np.ones((4, 8), np.float32), np.ones(4, np.int32)
    assert (run(program, {"x": x, "count": count}) == 1).all()
    assert "not proved" not in program.show()


@pytest.mark.parametrize(
    ("verify", "backend", "when"),
    [
        (1, "cpu", "checked after each run"),
        ("data", "cuda", "checked after each run"),
        (1, "cuda", "not checked"),
        (0, "cpu", "not checked"),
    ],
)
def test_a_program_shows_what_is_not_proved(
    verify, backend, when, world, make_program, monkeypatch
):
    program = make_program(scatter(world.size))
    monkeypatch.setattr(world, "settings", replace(world.settings, verify=verify))
    monkeypatch.setattr(world, "backend", backend)
    check = run_check.RunCheck(program.plan, world, program.workers)
    monkeypatch.setattr(program, "_run_check", check)
    assert program.show(rows=4).endswith(
        f"not proved, since it depends on run-time data; {when}\n"
        "  call move_row, y[place[i] +: 1, :] (loads from place)\n"
    )


@pytest.mark.parametrize(("verify", "lines"), [(1, 1), (0, 0)])
def test_a_program_whose_runs_are_not_checked_says_so_once(
    verify, lines, world, make_program, monkeypatch, capsys
):
    monkeypatch.setattr(world, "settings", replace(world.settings, verify=verify))
    run_check._warn.cache_clear()
    program = make_program(scatter(world.size))
    monkeypatch.setattr(program._run_check, "is_wanted", False)
    for _ in range(2):
        run(program, scattered([0, 1, 2, 3]))
    text = capsys.readouterr().err
    assert text.count(
        "etc_dist: calls: what depends on run-time data is not proved"
    ) == (lines if world.rank == 0 else 0)


def test_a_gpu_copies_what_was_loaded_from_the_addresses_of_the_launch(world):
    arrays = {"expert": np.array([2, 0], np.int32), "count": np.arange(4, dtype="i4")}
    block = np.zeros((), [(address_name(name), np.uint64) for name in arrays])
    for name, array in arrays.items():
        block[address_name(name)] = array.ctypes.data

    def memcpy(to: int, place: int, size: int, kind: int) -> None:
        ctypes.memmove(to, place, size)

    executor = GpuExecutor.__new__(GpuExecutor)
    executor.plan, executor.world = schedule_static(permute(world.size)), world
    runtime = SimpleNamespace(memcpy=memcpy, memcpyDeviceToHost=2)
    executor._cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    launch = SimpleNamespace(arguments=block, dims={"n": 2})
    copies = executor.loaded(launch, list(arrays))
    assert {name: array.tolist() for name, array in copies.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }
