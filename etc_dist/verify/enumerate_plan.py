"""Enumerate the tasks of a plan at given dims, and report indices out of range."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from etc_dist.errors import GraphError
from etc_dist.ir.call import TASK, Call
from etc_dist.ir.event import EventRef
from etc_dist.ir.expr import Expr
from etc_dist.ir.tensor import Region
from etc_dist.schedule.plan import Lane, Plan
from etc_dist.verify.enumeration import (
    BODY,
    EARLY,
    NONE,
    Access,
    Array,
    Block,
    Elements,
    Enumeration,
    Mask,
    evaluate,
    place,
    rows,
    task_name,
)
from etc_dist.verify.loaded_accesses import load_accesses
from etc_dist.verify.unchecked import missing
from etc_dist.verify.violations import Fault, Tally

Runtime = Mapping[str, Sequence[npt.NDArray[Any]]]


def enumerate_plan(
    plan: Plan, dims: Mapping[str, int], workers: int, tensors: Runtime
) -> tuple[Enumeration, list[Fault]]:
    """All tasks of `plan`, and the faults that this finds. References out of range are
    reported and left out, so that later checks continue without them."""
    reader = _Reader(plan, dims, tensors)
    blocks = reader.blocks()
    elements = reader.elements()
    rank = np.repeat([b.rank for b in blocks], [b.count for b in blocks])
    wait = reader.references(blocks, elements, "waits")
    notify = reader.references(blocks, elements, "notifies")
    accesses = [access for block in blocks for access in reader.accesses(block)]
    enumeration = Enumeration(
        plan,
        tuple(reader.environments),
        tuple(blocks),
        rank.astype(np.int64),
        place(plan, blocks, workers),
        elements,
        wait,
        notify,
        tuple(accesses),
        reader.count_events(blocks, elements),
        frozenset(reader.unknown_events),
        frozenset(reader.unknown_counts),
        frozenset(reader.unknown_writes),
    )
    return enumeration, reader.tally.faults()


class _Reader:
    """Evaluates a plan's expressions; collects faults and the names of unknowns."""

    def __init__(self, plan: Plan, dims: Mapping[str, int], tensors: Runtime):
        self.plan, self.graph = plan, plan.graph
        self.world = plan.graph.world_size
        self.known_names = set(tensors)
        self.environments: list[dict[str, Any]] = []
        for rank in range(self.world):
            env = self.graph.environment(dims, rank)
            env.update({f"@{n}": np.asarray(per[rank]) for n, per in tensors.items()})
            self.environments.append(env)
        self.tally = Tally()
        self.unknown_events: set[str] = set()
        self.unknown_counts: set[str] = set()
        self.unknown_writes: set[str] = set()

    def known(self, exprs: Iterable[Expr]) -> bool:
        """Whether `exprs` load only from tensors with given values."""
        return not missing(exprs, self.known_names)

    def fail(self, cause: object, text: str, fix: str, count: int = 1) -> None:
        self.tally.add(cause, Fault(GraphError, text, fix, count))

    # ------------------------------------------------------------------------ tasks

    def blocks(self) -> list[Block]:
        blocks: list[Block] = []
        base = 0
        for rank in range(self.world):
            for lane in self.plan.lanes:
                for call in lane.calls:
                    block = self.block(lane, call, rank, base)
                    if block is None:
                        refs = (*call.waits, *call.notifies)
                        self.unknown_events.update(ref.events.name for ref in refs)
                        self.unknown_writes.update(r.tensor.name for r in call.writes)
                        continue
                    blocks.append(block)
                    base += block.count
        return blocks

    def block(self, lane: Lane, call: Call, rank: int, base: int) -> Block | None:
        """The tasks of `call`; None where they cannot be counted."""
        extents = [a.extent for a in call.axes]
        env = self.environments[rank]
        try:
            shape = [int(e.evaluate(env)) for e in extents]
            if min(shape, default=0) < 0:
                raise ValueError(f"the grid is {shape}")
            count = prod(shape)
            inner = {**env, TASK.name: np.arange(count)}
            parts = [evaluate(e, inner, count) for e in call.order]
        except (ArithmeticError, ValueError) as error:
            self.fail(
                ("tasks", call.name),
                f"the tasks of call {call.name} on rank {rank} cannot be counted: "
                f"{error}",
                "make extents and order valid at these dims",
            )
            return None
        self.check_order(call, rank, shape, parts)
        if ("order", call.name) in self.tally.found:
            # For the later checks: each task once, in any order.
            parts = [np.asarray(p) for p in np.unravel_index(np.arange(count), shape)]
        names = [a.symbol.name for a in call.axes]
        inner = {**env, **dict(zip(names, parts, strict=True))}
        index = self.existing(call, inner, count)
        inner.update((name, inner[name][index]) for name in names)
        return Block(call, lane, rank, base, index.size, inner, index)

    def check_order(
        self, call: Call, rank: int, shape: list[int], parts: list[Array]
    ) -> None:
        """Refuse an order that is not a bijection from task indices onto the grid."""
        count = prod(shape)
        extents = np.array(shape, np.int64)[:, None]
        at = np.stack(parts)
        outside = ((at < 0) | (at >= extents)).any(axis=0)
        inside = np.flatnonzero(~outside)
        task = np.ravel_multi_index(tuple(at[:, inside]), shape) if count else inside
        times = np.bincount(task, minlength=count)
        names = [a.symbol.name for a in call.axes]

        def shown(coordinate: Iterable[Any]) -> str:
            pairs = zip(names, coordinate, strict=True)
            return f"[{', '.join(f'{n}={int(c)}' for n, c in pairs)}]"

        examples = []
        if outside.any():
            t = int(np.flatnonzero(outside)[0])
            examples.append(f"t={t} gives {shown(at[:, t])}, outside of {shape}")
        if (times > 1).any():
            twice = int(np.flatnonzero(times > 1)[0])
            first_t, second_t = inside[np.flatnonzero(task == twice)[:2]]
            examples.append(
                f"t={first_t} and t={second_t} both give {shown(at[:, first_t])}"
            )
        if (times == 0).any():
            never = np.unravel_index(int(np.flatnonzero(times == 0)[0]), shape)
            examples.append(f"no t gives {shown(never)}")
        if examples:
            self.fail(
                ("order", call.name),
                f"the order of call {call.name} is not a bijection onto its grid, on "
                f"rank {rank}: {'; '.join(examples)}",
                "return every coordinate exactly once from order=",
            )

    def may_be_fewer(self, call: Call) -> bool:
        """Whether an unknown count decides which tasks of `call` exist."""
        return call.count is not None and not self.known([call.count])

    def existing(self, call: Call, env: dict[str, Any], count: int) -> Array:
        """The indices of tasks that are not surplus: all, where the count is unknown.
        Counts out of range are reported for the load itself."""
        if call.limited is None or call.count is None or self.may_be_fewer(call):
            return np.arange(count)
        try:
            most = evaluate(call.count, env, count)
        except IndexError:
            return np.arange(count)
        return np.flatnonzero(evaluate(call.limited.symbol, env, count) < most)

    # ----------------------------------------------------------------------- events

    def elements(self) -> Elements:
        first: dict[str, Array] = {}
        shape: dict[str, Array] = {}
        ranks = []
        total = 0
        for event in self.graph.events:
            if not self.known((event.expects,)):
                self.unknown_counts.add(event.name)
            sizes = np.array(
                [[int(n.evaluate(e)) for n in event.shape] for e in self.environments],
                np.int64,
            ).clip(0)
            counts = sizes.prod(axis=1)
            shape[event.name] = sizes
            first[event.name] = total + np.cumsum(counts) - counts
            ranks.append(np.repeat(np.arange(self.world), counts))
            total += int(counts.sum())
        for call in (c for lane in self.plan.lanes for c in lane.calls):
            for ref in (*call.waits, *call.notifies):
                if not self.known(ref.parts):
                    self.unknown_events.add(ref.events.name)
        rank = np.concatenate(ranks) if ranks else np.zeros(0, np.int64)
        return Elements(first, shape, rank, total)

    def references(self, blocks: list[Block], elements: Elements, verb: str) -> Array:
        """The element numbers that each task waits for, or notifies. All known
        references are checked, even if other references to the events are unknown."""
        widest = max((len(getattr(b.call, verb)) for b in blocks), default=0)
        elements_of_tasks = np.full(
            (sum(b.count for b in blocks), widest), NONE, np.int64
        )
        for block in blocks:
            for k, ref in enumerate(getattr(block.call, verb)):
                if not block.count or not self.known(ref.parts):
                    continue
                element = self.reference(block, elements, verb, ref)
                if ref.events.name not in self.unknown_events:
                    elements_of_tasks[block.base : block.base + block.count, k] = (
                        element
                    )
        return elements_of_tasks

    def count_events(self, blocks: list[Block], elements: Elements) -> Array:
        """The elements after which the counts of loaded extents are known, of grids
        that are not empty at the bounds of these extents."""
        batches = [np.zeros(0, np.int64)]
        for block in blocks:
            call = block.call
            if not call.waits_for_count or not int(call.tasks.evaluate(block.env)):
                continue
            loops = call.loop_axes
            shape = [int(axis.extent.evaluate(block.env)) for axis in loops]
            turns = np.unravel_index(np.arange(prod(shape)), shape) if loops else ()
            at: dict[str, Any] = {axis.symbol.name: 0 for axis in call.axes}
            at.update((a.symbol.name, t) for a, t in zip(loops, turns, strict=True))
            all_turns = replace(block, count=prod(shape), env={**block.env, **at})
            batches.append(self.reference(all_turns, elements, "waits", call.waits[0]))
        numbers = np.unique(np.concatenate(batches))
        elements_of_counts: Array = numbers[numbers != NONE]
        return elements_of_counts

    def reference(
        self, block: Block, elements: Elements, verb: str, ref: EventRef
    ) -> Array:
        does = "waits for" if verb == "waits" else "notifies"
        cause = block.call.name, verb, ref
        try:
            is_met = block.values(ref.holds) != 0
            rank = np.full(block.count, block.rank)
            if ref.rank is not None:
                rank = block.values(ref.guarded(ref.rank))
            index = rows(block, [*map(ref.guarded, ref.index)]).T
        except IndexError:  # reported for the load itself
            return np.full(block.count, NONE)
        except ArithmeticError as error:
            fix = "correct the index expression"
            self.fail(cause, f"{block.call.name} {does} {ref}: {error}", fix)
            return np.full(block.count, NONE)
        self.check_rank(block, (block.call.name, does, ref), rank)
        foreign = (rank < 0) | (rank >= self.world)
        shape = elements.shape[ref.events.name][np.where(foreign, block.rank, rank)]
        outside = ((index < 0) | (index >= shape)).any(axis=1) & ~foreign & is_met
        if outside.any():
            t = int(np.flatnonzero(outside)[0])
            self.fail(
                ("element", *cause),
                f"{task_name(block, t)} {does} {ref.events.name}{index[t].tolist()} on "
                f"rank {rank[t]}, outside of {shape[t].tolist()}",
                f"keep the index of {ref} inside of the event tensor",
                int(outside.sum()),
            )
        wrong = foreign | outside | ~is_met
        element = np.zeros(block.count, np.int64)
        for axis_idx in range(index.shape[1]):
            element = element * shape[:, axis_idx] + index[:, axis_idx]
        first = elements.first[ref.events.name][np.where(foreign, 0, rank)]
        return np.where(wrong, NONE, element + first)

    def check_rank(self, block: Block, what: tuple[object, ...], rank: Array) -> None:
        foreign = (rank < 0) | (rank >= self.world)
        if foreign.any():
            where = " ".join(map(str, what))
            t = int(np.flatnonzero(foreign)[0])
            self.fail(
                ("rank", where),
                f"{where}: {task_name(block, t)} names rank {rank[t]} of {self.world}",
                "keep ranks inside of the world: (...) % world_size",
                int(foreign.sum()),
            )

    # --------------------------------------------------------------------- accesses

    def accesses(self, block: Block) -> list[Access]:
        """The accesses of the block's tasks: loads, then writes, then reads."""
        if not block.count:
            return []
        accesses = load_accesses(block, self.graph, self.known_names, self.tally)
        active = np.zeros(block.count, bool)
        is_always_run = not block.call.writes
        for region in block.call.writes:
            access = self.access(block, region, True, active, np.ones_like(active))
            if access is None:
                self.unknown_writes.add(region.tensor.name)
                is_always_run = True
            else:
                if self.may_be_fewer(block.call):
                    self.unknown_writes.add(region.tensor.name)
                accesses.append(access)
                active[access.task - block.base] = True
        # A task whose writes are all empty runs no body, and so reads nothing.
        runs = active | is_always_run
        for n, region in enumerate(block.call.reads):
            access = self.access(block, region, False, active, runs)
            if access is not None:
                function = block.call.function
                # All waits of a task from a queue are met before it starts.
                is_read_early = n in function.reads_before_wait
                early = is_read_early and not block.lane.queued(block.call)
                phase, is_gathered = EARLY if early else BODY, n in function.gathers
                accesses.append(replace(access, phase=phase, gathered=is_gathered))
        return accesses

    def access(
        self, block: Block, region: Region, write: bool, active: Mask, runs: Mask
    ) -> Access | None:
        """The boxes of `region` that the running tasks access; None if unknown. Known
        starts are checked in both cases."""
        # A region that starts beyond the edge is empty. This is an error if the task
        # reads it and writes something.
        strict = np.zeros(block.count, bool) if write else active
        try:
            wrong = self.outside(block, region, write, strict)
            if not self.known(region.parts):
                return None
            rank = np.full(block.count, block.rank)
            if region.rank is not None:
                rank = block.values(region.rank)
            low, size, extent = (
                rows(block, part)
                for part in (region.start, region.size, region.tensor.shape)
            )
        except IndexError:  # reported for the load itself
            return None
        except ArithmeticError as error:
            where = f"call {block.call.name}, {region}"
            self.fail(where, f"{where}: {error}", "correct the index expression")
            return None
        high = np.minimum(low + size, extent)
        keep = runs & ~wrong & (high > low).all(axis=0)
        if region.rank is not None:
            self.check_rank(block, (f"call {block.call.name},", region), rank)
            keep &= (rank >= 0) & (rank < self.world)
        return Access(
            region, write, block.tasks[keep], rank[keep], low[:, keep], high[:, keep]
        )

    def outside(self, block: Block, region: Region, write: bool, strict: Mask) -> Mask:
        """Tasks for which `region` begins outside of its tensor. Unknown starts are
        checked at run time. `strict`: also refuse a start at the tensor's end."""
        wrong = np.zeros(block.count, bool)
        starts: list[Array | None] = []
        for start, extent, is_range in zip(
            region.start, region.tensor.shape, region.kept_axes, strict=True
        ):
            starts.append(block.values(start) if self.known([start]) else None)
            at, end = starts[-1], extent.evaluate(block.env)
            if at is not None:
                beyond = (
                    (at > end) & (strict | start.is_loaded) if is_range else at >= end
                )
                wrong |= (at < 0) | beyond
        if wrong.any():
            t = int(np.flatnonzero(wrong)[0])
            starts_text = ", ".join("?" if at is None else str(at[t]) for at in starts)
            extents = [int(block.values(n)[t]) for n in region.tensor.shape]
            self.fail(
                ("region", block.call.name, region),
                f"{task_name(block, t)} {'writes' if write else 'reads'} {region} from "
                f"[{starts_text}], outside of {extents}",
                f"keep the start of {region} inside of the tensor",
                int(wrong.sum()),
            )
        return wrong
