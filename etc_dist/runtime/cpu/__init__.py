"""The CPU backend: a plan run by simulated workers with the NumPy bodies.

The specification of what a plan means, a machine without a GPU's way to run it, and
the place where races and deadlocks are found. It is not a performance path.

    executor.py  CpuExecutor: one rank of a world, in shared memory
    simulate.py  simulate: all ranks in this process, one seeded step at a time
    team.py      the agents of one rank: the same under both
    queue.py     which units of a dynamic plan's lane are ready
    task.py      one task: its tile, what it waits for, touches and notifies
    arrays.py    the arrays of one rank
    shared.py    symmetric tensors, counters and the end of a run between processes
    races.py     vector clocks: which accesses nothing orders
    deadlock.py  why no agent can go on
"""

from etc_dist.runtime.cpu.executor import CpuExecutor
from etc_dist.runtime.cpu.simulate import Simulation, simulate

__all__ = ["CpuExecutor", "Simulation", "simulate"]
