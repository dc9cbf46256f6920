"""The last run of a program: its end on all ranks, its error, and its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

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

SHOWN = 8
"""Waits that an error names."""


class RunEnd(NamedTuple):
    """How a failed run ended on one rank: the records of its waits and tasks; on the
    CPU backend the error that a task has raised, or that of its data."""

    records: Sequence[Record] = ()
    fault: str = ""
    refusal: ArgumentError | None = None


class Executor(Protocol):
    """The interface of a backend: `runtime/gpu.py` and `runtime/cpu`. Methods with a
    body here are those of a backend that ends each run in `launch`."""

    workers: int

    @property
    def is_captured(self) -> bool:
        """Whether CUDA graphs may refer to the program's memory."""
        return False

    def grow(self, *shapes: Mapping[str, int]) -> None:
        """Allocate memory for runs at these dims. Collective; no run is in flight."""
        return None

    def prepare(self, arrays: Mapping[str, Array], dims: Mapping[str, int]) -> Any:
        """What `launch` needs for a run; None if the program must `grow` for it, which
        is alike on all ranks. Local."""

    def is_current(self, launch: Any) -> bool:
        """False for a launch made before the program's memory moved."""
        return True

    def launch(self, launch: Any, stream: Any = None) -> None:
        """Start a run, after all earlier runs of this world."""

    def failure(self) -> list[Record] | None:
        """This rank's records, if a run on it has been ended, else None."""
        return None

    def loaded(self, launch: Any, names: Sequence[str]) -> Loaded:
        """These inputs, states and local tensors after the last run."""

    def reset(self) -> None:
        """Clear the state of a failed run. Collective, between two barriers."""

    def recover(self) -> None:
        """Begin anew after an interrupted call, on one rank."""

    def synchronize(self) -> None:
        """Wait for the last run."""
        return None

    def finish(self) -> None:
        """Wait for all work of this rank's device."""
        return None

    def trace(self) -> Trace:
        """The tasks of the last run on this rank."""

    def show(self) -> str:
        """The memory that is kept for captured graphs."""
        return ""

    def symmetric(self, name: str) -> Any:
        """This rank's bytes of a symmetric tensor, as laid out for the last run."""

    def close(self) -> None:
        """Free the memory. Collective, idempotent."""


class LastRun:
    """Owns the executor of a program, and outlives a program that is dropped: a run may
    still use the memory, and freeing it is collective. number: equal on all ranks."""

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
            self._world.refuse(timeout_error(self._world, self._graph, records))

    def match(self, signature: int, describe: Callable[[], str]) -> None:
        """`world.match_call`, with nothing to compare on a single rank."""
        if self._world.size > 1 or self._world.broken:
            self._world.match_call(signature, describe)

    def largest(self, signature: int, number: int, describe: Callable[[], str]) -> int:
        """`world.largest`, on a single rank `number`."""
        if self._world.size > 1 or self._world.broken:
            return self._world.largest(signature, number, describe)
        return number

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

    def _failure(self, records: list[Record]) -> EtcDistError:
        self._is_reported = True
        return run_error(self._world, self._graph, [RunEnd(records)])

    def _recover(self) -> EtcDistError:
        """All ranks: exchange the records, clear the counters. Returns the error."""
        self._is_reported = True
        own_end = RunEnd(self.executor.failure() or ())
        return end_failed_run(self._world, self.executor, self._graph, own_end)


def end_failed_run(
    world: World, executor: Executor, graph: str, own_end: RunEnd
) -> EtcDistError:
    """Exchange how a run of `graph` ended, and clear its state, so that all ranks can
    run again. Returns their error. Collective, unless the world is broken."""
    ends: list[object | None] = [own_end]
    silent: Iterable[int] = world.find_lost()
    if not world.broken:
        ends = world.gather(own_end)
        silent = [rank for rank, end in enumerate(ends) if end is None]
    executor.finish()
    if not world.broken:
        world.barrier()
        executor.reset()
        world.barrier()
    return run_error(world, graph, cast("list[RunEnd | None]", ends), silent)


def run_error(
    world: World, graph: str, ends: Sequence[RunEnd | None], silent: Iterable[int] = ()
) -> EtcDistError:
    """The error of a run with these ends, by rank; `silent` ranks did not answer."""
    present = [end or RunEnd() for end in ends]
    records = [record for end in present for record in end.records]
    # Data out of range on one rank makes the waits of others time out.
    outside = [record for record in records if isinstance(record, RangeRecord)]
    refusals = [end.refusal for end in present if end.refusal]
    faults = {rank: end.fault for rank, end in enumerate(present) if end.fault}
    if outside:
        return out_of_range(outside)
    if refusals:
        return refusals[0]
    if faults:
        rank = min(faults)
        return WorldError(
            f"a task failed on rank {rank}, so the run was ended on all ranks",
            where=f"{graph} on {world.size} ranks",
            wanted="every task to succeed",
            got=faults[rank].replace("\n", "\n          "),
            fix=f"see the traceback of rank {rank}",
        )
    return timeout_error(world, graph, records, silent)


def timeout_error(
    world: World, graph: str, records: Sequence[Record], silent: Iterable[int] = ()
) -> WaitTimeoutError:
    """The error of a run of which a wait was not met."""
    waits = [record for record in records if isinstance(record, WaitRecord)]
    got = list(map(str, waits[:SHOWN])) or ["records of other ranks"]
    got += filter(None, [describe_workers(records)])
    got += [f"rank {rank}: {world.why_lost(rank)}" for rank in sorted(silent)]
    return WaitTimeoutError(
        f"a run of {graph} was ended: a wait was not met in time",
        where=f"{graph} on {world.size} ranks",
        wanted=f"every event within {world.settings.wait_limit:g} s",
        got="; ".join(got),
        fix="look for a rank that died, was late or made another call, and at the "
        "tasks that notify these events; raise ETC_DIST_WAIT_LIMIT if ranks may be "
        "further apart than this, or a task of the CPU backend takes longer; if "
        "workers had not begun, end other work on that GPU",
        records=tuple(waits),
    )
