"""Programs: a compiled graph function that all ranks run together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol, cast

import numpy as np

from etc_dist.errors import (
    ArgumentError,
    EtcDistError,
    RangeRecord,
    WaitRecord,
    WaitTimeoutError,
    WorldError,
)
from etc_dist.ir import Tensor
from etc_dist.runtime.arrays import (
    Array,
    bind_dims,
    described,
    empty_like,
    inspect,
    place_on,
)
from etc_dist.runtime.faults import Record, out_of_range
from etc_dist.runtime.stream import stream_for
from etc_dist.runtime.trace import Trace
from etc_dist.schedule import Plan
from etc_dist.schedule.proof import prove
from etc_dist.world import World
from etc_dist.world.meeting import sign

FAULT_SECONDS = 2.0
"""What a rank whose run failed waits for its peers, beyond the time in which theirs
must have failed too."""

Heard = tuple[bool, list[Record]]
"""Whether a rank's run failed, and what ended it there."""
Room = Callable[[Mapping[str, int]], Sequence[Mapping[str, int]]]
"""The dims that room is made for at once, if there is too little for some dims."""


class Executor(Protocol):
    """What a backend does for a program; `runtime/gpu.py` and `runtime/cpu`."""

    workers: int

    def needs_memory(self, dims: Mapping[str, int]) -> bool: ...
    def grow(self, *shapes: Mapping[str, int]) -> None: ...
    def is_capturing(self, stream: Any = None) -> bool: ...
    def prepare(self, arrays: Mapping[str, Array], dims: Mapping[str, int]) -> Any: ...
    def is_current(self, launch: Any) -> bool: ...
    def launch(self, launch: Any, stream: Any = None) -> None: ...
    @property
    def failed(self) -> bool: ...
    def records(self) -> list[Record]: ...
    def reset(self) -> None: ...
    def synchronize(self) -> None: ...
    def finish(self) -> None: ...
    def trace(self) -> Trace: ...
    def symmetric(self, name: str) -> Any: ...
    def close(self) -> None: ...


@dataclass
class Bound:
    """A call whose arrays fit the program. `signature` is equal on ranks that make the
    same call; `launch` is what the backend made of it, at the first run."""

    arrays: Mapping[str, Array]
    dims: Mapping[str, int]
    signature: int
    text: str
    launch: Any = None

    def describe(self) -> str:
        return self.text

    def without_owners(self) -> Bound:
        """The same call, keeping none of the caller's arrays alive."""
        bare = {name: replace(a, owner=None) for name, a in self.arrays.items()}
        return replace(self, arrays=bare)


class Program:
    """A graph function compiled for a world; made by `etc_dist.compile`.

    One program serves every shape; it owns its symmetric memory, which grows with the
    largest shape seen. Collective: every rank makes the same calls in the same order.
    """

    def __init__(
        self, plan: Plan, world: World, executor: Executor, source: str, number: int
    ):
        self.plan, self.world, self.source = plan, world, source
        self._executor = executor
        # The number tells this program from another one of the same graph.
        self._identity = f"{number} {plan.graph.digest()}"
        self._number = number
        world.hold(executor)
        self._proved: set[tuple[int, ...]] = set()
        self._closed = False
        self.room: Room = lambda dims: (dims,)

    @property
    def backend(self) -> str:
        """Which backend runs this program: "cuda" or "cpu"."""
        return self.world.backend

    @property
    def workers(self) -> int:
        """Resident workers a rank."""
        return self._executor.workers

    def run(self, *, stream: Any = None, **arrays: Any) -> dict[str, Any]:
        """Run on arrays by tensor name. Inputs are needed; outputs are made where they
        are not given, if an input's library and dtype can be copied. Returns the
        outputs by name, valid in stream order. Raises ArgumentError on every rank if
        any rank's arrays do not fit, and if an earlier run was ended: ArgumentError if
        the data of some rank named what is not there, else WaitTimeoutError."""
        name = self.plan.graph.name
        try:
            bound, outputs = self._bind_all(arrays)
            stream = stream_for(
                self.world.backend, stream, next(iter(arrays.values()), None)
            )
        except Exception as error:
            self.world.refuse(as_refusal(error, f"the arguments of {name}"))
        self.launch(bound, stream)
        return outputs

    def bind(self, arrays: Mapping[str, Array], dims: Mapping[str, int]) -> Bound:
        """Check arrays against the graph's tensors at `dims`. Local: nothing is
        launched and no peer is asked."""
        graph = self.plan.graph
        self._check((*graph.inputs(), *graph.outputs()), arrays, dims)
        text = f"{graph.name}({', '.join(f'{k}={v}' for k, v in dims.items())})"
        text += f" of {', '.join(dict.fromkeys(t.dtype for t in graph.inputs()))}"
        signature = sign(f"{self._identity} {text}")
        return Bound(arrays, dims, signature, f"{text}, program {self._number}")

    def launch(self, bound: Bound, stream: Any = None) -> None:
        """Run a bound call on CuPy's current stream, or on `stream` (a CuPy stream)."""
        self.check_open()
        executor = self._executor
        grows = False
        try:
            if executor.failed:
                # NOTE: peers, too, know by this class that they have to recover.
                self.world.refuse(self._timeout(executor.records()))
            if bound.launch is None or not executor.is_current(bound.launch):
                grows = self._make_ready(bound)
                if grows and executor.is_capturing(stream):
                    self.world.refuse(_without_room(bound.text))
            self.world.meet(bound.signature, bound.describe)
        except WaitTimeoutError:
            self._recover(self._hear())
        except WorldError as error:
            if executor.failed:  # whoever did not come: what failed first is the run
                raise self._failure(executor.records()) from error
            raise
        if grows:
            self._grow(bound)
        executor.launch(bound.launch, stream)

    def synchronize(self) -> None:
        """Wait for the last run on every rank. If it was ended on one of them, raises
        on all: WaitTimeoutError for a wait that was not met, ArgumentError for data
        that named what is not there."""
        self.check_open()
        self._executor.synchronize()
        heard = self._hear()
        if any(part is None or part[0] for part in heard):
            self._recover(heard)

    def trace(self) -> Trace:
        """The timeline of the last run, of all ranks (needs settings.trace)."""
        mine = self._executor.trace()
        return Trace.merge(cast(list[Trace], self.world.gather(mine)))

    def symmetric(self, name: str) -> Any:
        """This rank's bytes (uint8) of a symmetric tensor, as laid out for the last
        run: to poison or to look at."""
        self.check_open()
        return self._executor.symmetric(name)

    def show(self, **dims: int) -> str:
        """Graph and plan as stable text; with dims, the numbers at that shape."""
        workers = self.workers if dims else None
        return self.plan.graph.show() + self.plan.show(workers, **dims)

    def close(self) -> None:
        """Free the program's memory; collective, idempotent."""
        if not self._closed:
            self._closed = True
            self._executor.close()

    def _bind_all(self, arrays: Mapping[str, Any]) -> tuple[Bound, dict[str, Any]]:
        graph = self.plan.graph
        names = {t.name for t in (*graph.inputs(), *graph.outputs())}
        missing = [t.name for t in graph.inputs() if t.name not in arrays]
        strange = [name for name in arrays if name not in names]
        if missing or strange:
            raise ArgumentError(
                f"the arguments do not fit {graph.name}",
                where=f"{graph.name}, rank {self.world.rank}",
                wanted=f"inputs {', '.join(t.name for t in graph.inputs())}",
                got=f"missing {missing or 'none'}, unknown {strange or 'none'}",
                fix="name every input tensor of the graph",
            )
        seen = {name: inspect(name, value) for name, value in arrays.items()}
        dims = bind_dims(graph, seen)
        env = graph.environment(dims, self.world.rank)
        outputs: dict[str, Any] = {}
        for tensor in graph.outputs():
            if tensor.name not in arrays:
                like = next((a for a in seen.values() if a.dtype == tensor.dtype), None)
                if like is None:
                    self._check(graph.inputs(), seen, dims)
                    raise ArgumentError(
                        f"output {tensor.name} cannot be made",
                        where=f"{graph.name}, rank {self.world.rank}",
                        wanted=f"an input of dtype {tensor.dtype} to follow",
                        got="none",
                        fix=f"pass {tensor.name}=",
                    )
                shape = tuple(int(s.evaluate(env)) for s in tensor.shape)
                outputs[tensor.name] = empty_like(like, shape)
                seen[tensor.name] = inspect(tensor.name, outputs[tensor.name])
            else:
                outputs[tensor.name] = arrays[tensor.name]
        return self.bind(seen, dims), outputs

    def _check(
        self,
        tensors: Sequence[Tensor],
        arrays: Mapping[str, Array],
        dims: Mapping[str, int],
    ) -> None:
        """Raise ArgumentError unless the arrays of these tensors, inputs first, fit at
        `dims`."""
        graph = self.plan.graph
        env = graph.environment(dims, self.world.rank)
        faults = []
        for tensor in tensors:
            shape = tuple(int(s.evaluate(env)) for s in tensor.shape)
            faults += self._array_faults(tensor, shape, arrays.get(tensor.name))
        faults = faults or _overlaps(tensors, arrays)
        if faults:
            raise ArgumentError(
                f"the arguments do not fit {graph.name}",
                where=f"{graph.name}, rank {self.world.rank}, "
                f"{', '.join(f'{k}={v}' for k, v in dims.items())}",
                wanted="; ".join(wanted for wanted, _ in faults),
                got="; ".join(got for _, got in faults),
                fix="correct these arrays",
            )

    def _array_faults(
        self, tensor: Tensor, shape: tuple[int, ...], array: Array | None
    ) -> list[tuple[str, str]]:
        device = self.world.device
        name = tensor.name if array is None else array.name
        wanted = f"{name} {list(shape)} {tensor.dtype}, {place_on(device)}"
        if array is None:
            return [(wanted, f"no {name}")]
        fits = array.shape == shape and array.dtype == tensor.dtype
        if not fits or not array.lies_on(device):
            return [(wanted, described(array))]
        host = array.owner if isinstance(array.owner, np.ndarray) else None
        if tensor.kind == "output" and host is not None and not host.flags.writeable:
            return [(f"{name} that can be written", "a read-only array")]
        if device != "cpu" and (
            array.pointer % 16 or shape[-1] * tensor.itemsize % 16 or 0 in shape
        ):
            rows = f"{name} with 16-byte aligned, non-empty rows"
            return [(rows, f"{array} at {array.pointer:#x}")]
        return []

    def _make_ready(self, bound: Bound) -> bool:
        """Prove and prepare a call; True if the program has to grow for it.

        Local and before the ranks meet: what fails or is slow on one rank finds no peer
        already running, and ranks need not all have forgotten the call."""
        try:
            self._prove(bound.dims)
            grows = self._executor.needs_memory(bound.dims)
            if not grows:
                bound.launch = self._executor.prepare(bound.arrays, bound.dims)
        except Exception as error:
            self.world.refuse(as_refusal(error, f"a proof or plan of {bound.text}"))
        return grows

    def _grow(self, bound: Bound) -> None:
        """Make room for a call, on all ranks: their memory has always the same size."""

        def prepare() -> None:
            bound.launch = self._executor.prepare(bound.arrays, bound.dims)

        self.synchronize()  # growing would hide that an earlier run failed
        self._executor.grow(*self.room(bound.dims))
        self.world.agree_done(prepare)

    def _prove(self, dims: Mapping[str, int]) -> None:
        key = tuple(dims.values())
        if self.world.settings.verify and key not in self._proved:
            prove(self.plan, dims, self.workers, self.world.settings)
            self._proved.add(key)

    def _hear(self) -> list[Heard | None]:
        """From each rank: whether its run failed, and its records; None from ranks that
        are silent."""
        failed = self._executor.failed
        own: Heard = (failed, self._executor.records() if failed else [])
        limit = 2 * self.world.settings.wait_limit + FAULT_SECONDS if failed else None
        return cast("list[Heard | None]", self.world.gather(own, limit))

    def _failure(
        self, records: list[Record], silent: Sequence[int] = ()
    ) -> ArgumentError | WaitTimeoutError:
        # Data out of range on one rank is why others wait in vain.
        strayed = [r for r in records if isinstance(r, RangeRecord)]
        return out_of_range(strayed) if strayed else self._timeout(records, silent)

    def _timeout(
        self, records: list[Record], silent: Sequence[int] = ()
    ) -> WaitTimeoutError:
        shown = "; ".join(map(str, records[:8])) or "records of other ranks"
        if silent:
            shown += f"; ranks that answer no more: {', '.join(map(str, silent))}"
        return WaitTimeoutError(
            f"a run of {self.plan.graph.name} was ended: a wait was not met in time",
            where=f"{self.plan.graph.name} on {self.world.size} ranks",
            wanted=f"every event within {self.world.settings.wait_limit} s",
            got=shown,
            fix="look for a rank that died, was late or made another call; if ranks "
            "may be further apart than this, raise ETC_DIST_WAIT_LIMIT",
            records=[r for r in records if isinstance(r, WaitRecord)],
        )

    def _recover(self, heard: list[Heard | None]) -> NoReturn:
        """All ranks: clear the counters, raise what ended the run."""
        self._executor.finish()
        records = [r for part in heard if part for r in part[1]]
        silent = [rank for rank, part in enumerate(heard) if part is None]
        if not silent:
            self.world.barrier()
            self._executor.reset()
            self.world.barrier()
        raise self._failure(records, silent)

    def check_open(self) -> None:
        """Raise WorldError if it is closed."""
        if self._closed:
            raise WorldError(
                "the program is closed",
                where=self.plan.graph.name,
                wanted="an open program",
                got="a call after close()",
                fix="compile it again",
            )


def as_refusal(error: Exception, what: str) -> EtcDistError:
    """The error to refuse a call with: foreign ones are put into four parts."""
    if isinstance(error, EtcDistError):
        return error
    refusal = ArgumentError(
        f"{what} cannot be used",
        where="before the launch, on the rank that is named",
        wanted="no error while a call is made ready",
        got=f"{type(error).__name__}: {error}",
        fix="mend what that error names; nothing was launched on any rank",
    )
    refusal.__cause__ = error
    return refusal


def _overlaps(
    tensors: Sequence[Tensor], arrays: Mapping[str, Array]
) -> list[tuple[str, str]]:
    """What is wanted and got of outputs that share memory with one before them."""
    seen = [arrays[tensor.name] for tensor in tensors]
    return [
        (f"{y.name} apart from {x.name}", f"{y.name} overlaps {x.name}")
        for place, y in enumerate(seen)
        if tensors[place].kind == "output"
        for x in seen[:place]
        if y.overlaps(x)
    ]


def _without_room(text: str) -> WorldError:
    return WorldError(
        "a program cannot be captured before it has room for the call",
        where=text,
        wanted="a call of this size, or a larger one, before capturing",
        got="none; layers have programs of their own for some sizes",
        fix="make the call once, then capture it",
    )
