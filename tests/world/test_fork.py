"""A forked child does not disturb the ranks."""

import pytest

from tests.world.jobs import run_job

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
    print("parents continue", flush=True)
"""


@pytest.mark.parametrize(
    ("child", "code"),
    [("sys.exit(7)", 7), ("sys.exit()", 0), ("raise ValueError('of the child')", 1)],
)
def test_child_that_ends_leaves_the_ranks_alone(child, code):
    status, output = run_job(FORKS.replace("CHILD", child))
    assert status == 0, output
    assert "handler of the child" in output
    assert f"child ended with {code}" in output
    assert "parents continue" in output


def test_child_that_leaves_the_block_of_a_world_leaves_the_ranks_alone():
    status, output = run_job(FORKS.replace("CHILD", "with world: sys.exit(3)"))
    assert status == 0, output
    assert "child ended with 3" in output and "parents continue" in output


@pytest.mark.parametrize(
    "call",
    ["world.barrier()", "world.close()", "world.allocate(8)", "start()"],
)
def test_call_in_a_child_is_an_error_there_alone(call):
    status, output = run_job(FORKS.replace("CHILD", call))
    assert status == 0, output
    assert "WorldError: the world cannot be used: this process is a fork" in output
    assert "child ended with 1" in output and "parents continue" in output
