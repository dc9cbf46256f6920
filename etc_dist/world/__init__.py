"""The world: processes, GPUs and symmetric memory.

`start` (collective) turns the ranks of an MPI job, or of a process group of torch, into
a `World`; `current` returns the one that the functional API uses. Importing this
package starts nothing.

Files, from the user down:

    startup.py      start, current: settings, ranks, backend
    launcher.py     the variables of launchers: ranks alone, children of ranks
    world.py        World: the interface for the rest of etc_dist
    choice.py       the visible GPUs of a rank; the backend of all ranks
    memory.py       SymmetricMemory, and the interface of a backend
    gpu_memory.py   backend "cuda": NVSHMEM's symmetric heap
    nvshmem.py      NVSHMEM's host library
    far_transport.py    its transport between hosts, and the error where that fails
    cpu_memory.py   backend "cpu": shared memory of a host
    hosts.py        Hosts: near and far ranks
    agreement.py    Agreement: all ranks make the same call, or raise the same error
    board.py        SignatureBoard compares calls in a microsecond, HostsBoard over
                    several hosts
    rank_errors.py  the errors of collective calls
    transport.py    Transport: messages between ranks, and the end of the job;
                    Exchange: all-to-all exchange of objects above it
    mpi.py          Transport by MPI where it has started the ranks; all use of MPI
    process_group.py    Transport for a process group of torch; all use of
                    torch.distributed
    sockets.py      its messages, over Unix sockets
    processes.py    Backoff, ProcessMonitor, threads, forks, uncaught exceptions"""

from etc_dist.world.memory import SymmetricMemory
from etc_dist.world.startup import current, of_group, start
from etc_dist.world.world import World

__all__ = ["SymmetricMemory", "World", "current", "of_group", "start"]
