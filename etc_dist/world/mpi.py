"""Objects between all ranks, with waits that end even when a peer is lost.

MPI's own collectives give all or nothing: one dead rank silences all. Here every pair
of ranks exchanges its own message, so the living hear each other in any case.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING

from etc_dist.world.processes import Backoff

if TYPE_CHECKING:
    from mpi4py import MPI

# MPI promises tags up to 32767.
TAGS = 32000


class ObjectGather:
    """All-to-all exchange of picklable objects over one private communicator."""

    def __init__(self, comm: MPI.Intracomm):
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = comm
        self.find_lost: Callable[[], frozenset[int]] = frozenset
        """The ranks that are known never to answer, as far as this rank can see."""
        self.rank, self.size = comm.rank, comm.size
        self._turn = 0
        # Sends that a dead peer will never take; MPI still reads their memory.
        self._abandoned: list[object] = []

    def gather(
        self, value: object, limit: float, *, need_all: bool = False
    ) -> dict[int, object]:
        """What each rank gave, by rank; ranks not heard within `limit` s are missing.

        Collective. Returns early once all who live are heard and have taken this
        rank's value; with `need_all`, also once it is known that one never will be. A
        missing rank leaves the exchange unfit for further use.
        """
        self._turn += 1
        tag = self._turn % TAGS
        payload = pickle.dumps(value)
        peers = [peer for peer in range(self.size) if peer != self.rank]
        sends = {
            peer: self._comm.Isend([payload, self._mpi.BYTE], dest=peer, tag=tag)
            for peer in peers
        }
        heard: dict[int, object] = {self.rank: value}
        arriving: dict[int, tuple[MPI.Request, bytearray]] = {}
        patience = Backoff(limit, self.find_lost)
        while True:
            for peer in peers:
                if peer not in heard:
                    self._hear(peer, tag, arriving, heard)
            pending = {p for p in peers if p not in heard or not sends[p].Test()}
            if not pending:
                return heard
            lost = pending & patience.lost
            hopeless = pending == lost or (need_all and not lost <= heard.keys())
            if hopeless or not patience.pause():
                self._abandoned += [sends, payload, arriving]
                return heard

    def _hear(
        self,
        peer: int,
        tag: int,
        arriving: dict[int, tuple[MPI.Request, bytearray]],
        heard: dict[int, object],
    ) -> None:
        if peer not in arriving:
            status = self._mpi.Status()
            probe = self._comm.Improbe  # codespell:ignore improbe
            message = probe(source=peer, tag=tag, status=status)
            if message is None:
                return
            buffer = bytearray(status.Get_count(self._mpi.BYTE))
            arriving[peer] = message.Irecv([buffer, self._mpi.BYTE]), buffer
        request, buffer = arriving[peer]
        if request.Test():
            heard[peer] = pickle.loads(buffer)

    def barrier(self, limit: float) -> bool:
        """Wait for all ranks; orders memory between them.

        False if they did not come within `limit` seconds, or one never can.
        """
        request = self._comm.Ibarrier()
        patience = Backoff(limit, self.find_lost)
        while not request.Test():
            if patience.lost or not patience.pause():
                return False
        return True
