"""A forked child does not disturb the ranks, whatever it does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

MPIRUN = str(Path(__file__).parents[2] / "launch" / "mpirun")
LAUNCH = [sys.executable, MPIRUN, "-n", "2", "--time-limit", "40", "python"]

# Rank 0 forks while the others are in a call; then all make calls.
FORKS = """
import atexit, os, sys, time
from etc_dist.errors import WorldError
from etc_dist.settings import Settings
from etc_dist.world import start

world = start(Settings(backend="cpu", world_limit=10.0))
world.barrier()
child = os.fork() if world.rank == 0 else None
if child == 0:
    atexit.register(lambda: print("handler of the child", flush=True))
    CHILD
if child:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(f"child ended with {code}", flush=True)
for _ in range(100):
    assert world.gather(world.rank) == [0, 1]
    world.allocate(64).free()
if world.rank == 0:
    print("parents are well", flush=True)
"""


def run(child: str) -> tuple[int, str]:
    """Exit code and output of two ranks, of which one forks a child."""
    done = subprocess.run(
        [*LAUNCH, "-c", FORKS.replace("CHILD", child)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"LAUNCH_PYTHON": sys.executable},
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("child", "code"),
    [("sys.exit(7)", 7), ("sys.exit()", 0), ("raise ValueError('of the child')", 1)],
)
def test_child_that_ends_leaves_the_ranks_alone(child, code):
    status, output = run(child)
    assert status == 0, output
    assert "handler of the child" in output
    assert f"child ended with {code}" in output
    assert "parents are well" in output


@pytest.mark.parametrize(
    "call",
    ["world.barrier()", "world.close()", "world.allocate(8)", "start()"],
)
def test_call_in_a_child_is_an_error_there_alone(call):
    status, output = run(call)
    assert status == 0, output
    assert "WorldError: the world cannot be used: this process is a fork" in output
    assert "child ended with 1" in output and "parents are well" in output
