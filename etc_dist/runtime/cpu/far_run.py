"""The messages of a run between ranks of different hosts.

A message belongs to one epoch of one program. A rank keeps it until it has started that
epoch, so nobody waits for the start of a far rank."""

from __future__ import annotations

import pickle
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from etc_dist.runtime.cpu.storage import Array
from etc_dist.runtime.cpu.task import ArrayAccess, Element
from etc_dist.world import World
from etc_dist.world.transport import RUN, Transport

BEATS_PER_LIMIT = 8
"""Reports of progress within the time limit of a run."""


@dataclass(frozen=True, order=True)
class Epoch:
    """Equal on all ranks for the same run, and different for any two runs. `block`: the
    number of the program's symmetric memory; `resets`: the failed runs before."""

    block: int
    resets: int
    number: int


@dataclass(frozen=True)
class Put:
    """Bytes for a region of the receiver's tensor `name`, then a notification."""

    name: str
    index: tuple[slice | int, ...]
    data: bytes
    element: Element


@dataclass(frozen=True)
class Finished:
    """All ranks of the sender's host have finished."""

    host: int


@dataclass(frozen=True)
class Aborted:
    """The run was ended on the sender's host."""


@dataclass(frozen=True)
class Beat:
    """The sender's host makes progress."""


Message = Put | Finished | Aborted | Beat


class Mailbox:
    """The messages for all programs of a world, by epoch."""

    def __init__(self, transport: Transport):
        self._transport = transport
        self._queues: defaultdict[Epoch, deque[Message]] = defaultdict(deque)

    @classmethod
    def of(cls, world: World) -> Mailbox | None:
        """The one of `world`; None where no rank is far."""
        if world.hosts.count == 1:
            return None
        mailbox = world.kept.setdefault(Mailbox, cls(world.transport))
        assert isinstance(mailbox, Mailbox)
        return mailbox

    def send(self, rank: int, epoch: Epoch, message: Message) -> None:
        """Send a message of `epoch` to a far rank. Does not wait."""
        self._transport.send(rank, RUN, pickle.dumps((epoch, message)))

    def receive(self, epoch: Epoch) -> Message | None:
        """The next message of `epoch`; keeps those of others."""
        while (packet := self._transport.receive(RUN)) is not None:
            sent_epoch, message = pickle.loads(packet[1])
            self._queues[sent_epoch].append(message)
        queue = self._queues.get(epoch)
        return queue.popleft() if queue else None

    def forget_before(self, epoch: Epoch) -> None:
        """Drop messages of earlier epochs of the program."""
        for queue_epoch in list(self._queues):
            if queue_epoch.block == epoch.block and queue_epoch < epoch:
                del self._queues[queue_epoch]


class FarRun:
    """What a rank of a running program exchanges with far ranks: puts with any, all
    else with its partners. Does nothing where no rank is far."""

    def __init__(
        self, world: World, arrive: Callable[[Put], None], end_near: Callable[[], None]
    ):
        """`arrive` takes a put; `end_near` ends the waits of the near ranks."""
        self._hosts, self._mailbox = world.hosts, Mailbox.of(world)
        self._arrive, self._end_near = arrive, end_near
        self._epoch = Epoch(0, 0, 0)
        self._finished: set[int] = set()
        self._sent_kinds: set[type[Message]] = set()
        self._beats, self._near_beats, self._beat_at = 0, 0, 0.0

    def open(self, block: int) -> None:
        """The program has new symmetric memory, with this number."""
        self._epoch = Epoch(block, 0, 0)

    def start(self, epoch: int) -> None:
        """Begin an epoch, by its number."""
        self._epoch = replace(self._epoch, number=epoch)
        self._finished, self._sent_kinds = set(), set()
        if self._mailbox is not None:
            self._mailbox.forget_before(self._epoch)

    def reset(self) -> None:
        """Begin anew after a failed run, whose messages are dropped."""
        self._epoch = replace(self._epoch, resets=self._epoch.resets + 1, number=0)

    def put(self, access: ArrayAccess, data: Array, element: Element) -> None:
        """Send `data` for a region of a far rank, and a notification."""
        assert self._mailbox is not None
        message = Put(access.tensor.name, access.index, data.tobytes(), element)
        self._mailbox.send(access.rank, self._epoch, message)

    def receive(self) -> None:
        """Handle the messages that have arrived."""
        if self._mailbox is None:
            return
        while (message := self._mailbox.receive(self._epoch)) is not None:
            self._beats += 1
            if isinstance(message, Put):
                self._arrive(message)
            elif isinstance(message, Finished):
                self._finished.add(message.host)
            elif isinstance(message, Aborted):
                self._end_near()

    def has_finished(self, host: int) -> bool:
        """Whether all ranks of another host have finished this epoch."""
        return host in self._finished

    def all_finished(self) -> bool:
        """Whether this holds for all other hosts."""
        return len(self._finished) == self._hosts.count - 1

    def finish(self) -> None:
        """All near ranks have finished this epoch."""
        self._tell(Finished(self._hosts.own))

    def abort(self) -> None:
        """Let the partners end the run."""
        self._tell(Aborted())

    def beats(self, near: int, limit: float) -> int:
        """The number of messages so far. Reports progress of this host: `near` has
        changed since the last report."""
        now = time.monotonic()
        if near != self._near_beats and now > self._beat_at + limit / BEATS_PER_LIMIT:
            self._near_beats, self._beat_at = near, now
            self._send(Beat())
        return self._beats

    def _tell(self, message: Message) -> None:
        """Send it once an epoch."""
        if type(message) not in self._sent_kinds:
            self._sent_kinds.add(type(message))
            self._send(message)

    def _send(self, message: Message) -> None:
        if self._mailbox is not None:
            for partner in self._hosts.partners:
                self._mailbox.send(partner, self._epoch, message)
