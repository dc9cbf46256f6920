"""The last run of a program: its end on all ranks, its error, and its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from etc_dist.errors import (
    ArgumentError,
    EtcDistError,
    RangeRecord,
    WaitRecord,
    WaitTimeoutError,
    WorldError,
)
from etc_dist.runtime.arrays import Array
from etc_dist.runtime.device_faults import Record, describe_workers, out_of_range
from etc_dist.runtime.run_check import Loaded
from etc_dist.runtime.trace import Trace
from etc_dist.world import World
from etc_dist.world.agreement import sign

RunStatus = tuple[bool, list[Record]]
"""Whether a rank's run failed, and the records of its failed waits and tasks."""


class Executor(Protocol):
    """The interface of a backend: `runtime/gpu.py` and `runtime/cpu`."""

    workers: int

    @property
    def is_captured(self) -> bool: ...
    def grow(self, *shapes: Mapping[str, int]) -> None: ...
    def prepare(self, arrays: Mapping[str, Array], dims: Mapping[str, int]) -> Any: ...
    def is_current(self, launch: Any) -> bool: ...
    def launch(self, launch: Any, stream: Any = None) -> None: ...
    def failure(self) -> list[Record] | None: ...
    def loaded(self, launch: Any, names: Sequence[str]) -> Loaded: ...
    def reset(self) -> None: ...
    def recover(self) -> None: ...
    def synchronize(self) -> None: ...
    def finish(self) -> None: ...
    def trace(self) -> Trace: ...
    def show(self) -> str: ...
    def symmetric(self, name: str) -> Any: ...
    def close(self) -> None: ...


class LastRun:
    """Owns the executor of a program, and outlives a program that is dropped: a run may
    still use the memory, and freeing it is collective. number: of the program, equal on
    all ranks."""

    def __init__(self, graph: str, number: int, world: World, executor: Executor):
        self.number, self.executor = number, executor
        self._graph, self._world = graph, world
        self._end = sign(f"{graph} {number} end")
        self._is_reported = False
        world.hold(self)

    def begin(self) -> None:
        """A run is launched now."""
        self._is_reported = False

    def await_end(self) -> EtcDistError | None:
        """Wait for the last run on every rank; returns its error, the same on all. On a
        broken world it only checks this rank's run, and returns an error once."""
        if not self._world.broken:
            return self.agree_on_end()
        records = None if self._is_reported else self.executor.failure()
        return None if records is None else self._failure(records)

    def agree_on_end(self) -> EtcDistError | None:
        """As `await_end`; raises WorldError on a broken world."""
        self.executor.synchronize()
        try:
            self.refuse_after_failure()
            self.match(self._end, self._describe_end)
        except (WaitTimeoutError, WorldError) as error:
            fault = self.end_of_run(error)
            if fault is error:
                raise
            return fault
        return None

    def refuse_after_failure(self) -> None:
        """Raise an error on all ranks if the last run failed on this one."""
        records = self.executor.failure()
        if records is not None:
            # NOTE: peers recover as well if they receive an error of this class.
            self._world.refuse(self._timeout(records))

    def match(self, signature: int, describe: Callable[[], str]) -> None:
        """`world.match_call`, with nothing to compare on a single rank."""
        if self._world.size > 1 or self._world.broken:
            self._world.match_call(signature, describe)

    def end_of_run(self, error: EtcDistError) -> EtcDistError:
        """The error to raise for that of an agreement: the last run's if it failed,
        since it came first. All ranks then recover."""
        if isinstance(error, WaitTimeoutError) and not self._world.broken:
            return self._recover()
        records = self.executor.failure()
        if records is not None:
            fault = self._failure(records)
            fault.__cause__ = None if isinstance(error, WaitTimeoutError) else error
            return fault
        return error

    def drop(self) -> None:
        """The program was dropped. Its memory is freed once all ranks have dropped it;
        at the end of the world, if CUDA graphs may refer to it."""
        if not self.executor.is_captured:
            self._world.drop(self)

    def recover(self) -> None:
        """Make the program usable after an interrupted call, on one rank."""
        self.executor.recover()

    def close(self) -> None:
        """Free the memory. Collective, idempotent."""
        self.executor.close()
        if not self._world.broken:  # there, a run may still use the memory
            self._world.release(self)

    def _describe_end(self) -> str:
        return f"the end of the last run of {self._graph}, program {self.number}"

    def _failure(
        self, records: list[Record], silent: Sequence[int] = ()
    ) -> ArgumentError | WaitTimeoutError:
        self._is_reported = True
        # Data out of range on one rank makes the waits of others time out.
        outside = [r for r in records if isinstance(r, RangeRecord)]
        return out_of_range(outside) if outside else self._timeout(records, silent)

    def _timeout(
        self, records: list[Record], silent: Sequence[int] = ()
    ) -> WaitTimeoutError:
        waits = [r for r in records if isinstance(r, WaitRecord)]
        shown = "; ".join(map(str, waits[:8])) or "records of other ranks"
        begun = describe_workers(records)
        shown += f"; {begun}" if begun else ""
        for rank in silent:
            shown += f"; rank {rank}: {self._world.why_lost(rank)}"
        return WaitTimeoutError(
            f"a run of {self._graph} was ended: a wait was not met in time",
            where=f"{self._graph} on {self._world.size} ranks",
            wanted=f"every event within {self._world.settings.wait_limit:g} s",
            got=shown,
            fix="look for a rank that died, was late or made another call; if ranks "
            "may be further apart than this, raise ETC_DIST_WAIT_LIMIT; if workers had "
            "not begun, end other work on that GPU",
            records=tuple(waits),
        )

    def _recover(self) -> EtcDistError:
        """All ranks: exchange the records and clear the counters. Returns the error of
        the run."""
        found = self.executor.failure()
        own: RunStatus = (found is not None, found or [])
        ends = cast("list[RunStatus | None]", self._world.gather(own))
        self.executor.finish()
        records = [record for end in ends if end for record in end[1]]
        silent = [rank for rank, end in enumerate(ends) if end is None]
        if not silent:
            self._world.barrier()
            self.executor.reset()
            self._world.barrier()
        return self._failure(records, silent)
