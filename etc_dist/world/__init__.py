"""The world: processes, GPUs and symmetric memory.

`start` (collective) turns the ranks of an MPI job into a `World`; `current` gives the
one that the functional API uses. Importing this package starts nothing.

Files, from the user down:

    startup.py         start, current: MPI, settings and the backend's choice
    world.py            World: what all the rest of etc_dist uses
    memory.py           SymmetricMemory, and what a backend must offer
    gpu_memory.py       backend "cuda": NVSHMEM's symmetric heap, one GPU a rank
    nvshmem_library.py  NVSHMEM's host calls by ctypes
    cpu_memory.py       backend "cpu": shared memory of one host
    choice.py           which backend; which GPUs a rank can see
    exclusive.py        one thread at a time, and no call in a forked child
    forked.py           a forked child does not finalize MPI
    agreement.py          all ranks agree on a call, or raise the same error
    rank_errors.py           the words of those errors
    pages.py            memory that all ranks of a host map
    mailbox.py          where signatures are compared: the hot path
    mpi.py              objects between ranks, with waits that end
    processes.py        which processes live; how a rank waits
    aborting.py         one failing rank ends all
"""

from etc_dist.world.memory import SymmetricMemory
from etc_dist.world.startup import current, given_world, start
from etc_dist.world.world import World

__all__ = ["SymmetricMemory", "World", "current", "given_world", "start"]
