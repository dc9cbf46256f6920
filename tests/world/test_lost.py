"""Ranks that are killed or stopped: the other ranks raise an error that names them."""

from tests.world.jobs import run_job


def test_rank_that_is_killed_in_a_run_is_named():
    source = """
import ml_dtypes, numpy as np
from etc_dist import MatmulReduceScatter

world = start(CPU)  # with a limit that the job does not reach
x = np.ones((8 * world.size, 8), np.float32).astype(ml_dtypes.bfloat16)
w = np.ones((8, 8), np.float32).astype(ml_dtypes.bfloat16)
op = MatmulReduceScatter(world=world)
op(x, w)
if world.rank == 1:
    op.program._executor._drive = lambda _: os.kill(os.getpid(), 9)
refused(lambda: op(x, w))
os._exit(0)
"""
    _, output = run_job(source, ranks=3)
    assert output.count("WaitTimeoutError:") == 2
    assert output.count("rank 1: its process has ended") == 2


def test_rank_that_is_stopped_or_killed_in_an_allocation_is_named():
    source = """
from etc_dist.world import cpu_memory

world, tag = start(Settings(backend="cpu", world_limit=2.0)), "stopped: "
pids = world.gather(os.getpid())
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
    refused(world.barrier)
else:
    refused(world.barrier)
    os.kill(pids[1], signal.SIGCONT)

world, tag = start(CPU), "killed: "
if world.rank == 1:
    cpu_memory._map = lambda *_: os.kill(os.getpid(), 9)
refused(lambda: world.allocate(1 << 20))
show("left in /dev/shm:", list(cpu_memory.FOLDER.glob(f"{world._backend._stem}*")))
os._exit(0)
"""
    _, output = run_job(source)
    stopped, killed = (
        [line.partition(f"{tag}: ")[2] for line in output.splitlines() if tag in line]
        for tag in ("stopped", "killed")
    )
    text = "rank 1 did not take part; stopped by a signal or a debugger: rank 1"
    assert any(text in line for line in stopped)
    state = "rank 0: left the world: an earlier call there timed out or failed"
    assert any(state in line for line in stopped)
    assert "rank 1 did not take part: its process has ended" in killed[0]
    assert killed[1] == "left in /dev/shm: []"
