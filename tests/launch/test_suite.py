"""launch/suite.py: the sum of the runs, and outcomes that fail the suite."""

import sys
from pathlib import Path

import pytest

from launch import suite

Outcome = suite.Outcome
ONE, TWO = suite.Run("1 rank"), suite.Run("2 ranks", 2, "cuda")


def judge(*runs, gpus=0, fault=""):
    results = [
        suite.Result(run, outcomes, fault)
        for run, outcomes in zip((ONE, TWO), runs, strict=False)
    ]
    return suite.judge(results, gpus)


def test_counts_are_summed_over_runs():
    verdict = judge(
        (Outcome("a", "passed"), Outcome("b", "skipped")),
        (Outcome("a", "passed"), Outcome("b", "passed")),
    )
    assert verdict.line() == "3 passed, 0 failed, 1 skipped"


def test_failure_in_one_run_is_named_with_its_run():
    verdict = judge((Outcome("a", "passed"),), (Outcome("a", "failed"),))
    assert verdict.line() == "1 passed, 1 failed, 0 skipped"
    assert verdict.complaints == ("2 ranks: a failed",)


def test_test_that_every_run_skipped_is_a_failure():
    outcomes = (Outcome("a", "skipped", reason="no reason"),)
    verdict = judge(outcomes, outcomes)
    assert verdict.line() == "0 passed, 1 failed, 0 skipped"
    assert verdict.complaints == ("every run: a was skipped (no reason)",)


@pytest.mark.parametrize(
    ("gpus", "devices", "verdict"),
    [
        (1, 2, "0 passed, 0 failed, 2 skipped"),  # too few GPUs
        (2, 2, "0 passed, 1 failed, 0 skipped"),
        (8, 0, "0 passed, 1 failed, 0 skipped"),  # needs no GPU
    ],
)
def test_only_lack_of_gpus_excuses_a_skip(gpus, devices, verdict):
    outcomes = (Outcome("a", "skipped", devices=devices),)
    assert judge(outcomes, outcomes, gpus=gpus).line() == verdict


def test_a_whole_suite_without_exhaustive_tests_is_a_failure_of_all():
    results = [suite.Result(ONE, (Outcome("a", "passed", exhaustive=False),))]
    verdict = suite.judge(results, 0, needs_exhaustive=True)
    assert verdict.complaints == ("every run: --all selected no exhaustive test",)
    results = [suite.Result(ONE, (Outcome("a", "passed", exhaustive=True),))]
    assert suite.judge(results, 0, needs_exhaustive=True).failed == 0


def test_run_that_did_not_end_is_a_failure():
    verdict = judge((Outcome("a", "passed"),), fault="was ended after 9 s")
    assert verdict.line() == "1 passed, 1 failed, 0 skipped"
    assert verdict.complaints == ("1 rank: was ended after 9 s",)


@pytest.mark.parametrize(
    ("gpus", "cuda_ranks"),
    [(0, []), (1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (8, [1, 2, 4, 8])],
)
def test_plan_runs_on_one_on_two_on_four_and_on_all_gpus(gpus, cuda_ranks):
    runs = suite.plan(gpus, shared_ranks=())
    assert [r.ranks for r in runs if r.backend == "cuda"] == cuda_ranks
    assert [r.ranks for r in runs if r.backend != "cuda"] == (
        [0, 1, 2, 4] if gpus else [0, 2, 4]
    )


@pytest.mark.parametrize(
    ("gpus", "shared", "ranks"),
    [
        (0, "2,4", []),
        (1, "2,4", [2, 4]),
        (2, "2,4", [4]),
        (4, "2,4", []),
        (1, "8", [8]),
    ],
)
def test_ranks_share_gpus_where_there_are_fewer(gpus, shared, ranks):
    runs = suite.plan(gpus, suite.numbers(shared), "--mps")
    sharing = [run for run in runs if run.sharing]
    assert [run.ranks for run in sharing] == ranks
    for run in sharing:
        assert " --mps " in " ".join(run.command([]))
        assert run.environment(Path("x"))["ETC_DIST_BACKEND"] == "cuda"


def test_unfinished_test_counts_as_failed(tmp_path):
    path = tmp_path / "outcomes"
    path.write_text(
        '{"test": "a", "outcome": "failed"}\n'
        '{"test": "a", "outcome": "passed"}\n'
        '{"test": "b", "outcome": "failed", "reason": "it did not end"}\n'
    )
    outcomes = suite.read_outcomes(path)
    assert [(o.test, o.outcome) for o in outcomes] == [("a", "passed"), ("b", "failed")]


def test_processes_share_tests_of_up_to_one_rank_where_no_gpu_is(monkeypatch):
    monkeypatch.setattr(suite.os, "cpu_count", lambda: 3)
    shared, *_ = suite.plan(0)
    command = " ".join(shared.command([]))
    assert " -n 4 " in command and command.endswith(" --with-mpi")
    assert " -n 2 " in " ".join(suite.plan(0, workers=2)[0].command([]))
    alone, one_rank, *_ = suite.plan(2)
    assert "-n" not in alone.command([])
    assert alone.command([])[-2:] == ["-m", "not mpi"]
    assert "launch/mpirun -n 1 " in " ".join(one_rank.command([]))


IN_PARALLEL = """
import os, pathlib, sys, time
own, other = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
open(os.environ["LAUNCH_OUTCOMES"], "w").close()
own.touch()
while not other.exists():
    time.sleep(0.01)
print(own.name)
"""


def test_runs_of_ranks_go_on_beside_the_first_one(monkeypatch, capfd, tmp_path):
    """Each waits for the other one's file. The output of ranks comes last."""
    first, second = (str(tmp_path / name) for name in ("first", "second"))

    def command(run, *_):
        files = (second, first) if run.ranks else (first, second)
        return [sys.executable, "-c", IN_PARALLEL, *files]

    monkeypatch.setattr(suite.Run, "command", command)
    runs = [suite.Run("one process", workers=2), TWO]
    results = suite.execute_all(runs, [], 20.0, whole=False)
    assert [(result.run, result.fault) for result in results] == [(r, "") for r in runs]
    lines = capfd.readouterr().out.split("\n")
    assert lines == [
        *("", "=== one process ===", "first"),
        *("", "=== 2 ranks ===", "second", ""),
    ]


SLOW = """
import os, time
for test in range({tests}):
    time.sleep(0.7)
    with open(os.environ["LAUNCH_OUTCOMES"], "a") as file:
        file.write('{{"test": "%d", "outcome": "passed"}}\\n' % test)
time.sleep({rest})
"""


@pytest.mark.parametrize(
    ("tests", "end_time", "is_ended"), [(10, 0, False), (1, 60, True)]
)
def test_a_run_is_ended_where_no_test_ends_however_long_it_lasts(
    tests, end_time, is_ended, monkeypatch
):
    slow = [sys.executable, "-c", SLOW.format(tests=tests, rest=end_time)]
    monkeypatch.setattr(suite.Run, "command", lambda *_: slow)
    [result] = suite.execute_all([suite.Run("one process")], [], 6.0, whole=False)
    fault = "was ended, as no test had begun or ended for 6 s"
    assert result.fault == is_ended * fault
    assert len(result.outcomes) == tests


def test_skips_are_not_judged_where_a_run_did_not_end():
    verdict = judge((Outcome("a", "skipped"),), fault="was ended")
    assert verdict.complaints == ("1 rank: was ended",)
