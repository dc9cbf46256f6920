"""Programs: a compiled graph function that all ranks run together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, cast
from weakref import finalize

import numpy as np

from etc_dist.cache import Recent
from etc_dist.errors import (
    ArgumentError,
    GraphError,
    WaitTimeoutError,
    WorldError,
    as_refusal,
)
from etc_dist.runtime.array_checks import Expected, bind_dims, check_arrays
from etc_dist.runtime.arrays import Array, empty_like, inspect
from etc_dist.runtime.last_run import Executor, LastRun
from etc_dist.runtime.run_check import RunCheck, cannot_capture
from etc_dist.runtime.stream import is_capturing, stream_for
from etc_dist.runtime.trace import Trace
from etc_dist.schedule import Plan
from etc_dist.schedule.plan import Choice, Policy
from etc_dist.verify.proof import prove
from etc_dist.verify.verify import Verified
from etc_dist.world import World
from etc_dist.world.agreement import sign

MOST_PROOFS = 4096
"""The proved shapes that a program remembers."""
GPU_WORKERS = 132
"""On the CPU backend, a plan is proved for the workers of an H200, too."""
MOST_AGREED = 4096
"""The dims at which a program remembers to be ready on all ranks."""
MOST_CHOICES = 32
"""The dims whose choices by a policy a program remembers."""

CapacityHint = Callable[[Mapping[str, int]], Sequence[Mapping[str, int]]]
"""The dims to allocate memory for when a call at some dims needs more."""


@dataclass
class Bound:
    """The tensors of a call. `signature` is equal on ranks that make the same call;
    `launch` is the backend's form of it, made at the first run. own_rows: the number
    of rows of this rank, where it may differ between ranks; rows: then what this rank
    wants the dim to be that is the largest of all."""

    arrays: Mapping[str, Array]
    dims: Mapping[str, int]
    signature: int
    text: str
    own_rows: Mapping[str, int]
    rows: int
    launch: Any = None

    def describe(self) -> str:
        """The call as text, for errors."""
        return self.text

    def without_owners(self) -> Bound:
        """The same call, without references to the caller's arrays."""
        bare = {name: replace(a, owner=None) for name, a in self.arrays.items()}
        return replace(self, arrays=bare)


class Program:
    """A graph function compiled for a world; made by `etc_dist.compile`.

    One program serves every shape. It owns its symmetric memory, which grows with the
    largest shape. Every rank makes the same calls in the same order. As a context
    manager it closes at the end of the block, unless an exception leaves it. A program
    that all ranks have dropped is freed by `World.free_dropped`.

    plan, world: what it runs, and where. source: the generated CUDA."""

    def __init__(
        self,
        plan: Plan,
        world: World,
        executor: Executor,
        source: str,
        number: int,
        proofs: Mapping[str, Mapping[str, Any]] | None = None,
    ):
        self.plan, self.world, self.source = plan, world, source
        self._proofs = proofs
        # The number distinguishes programs of the same graph.
        self._identity = f"{number} {plan.graph.digest()}"
        self._number = number
        self._last = LastRun(plan.graph.name, number, world, executor)
        self._finalizer = finalize(self, self._last.drop)
        self._finalizer.atexit = False
        self._proved: Recent[tuple[int, ...], Verified] = Recent(MOST_PROOFS)
        self._largest = (
            plan.graph.own_dims[1].name if plan.graph.own_dims is not None else ""
        )
        self._agreed: Recent[tuple[int, ...], bool] = Recent(MOST_AGREED)
        self._is_closed = False
        self._run_check = RunCheck(plan, world, executor.workers)
        self._capacity_hint: CapacityHint = lambda dims: (dims,)

    @property
    def _executor(self) -> Executor:
        return self._last.executor

    @property
    def backend(self) -> str:
        """Which backend runs this program: "cuda" or "cpu"."""
        return self.world.backend

    @property
    def workers(self) -> int:
        """Resident workers of a rank: thread blocks, or simulated on CPUs."""
        return self._executor.workers

    def run(
        self,
        *,
        stream: Any = None,
        dims: Mapping[str, int] | None = None,
        **arrays: Any,
    ) -> dict[str, Any]:
        """Run on arrays by tensor name. All inputs and states are required; dims follow
        from their shapes, except those that no array has as an axis: `dims`. States are
        updated in place. An output that is not given is allocated, by the library of
        the other arrays. Returns the outputs by name, valid in the order of `stream`
        (default: the current one).

        Raises on every rank: ArgumentError if any rank's arrays do not fit, TypeError
        if one is not an array; GraphError, DeadlockError or RaceError if the program is
        not correct at this shape or, where runs are checked, with this data. If an
        earlier run was ended, its error: ArgumentError for indices out of range in the
        data of some rank, else WaitTimeoutError."""
        name = self.plan.graph.name
        with self.world.exclusive:
            try:
                first = next(iter(arrays.values()), None)
                stream = stream_for(self.world.backend, stream, first)
                bound, outputs = self.bind_arrays(arrays, dims, stream)
            except Exception as error:
                self.world.refuse(as_refusal(error, f"the arguments of {name}"))
            self.launch(bound, stream)
            return outputs

    def bind(self, arrays: Mapping[str, Array], dims: Mapping[str, int]) -> Bound:
        """Internal: a call on checked arrays, by tensor name. Local."""
        graph = self.plan.graph
        own_rows = graph.own_rows_of(arrays)
        alike = ", ".join(f"{k}={v}" for k, v in dims.items() if k != self._largest)
        text = f"{graph.name}({alike})"
        text += f" of {', '.join(dict.fromkeys(t.dtype for t in graph.given()))}"
        signature = sign(f"{self._identity} {text}")
        text += f", program {self._number}"
        rows = dims.get(self._largest, 0)
        return Bound(arrays, dims, signature, text, own_rows, rows)

    def bind_arrays(
        self, arrays: Mapping[str, Any], dims: Mapping[str, int] | None, stream: Any
    ) -> tuple[Bound, dict[str, Any]]:
        """Internal: a call on arrays as of `run`, which it checks, and its outputs.
        Local. Raises ArgumentError for arrays that are missing or that the graph does
        not have."""
        graph = self.plan.graph
        required_names = [t.name for t in graph.given()]
        names = {t.name for t in graph.arguments()}
        missing = [name for name in required_names if name not in arrays]
        strange = [name for name in arrays if name not in names]
        if missing or strange:
            raise ArgumentError(
                f"the arguments do not fit {graph.name}",
                where=graph.name,
                wanted=f"inputs {', '.join(t.name for t in graph.inputs())}; "
                f"states {', '.join(t.name for t in graph.states()) or 'none'}; "
                f"if given, outputs {', '.join(t.name for t in graph.outputs())}",
                got=f"missing {missing or 'none'}, unknown {strange or 'none'}",
                fix="pass each array by its name; values that are not arrays are "
                "options of the graph function",
            )
        checked_arrays = {
            name: inspect(name, value).of_dtype(graph.tensor(name).dtype)
            for name, value in arrays.items()
        }
        dims = bind_dims(graph, checked_arrays, dims)
        own_rows = graph.own_rows_of(checked_arrays)
        expected = self._expected({**dims, **own_rows})
        outputs: dict[str, Any] = {}
        for tensor in graph.outputs():
            name = tensor.name
            if name in arrays:
                outputs[name] = arrays[name]
                continue
            owner, dtype = self._like(tensor.dtype, checked_arrays)
            outputs[name] = empty_like(owner, expected[name].shape, stream, dtype)
            checked_arrays[name] = inspect(name, outputs[name]).of_dtype(tensor.dtype)
        every, device = [*expected.values()], self.world.device
        may_be_empty = self.backend == "cpu" or 0 in own_rows.values()
        check_arrays(
            graph.name, every, checked_arrays, device, may_be_empty=may_be_empty
        )
        return self.bind(checked_arrays, dims), outputs

    def launch(self, bound: Bound, stream: Any = None) -> None:
        """Internal: run a bound call on CuPy's current stream, or on `stream` (a CuPy
        stream). Where ranks may have different numbers of rows, and none has any,
        nothing runs. The caller has entered `world.exclusive` for the whole call. If
        the settings require it, wait for the run and check its data: RaceError,
        DeadlockError or GraphError on all ranks."""
        self.check_open()
        executor = self._executor
        is_growing = is_ready = False
        try:
            self._last.refuse_after_failure()
            is_checked = self._run_check.is_wanted
            if is_checked and is_capturing(self.backend, stream):
                self.world.refuse(cannot_capture(bound.text))
            if bound.own_rows:
                most = self._agree_on_rows(bound)
                if most == 0:
                    return
                is_ready = self._agreed.get(tuple(bound.dims.values())) is not None
            if bound.launch is None or not executor.is_current(bound.launch):
                is_growing = self._make_ready(bound)
                if is_growing and is_capturing(self.backend, stream):
                    self.world.refuse(cannot_capture_first_call(bound.text))
            # NOTE: all ranks know whether they have agreed on these dims before.
            if not is_ready:
                self._last.match(bound.signature, bound.describe)
                if bound.own_rows:
                    self._agreed.put(tuple(bound.dims.values()), True)
        except (WaitTimeoutError, WorldError) as error:
            fault = self._last.end_of_run(error)
            raise fault from fault.__cause__
        if is_growing:
            self._grow(bound)
        self._last.begin()
        executor.launch(bound.launch, stream)
        if is_checked:
            self.synchronize()
            read = partial(executor.loaded, bound.launch)
            self._run_check.check(read, bound.dims)
        else:
            self._run_check.warn()

    def synchronize(self) -> None:
        """Wait for the last run on every rank. If it was ended on one of them, raises
        on all: WaitTimeoutError for a wait that was not met, ArgumentError for indices
        out of range in its data."""
        with self.world.exclusive:
            self.check_open()
            self.await_run()

    def await_run(self) -> None:
        """Internal: as `synchronize`, after a launch in the same call."""
        fault = self._last.agree_on_end()
        if fault is not None:
            raise fault

    def trace(self) -> Trace:
        """The timeline of the last run, of all ranks (needs settings.trace)."""
        with self.world.exclusive:
            self.check_open()
            own_trace = self._executor.trace()
            return Trace.merge(cast(list[Trace], self.world.gather(own_trace)))

    def show(self, **dims: int) -> str:
        """Graph and plan as stable text, the parts that are not proved, and the memory
        that is kept for captured CUDA graphs; with dims, the numbers at that shape."""
        workers = self.workers if dims else None
        plan = self.plan.show(workers, **dims)
        more = self._run_check.show() + self._executor.show()
        return self.plan.graph.show() + plan + more

    def close(self) -> None:
        """Free the program's memory; collective, idempotent. Then raises the error of
        the last run, as `synchronize` does."""
        if self._is_closed:
            return
        with self.world.exclusive:
            fault = self._last.await_end()
            self._is_closed = True
            self._last.close()
            self._finalizer.detach()
        if fault is not None:
            raise fault

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()

    def _expected(self, dims: Mapping[str, int]) -> dict[str, Expected]:
        """The arrays of a call at `dims`, by name."""
        graph = self.plan.graph
        env = graph.environment(dims, self.world.rank)
        expected, by_element = {}, graph.accessed_by_element()
        for tensor in graph.arguments():
            shape = tuple(int(extent.evaluate(env)) for extent in tensor.shape)
            is_written = tensor.kind != "input"
            axes = tuple(map(str, tensor.shape))
            expected[tensor.name] = Expected(
                tensor.name,
                shape,
                tensor.dtype,
                is_written,
                axes=axes,
                by_element=tensor.name in by_element,
                over=tensor.over,
            )
        return expected

    def _like(self, dtype: str, arrays: Mapping[str, Array]) -> tuple[Any, str]:
        """The owner of an array whose library allocates an output, and the output's
        dtype; no dtype if that is the array's."""
        alike = (array for array in arrays.values() if array.dtype == dtype)
        if (array := next(alike, None)) is not None:
            return array.owner, ""
        if (array := next(iter(arrays.values()), None)) is not None:
            return array.owner, dtype
        return np.empty(0) if self.backend == "cpu" else None, dtype

    def _agree_on_rows(self, bound: Bound) -> int:
        """The largest number of rows of all ranks, which the call gets."""
        rows = self._last.largest(bound.signature, bound.rows, bound.describe)
        if bound.dims[self._largest] != rows:
            bound.dims, bound.launch = {**bound.dims, self._largest: rows}, None
        return rows

    def _make_ready(self, bound: Bound) -> bool:
        """Prove and prepare a call; True if the program needs more memory for it.

        Local, and before the ranks agree on the call: no peer has started to run while
        this fails or is slow on one rank."""
        try:
            self._prove(bound.dims)
            bound.launch = self._prepare(bound)
        except Exception as error:
            self.world.refuse(as_refusal(error, f"a proof or plan of {bound.text}"))
        return bound.launch is None

    def _prepare(self, bound: Bound) -> Any:
        return self._executor.prepare(bound.arrays, {**bound.dims, **bound.own_rows})

    def _grow(self, bound: Bound) -> None:
        """Allocate memory for a call, of the same size on all ranks."""

        def prepare() -> None:
            bound.launch = self._prepare(bound)

        self.synchronize()  # growing would hide that an earlier run failed
        self._executor.grow(*self._capacity_hint(bound.dims))
        self.world.agree_done(prepare)

    def _prove(self, dims: Mapping[str, int]) -> None:
        key = tuple(dims.values())
        if self.world.settings.verify and self._proved.get(key) is None:
            self._proved.put(key, self._proof(dims))

    def _proof(self, dims: Mapping[str, int]) -> Verified:
        """The proof for the workers that run; on the CPU backend also for those of a
        GPU, unless events order all accesses: more workers order fewer."""
        settings = self.world.settings
        proof = fault = None
        try:
            proof = prove(self.plan, dims, self.workers, settings, self._proofs)
        except GraphError as error:
            fault = error
        if self.backend == "cpu" and (proof is None or not proof.by_events):
            prove(self.plan, dims, GPU_WORKERS, settings)
        if proof is None:
            raise cast(GraphError, fault)
        return proof

    def check_open(self) -> None:
        """Internal: raise WorldError if it is closed."""
        if self._is_closed:
            raise WorldError(
                "the program is closed",
                where=self.plan.graph.name,
                wanted="an open program",
                got="a call after close()",
                fix="compile it again",
            )


def set_capacity_hint(program: Program, hint: CapacityHint) -> None:
    """Internal, for layers: allocate memory for `hint(dims)` at once."""
    program._capacity_hint = hint


def set_policy(program: Program, policy: Policy) -> None:
    """Internal, for operations: choose the dims that no array has by `policy`, which is
    called once for equal dims: a choice takes milliseconds."""
    choices_by_key: Recent[tuple[object, ...], Sequence[Choice]] = Recent(MOST_CHOICES)

    def choose(dims: Mapping[str, int], workers: int) -> Sequence[Choice]:
        key = (workers, *sorted(dims.items()))
        choices = choices_by_key.get(key)
        if choices is None:
            choices = policy(dims, workers)
            choices_by_key.put(key, choices)
        return choices

    program.plan = replace(program.plan, policy=choose)


def symmetric_bytes(program: Program, name: str) -> Any:
    """Internal, for tests and benchmarks: this rank's bytes (uint8) of a symmetric
    tensor, as laid out for the last run."""
    program.check_open()
    return program._executor.symmetric(name)


def cannot_capture_first_call(call: str) -> WorldError:
    """The error of a capture that would allocate memory."""
    return WorldError(
        "a program cannot be captured before it has memory for the call",
        where=call,
        wanted="a call of this size, or a larger one, before capturing",
        got="none; operations have programs of their own for some sizes",
        fix="make the call once, then capture it",
    )
