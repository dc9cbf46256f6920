"""Ranks that are killed or stopped: the other ranks raise an error that names them."""

from tests.world.jobs import run_job

# A time limit that no job reaches.
NEVER = 60.0

START = """
import ml_dtypes, numpy as np
from etc_dist import MatmulReduceScatter
from etc_dist.world import cpu_memory

world = start(Settings(backend="cpu", world_limit=LIMIT))
pids = world.gather(os.getpid())
x = np.ones((8 * world.size, 8), np.float32).astype(ml_dtypes.bfloat16)
w = np.ones((8, 8), np.float32).astype(ml_dtypes.bfloat16)
op = MatmulReduceScatter(world=world)
op(x, w)

def end(*_):
    os.kill(os.getpid(), SIGNAL)
"""


def started(limit: float, number: str) -> str:
    return START.replace("LIMIT", str(limit)).replace("SIGNAL", number)


def test_rank_that_is_killed_in_a_run_is_named():
    source = """
if world.rank == 1:
    op.program._executor._drive = end
refused(lambda: op(x, w))
os._exit(0)
"""
    _, output = run_job(started(NEVER, "9") + source, ranks=3)
    assert output.count("WaitTimeoutError:") == 2
    assert output.count("rank 1: its process has ended") == 2


def test_rank_that_is_killed_in_an_allocation_is_named():
    source = """
if world.rank == 1:
    cpu_memory._map = end
refused(lambda: world.allocate(1 << 20))
show("left in /dev/shm:", list(cpu_memory.FOLDER.glob(f"{world._backend._stem}*")))
os._exit(0)
"""
    _, output = run_job(started(NEVER, "9") + source)
    assert "rank 1 did not take part: its process has ended" in output
    assert "left in /dev/shm: []" in output


def test_rank_that_is_stopped_is_named():
    source = """
if world.rank == 1:
    end()
    refused(world.barrier)
else:
    time.sleep(0.5)
    refused(world.barrier)
    os.kill(pids[1], signal.SIGCONT)
    time.sleep(1)
os._exit(0)
"""
    _, output = run_job(started(2.0, "signal.SIGSTOP") + source)
    stopped = "rank 1 did not take part; stopped by a signal or a debugger: rank 1"
    assert stopped in output
    assert "rank 0: left the world: an earlier call there timed out or failed" in output
