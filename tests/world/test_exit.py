"""Output and exit codes of ranks that end differently."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import first_always
from tests.world.jobs import BEGIN, MPIRUN, run_job, run_on_hosts

START = """
world = start(CPU)
world.barrier()
"""
ALONE = """
del os.environ["LAUNCH_RANKS"]  # as under another launcher
"""


@pytest.mark.parametrize("end", ["sys.exit(0)", "time.sleep(30)"])
def test_ranks_whose_peer_does_not_start_mpi_end_with_an_error(end):
    source = f"""
Settings.world_limit = 1.0
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    {end}
start(CPU)
"""
    code, output = run_job(source, 2, "--grace", "0.2")
    assert code not in (0, 124)
    assert "[rank 0] WorldError: not all ranks called start" in output
    assert "start of the world, rank 0 of 2" in output


def test_a_start_without_a_limit_says_so_and_its_world_is_closed_in_silence():
    source = """
import subprocess

def refuse(*_, **options):
    raise OSError(12, "Cannot allocate memory")

popen, subprocess.Popen = subprocess.Popen, refuse
world = start(CPU)
subprocess.Popen = popen
world.barrier()
"""
    code, output = run_job(source, 2)
    assert code == 0
    for rank, line in enumerate(sorted(output.splitlines())):
        note = f"[rank {rank}] etc_dist: the start of rank {rank} waits for its peers"
        assert line.startswith(f"{note} without a limit")
        assert "Cannot allocate memory" in line


LATE = """
if world.rank == 1:
    time.sleep(1)
    raise ValueError("late")
"""
ALONE_CALL = """
if world.rank == 1:
    try:
        world.match_call(3, lambda: "one more")
    except ValueError:
        print("caught", flush=True)
"""
HANDLERS = """
import atexit
atexit.register(lambda: print("handler", flush=True))
atexit.unregister(world._close_at_exit)
atexit.register(world._close_at_exit)
if world.rank == 1:
    world.match_call(3, lambda: "one more")
"""
ENDED = {
    "a call that one rank makes alone, though it is caught": (
        ALONE_CALL,
        ["[rank 1] caught", "[rank 0] etc_dist.errors.ArgumentError: the ranks do not"],
    ),
    "a failure while peers are at their exit": (LATE, ["[rank 1] ValueError: late"]),
    "a failure after the world was closed": (
        "\nworld.close()" + LATE,
        ["[rank 1] ValueError: late"],
    ),
    "a world that cannot be closed, after other handlers": (
        HANDLERS,
        ["[rank 0] handler"],
    ),
}


@pytest.mark.parametrize("what", ENDED)
def test_all_ranks_end_with_the_error_of_one(what):
    source, words = ENDED[what]
    code, output = run_job(START + source)
    assert code == 1
    assert [part for part in words if part not in output] == []


@pytest.mark.parametrize("requested", [False, True])
def test_uncaught_exception_ends_all_ranks_where_it_is_requested(requested):
    source = f"""
world = start(CPU, abort_on_uncaught={requested})
if world.rank == 1:
    raise ValueError("of one rank")
world.barrier()
"""
    code, output = run_job(ALONE + source)
    assert code == 1
    assert "[rank 1] ValueError: of one rank" in output
    # Without the request each rank ends by its own error.
    assert ("rank 1: left the world: it ended with an error" in output) is not requested


def test_peers_name_the_rank_whose_with_block_an_exception_left():
    source = """
try:
    with start(CPU) as world:
        if world.rank == 1:
            raise ValueError("of one rank")
        world.barrier()
except (ValueError, WorldError) as error:
    print(type(error).__name__, *error.args, world.closed, flush=True)
time.sleep(1)
"""
    code, output = run_job(ALONE + source)
    assert code == 0, output
    assert "rank 1: left the world: an exception left its with block" in output
    assert "[rank 1] ValueError of one rank False" in output


@pytest.mark.parametrize(
    ("code", "expected"), first_always([("256 + 4", 4), ("3", 3), ("'a text'", 1)], 1)
)
def test_exit_code_of_the_rank_that_left_its_with_block_is_that_of_the_job(
    code, expected
):
    source = f"""
with start(CPU) as world:
    if world.rank == 1:
        sys.exit({code})
    time.sleep(30)
"""
    began = time.monotonic()
    assert run_job(source).code == expected
    assert time.monotonic() - began < 20


LEAVE = """
with start(CPU) as world:
    world.barrier()
    if world.rank == world.size - 1:
        sys.exit(3)
    world.barrier()
"""


def test_exit_code_is_that_of_the_rank_that_left_not_of_its_peers_errors():
    code, output = run_job(LEAVE, 3)
    assert "] etc_dist.errors.WorldError: the world lost ranks" in output
    assert code == 3


def test_exit_code_is_that_of_a_rank_on_another_host():
    assert run_on_hosts(LEAVE, 2).code == 3


def test_first_failure_is_that_of_the_rank_that_raised_on_another_host():
    source = """
if world.rank == 3:
    raise ValueError("of one rank")
world.barrier()
"""
    code, output = run_on_hosts(START + source, 4)
    assert code == 1
    assert "[mpirun] rank 3 ended with exit code 1; ranks 0, 1, 2 may" in output
    texts = "]   got:    rank 3 did not take part: its pro", "] the same traceback as"
    assert sum(map(output.count, texts)) == 3


def test_exit_with_code_0_in_a_with_block_does_not_end_the_others():
    source = """
with start(CPU) as world:
    if world.rank == 1:
        sys.exit(0)
    time.sleep(0.5)
    print("not ended", flush=True)
    try:
        world.barrier()
    except WorldError as error:
        print(error.got, flush=True)
"""
    code, output = run_job(source)
    assert "[rank 0] not ended" in output
    assert "[rank 0] rank 1: left the world: an exception left its with block" in output
    assert code == 0


INTERRUPTED = """
with start(CPU) as world:
    try:
        print("waits", flush=True)
        time.sleep(30)
    finally:
        time.sleep(world.rank / 2)
        print("cleaned up", flush=True)
"""


def test_interrupt_of_the_job_lets_finally_blocks_of_all_ranks_run(default_signals):
    command = [sys.executable, str(MPIRUN), "-n", "2", "python", "-c"]
    with subprocess.Popen(
        [*command, BEGIN + INTERRUPTED],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"LAUNCH_PYTHON": sys.executable},
    ) as job:
        for _ in range(2):
            assert job.stdout.readline().endswith("waits\n")
        job.send_signal(signal.SIGINT)
        output = job.stdout.read()
    assert sorted(output.splitlines()) == [f"[rank {n}] cleaned up" for n in (0, 1)]
    assert job.returncode == 128 + signal.SIGINT
