"""The bytes of an MPI shared window as NumPy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from mpi4py import MPI


def segment(window: MPI.Win, rank: int) -> npt.NDArray[np.uint8]:
    """uint8 over the segment of `rank`, as mapped here; dangles once it is freed."""
    # mpi4py's buffer has the buffer protocol, which its type stub does not say.
    return np.frombuffer(cast(Any, window.Shared_query(rank)[0]), dtype=np.uint8)
