"""CpuExecutor: one rank of a world runs a plan with its peers, in shared memory."""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from etc_dist.errors import ArgumentError, WaitRecord, WaitTimeoutError, WorldError
from etc_dist.ir.dims import whole_dims
from etc_dist.runtime.arrays import Array as Argument
from etc_dist.runtime.cpu import arrays as storage
from etc_dist.runtime.cpu.arrays import Array
from etc_dist.runtime.cpu.shared import SharedSpace
from etc_dist.runtime.cpu.task import Task
from etc_dist.runtime.cpu.team import Observer, Team, make_agents
from etc_dist.runtime.faults import Record
from etc_dist.runtime.trace import TaskRecord, Trace
from etc_dist.schedule.plan import Plan
from etc_dist.world import World
from etc_dist.world.processes import Backoff

FINISH_SECONDS = 5e-3
"""More than a rank needs from its look at `aborted` to publishing that it finished."""
RECORD_SECONDS = 1.0
"""How much longer a rank that is through waits than one whose waits are not met."""


@dataclass(frozen=True)
class Launch:
    """A run made ready: views of its arrays, whose memory the caller keeps alive."""

    arrays: Mapping[str, Array]
    dims: Mapping[str, int]


class CpuExecutor:
    """Runs `plan` with `settings.cpu_workers` simulated workers on each rank.

    Made, run and closed by all ranks of `world` alike. A run ends on all ranks
    together: so it can raise the same error on all of them.
    """

    def __init__(self, plan: Plan, world: World):
        if plan.graph.world_size != world.size:
            raise ArgumentError(
                f"graph {plan.graph.name} is for another number of ranks",
                where=f"rank {world.rank}",
                wanted=f"a graph for {world.size} ranks",
                got=f"a graph for {plan.graph.world_size}",
                fix="build the graph with world.size",
            )
        self.workers = world.settings.cpu_workers
        make_agents(plan, self.workers)  # refuses workers that do not fit
        self._plan, self._world = plan, world
        self._space = SharedSpace(plan.graph, world)
        self._runs = 0
        self._times = TaskTimes()

    def trace(self) -> Trace:
        """The tasks of the last run on this rank; all ranks of a host share a clock."""
        return Trace.of(self._times.records, _notes(self._plan))

    def prepare(
        self, arrays: Mapping[str, Argument], dims: Mapping[str, int]
    ) -> Launch:
        """A run made ready; local."""
        views = {name: storage.view_of(array) for name, array in arrays.items()}
        return Launch(views, dict(dims))

    def is_current(self, launch: Launch) -> bool:
        return True

    def needs_memory(self, dims: Mapping[str, int]) -> bool:
        """Never asked for: a run makes its own room."""
        return False

    def grow(self, *shapes: Mapping[str, int]) -> None:
        """See `needs_memory`."""

    def is_capturing(self, stream: Any = None) -> bool:
        """Never: there are no CUDA graphs."""
        return False

    def finish(self) -> None:
        """Nothing is under way between runs."""

    def launch(self, launch: Launch, stream: Any = None) -> None:
        """As `run`: when it returns, the run is over; what it raises, all raise."""
        self.run(launch.arrays, launch.dims)

    def synchronize(self) -> None:
        """Nothing is under way between runs."""

    @property
    def failed(self) -> bool:
        """Always False: a run that failed has raised, and can be followed by others."""
        return False

    def records(self) -> list[Record]:
        return []

    def loaded(self, launch: Launch, names: Sequence[str]) -> dict[str, Array]:
        """These inputs and local tensors, as the last run left them."""
        return {name: self._space.own[name] for name in names}

    def reset(self) -> None:
        """Forget a failed run of the peers that this rank agreed to and did not start.
        They do the same between the same two meetings."""
        self._space.reset()

    def run(self, arrays: Mapping[str, Array], dims: Mapping[str, int]) -> None:
        """Run once: read the inputs and fill the outputs in `arrays`, by tensor name.

        Collective; `dims` must be alike on all ranks. Raises on every rank
        WaitTimeoutError where no rank went on for `settings.wait_limit` seconds,
        ArgumentError where arrays or their data do not fit on some rank, and WorldError
        where a task failed on a peer; there, the task's own error. After any of these
        it can run again.
        """
        graph, rank = self._plan.graph, self._world.rank
        env = graph.environment(whole_dims(graph, dims), rank)
        self._space.prepare(env)
        self._runs += 1
        self._times = TaskTimes()
        self._space.start()
        try:
            team = self._team(env, arrays)
            waited = self._drive(team)
        except ArgumentError as refusal:
            self._fail(Report(refusal=refusal))
            raise
        except BaseException as fault:
            if not self._completed():
                self._fail(Report(fault=_summary(fault)))
            if not self._world.broken:
                self._world.exclusive.report(fault)
            raise
        if waited is not None and not self._completed():
            self._fail(Report(records=tuple(waited)))

    def symmetric(self, name: str) -> Array:
        """This rank's bytes of a symmetric tensor, as laid out for the last run."""
        tensor = self._space.array(name, self._world.rank)
        return tensor.reshape(-1).view(np.uint8)

    def close(self) -> None:
        """Give the symmetric memory back. Collective; again does nothing."""
        if not self._world.broken:
            self._space.free()

    def _team(self, env: dict[str, Any], arrays: Mapping[str, Array]) -> Team:
        graph, rank = self._plan.graph, self._world.rank
        given = [t for t in graph.tensors if t.kind in ("input", "output")]
        own = storage.bind(given, arrays, env, f"graph {graph.name}, rank {rank}")
        for tensor in graph.tensors:
            if tensor.kind == "local":
                own[tensor.name] = storage.poisoned(tensor, env)
        self._space.own = own
        env = {**env, **storage.loads(graph, own)}
        epoch, times = self._space.epoch, self._times
        place = rank, epoch, self.workers, self._space
        return Team(self._plan, env, *place, [times], seed=self._runs)

    def _drive(self, team: Team) -> list[WaitRecord] | None:
        """Let the agents act in a random order until all ranks are through; else what
        this rank was waiting for when the run was ended."""
        chance = random.Random(self._runs * self._world.size + self._world.rank)
        patience, beats = Backoff(0.0), -1
        while not self._through(team):
            live = [agent for agent in team.agents if not agent.done]
            chance.shuffle(live)
            for agent in live:
                if team.step(agent):
                    self._space.beat()
            if self._space.aborted:
                return team.records()
            # Peers that go on may need long: only when nobody does is a wait hopeless.
            if self._space.beats() != beats:
                patience, beats = self._patience(team), self._space.beats()
            elif not patience.pause() or patience.lost:
                return team.records() or self._missing()
        return None

    def _through(self, team: Team) -> bool:
        if team.done and not self._space.aborted:
            self._space.finish()
        return self._all_finished()

    def _all_finished(self) -> bool:
        return all(map(self._space.finished, range(self._world.size)))

    def _completed(self) -> bool:
        """End the run; whether all ranks had finished it before.

        Then it counts as completed on all of them, since some may have returned.
        """
        self._space.abort()
        time.sleep(FINISH_SECONDS)
        return self._all_finished()

    def _patience(self, team: Team) -> Backoff:
        # A rank that is through gives those that wait the time to record for what.
        limit = self._world.settings.wait_limit
        limit += min(limit, RECORD_SECONDS) if team.done else 0.0
        return Backoff(limit, self._world.find_lost)

    def _missing(self) -> list[WaitRecord]:
        """This rank is through, but peers are not, and do nothing."""
        rank, epoch, space = self._world.rank, self._space.epoch, self._space
        return [
            WaitRecord(rank, 0, "host", "end of run", f"finished[{peer}]", 0, epoch)
            for peer in range(self._world.size)
            if not space.finished(peer)
        ]

    def _fail(self, report: Report) -> None:
        """End the run on all ranks, make the next one possible, and raise what the
        ranks found together, unless this rank has an error of its own."""
        self._space.abort()
        where = f"plan of graph {self._plan.graph.name}, run {self._runs}"
        limit = self._world.settings.wait_limit
        # A rank that agreed to this run and did not start it is at its next call. There
        # it gets this error, and recovers with the others in `Program`.
        if not self._world.find_lost():
            waits = Report(records=report.records)
            with suppress(WaitTimeoutError):
                self._world.refuse(_merge([waits], where, limit, {}))
        heard = self._world.gather(report)
        if not self._world.broken:
            self._world.barrier()
            self._space.reset()
            self._world.barrier()
        if not report.fault:
            silent = [rank for rank, report in enumerate(heard) if report is None]
            why = {rank: self._world.why_lost(rank) for rank in silent}
            # NOTE: this rank's own error, if any, has the same text.
            raise _merge(heard, where, limit, why) from None


class Report(NamedTuple):
    """How a failed run ended on one rank. It begins as `program.Ended` does."""

    failed: bool = True
    records: tuple[WaitRecord, ...] = ()
    fault: str = ""
    refusal: ArgumentError | None = None


class TaskTimes(Observer):
    """Records when every task began and how long the CPU worked on it.

    Without the time that other processes had the core: it would hide the tasks'.
    """

    def __init__(self) -> None:
        self.records: list[TaskRecord] = []
        self._began = self._cpu_time = 0

    def enter(self, task: Task) -> None:
        self._began, self._cpu_time = time.monotonic_ns(), time.thread_time_ns()

    def leave(self, task: Task) -> None:
        row = (task.rank, task.worker, task.lane)
        end = self._began + time.thread_time_ns() - self._cpu_time
        name, tile = task.call.name, task.coordinate
        self.records.append(TaskRecord(*row, self._began, end, name, task.t, tile))


def _notes(plan: Plan) -> list[str]:
    """How to read a trace of this backend."""
    notes = [
        "CPU backend: a rank simulates its workers one task at a time. Bars are as "
        "long as the simulated tasks' CPU time, which says nothing about GPUs. Gaps "
        "are other tasks, waits, and other processes."
    ]
    if any(call.function.cluster > 1 for call in plan.graph.calls):
        notes.append("Workers that share a task have its bar in the row of the first.")
    return notes


def _summary(fault: BaseException) -> str:
    """An error and where it was raised; the rank itself shows the whole traceback."""
    text = "".join(traceback.format_exception_only(fault)).rstrip()
    frame = traceback.extract_tb(fault.__traceback__)[-1]
    return f"{text}\nat {frame.filename}, line {frame.lineno}, in {frame.name}"


def _merge(
    heard: list[object | None], where: str, limit: float, silent: Mapping[int, str]
) -> ArgumentError | WaitTimeoutError | WorldError:
    """One error of all ranks' reports, alike on every rank."""
    reports = {
        r: report for r, report in enumerate(heard) if isinstance(report, Report)
    }
    refusals = [report.refusal for report in reports.values() if report.refusal]
    if refusals:
        return refusals[0]
    faults = {rank: report.fault for rank, report in reports.items() if report.fault}
    if faults:
        rank = min(faults)
        return WorldError(
            f"a task failed on rank {rank}, so the run was ended on all ranks",
            where=where,
            wanted="every task to succeed",
            got=faults[rank].replace("\n", "\n          "),
            fix=f"see the traceback of rank {rank}",
        )
    records = [record for report in reports.values() for record in report.records]
    got = [str(record) for record in records]
    got += [f"rank {rank}: {why}" for rank, why in silent.items()]
    return WaitTimeoutError(
        "waits were not met, so the run was ended on all ranks",
        where=where,
        wanted=f"some rank to go on within {limit:g} s",
        got="\n          ".join(got) or "no waits",
        fix="look at what should have notified these events; raise "
        "ETC_DIST_WAIT_LIMIT if a single task takes longer than that",
        records=records,
    )
