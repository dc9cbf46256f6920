"""The CPU backend: a plan run by simulated workers with the NumPy bodies.

It defines the results of a plan, without a GPU and without regard to performance. The
verifier finds races, not this backend (`runtime/run_check.py`).

    executor.py     CpuExecutor: one rank of a world, in shared memory
    simulate.py     simulate: all ranks in this process, in a seeded order
    workers.py      the workers of one rank, used by both
    ready_queue.py  the ready units of a lane of a dynamic plan
    task.py         one task: its tile, waits, accesses and notifications
    body.py         the NumPy body of a task
    storage.py      the arrays of one rank
    far_run.py      messages of a run between hosts
    run_state.py    the shared state of a run: words, counters, symmetric tensors"""

from etc_dist.runtime.cpu.executor import CpuExecutor
from etc_dist.runtime.cpu.simulate import Simulation, simulate

__all__ = ["CpuExecutor", "Simulation", "simulate"]
