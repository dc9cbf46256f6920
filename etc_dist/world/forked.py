"""A forked child leaves the MPI of its parent alone.

mpi4py finalizes MPI at the end of each process that has it, also of a forked child,
which would send that on the parent's connections and end the job.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from functools import cache

from etc_dist.world.exclusive import forked

_in_child = False


def refuse_in_child() -> None:
    """Raise WorldError in a child that was forked from a process with a world."""
    if _in_child:
        raise forked()


@cache
def keep_children_out_of_mpi() -> None:
    """Make MPI_Finalize do nothing in children that are forked from now on.

    MPI_Finalize begins by deleting the attributes of MPI_COMM_SELF, and returns the
    error of a callback that refuses to. A child sets such an attribute at its exit,
    with a callback in C: Python has ended by then. `getpid` serves as one, as it never
    returns MPI_SUCCESS, which is 0.

    NOTE: MPICH returns that error; Open MPI ignores it.
    """
    from mpi4py import MPI

    library = ctypes.CDLL(MPI.__file__)
    refuse = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)
    key = ctypes.c_int()
    library.MPI_Comm_create_keyval(None, refuse, ctypes.byref(key), None)
    # An int in MPICH, a pointer in Open MPI.
    is_int = MPI._sizeof(MPI.Comm) == ctypes.sizeof(ctypes.c_int)
    handle = ctypes.c_int if is_int else ctypes.c_void_p
    own = handle.from_address(MPI._addressof(MPI.COMM_SELF))

    def begin_child() -> None:
        global _in_child
        _in_child = True
        # NOTE: not now, as a thread of the parent may hold a lock of MPI's; and most
        # children end without exit handlers, or run another program.
        atexit.register(library.MPI_Comm_set_attr, own, key, None)

    os.register_at_fork(after_in_child=begin_child)
