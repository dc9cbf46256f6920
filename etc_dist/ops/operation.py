"""Operations: calls with arrays by position, bound to the programs that run them.

An operation binds, a program runs: `ArgumentTable.bind` inspects and checks the arrays
of a call, `Operation` chooses the program and remembers the call, `Program` runs it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn, Self, TypeVar, cast

from etc_dist.compiler import check_options, compile, world_or_current
from etc_dist.errors import WorldError, as_refusal
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import GraphFunction
from etc_dist.ops.argument_table import ArgumentTable, CallArguments, Known
from etc_dist.ops.deterministic import check_deterministic
from etc_dist.ops.scaled_weight import (
    ACTIVATIONS,
    FLOAT8,
    ScaledWeight,
    arrays_of,
    check_activations,
)
from etc_dist.ops.tile_model import FAMILY, FLOAT8_FAMILY
from etc_dist.ops.tuning import Tuning, tuning_of
from etc_dist.program import (
    Bound,
    Program,
    cannot_capture_first_call,
    set_capacity_hint,
    set_policy,
)
from etc_dist.runtime.arrays import UNKNOWN, empty_like, identity
from etc_dist.runtime.stream import is_capturing, stream_for
from etc_dist.schedule.plan import Choice
from etc_dist.world import World
from etc_dist.world.agreement import sign

REMEMBERED_CALLS = 256
"""Calls whose argument blocks are kept, so that repeating one costs microseconds."""


Capacity = Callable[[str, Mapping[str, int], int], Sequence[Mapping[str, int]]]
"""The dims to allocate memory for when a call needs more, from the layout of the
weights, the dims of the call, and the workers of a GPU."""


@dataclass(frozen=True)
class Candidate:
    """A graph that an operation may compile, and the dims at which it is used."""

    graph: Callable[..., GraphFunction]
    options: Mapping[str, Any] = field(default_factory=dict)
    serves: Callable[[Mapping[str, int]], bool] = lambda dims: True
    capacity: Capacity | None = None
    policy: Callable[[Tuning, str, Mapping[str, int], int], Sequence[Choice]] | None = (
        None
    )
    """Chooses the dims of the graph that no array has, from the tuning of the GPUs, the
    layout of the weights, the other dims, and the workers of a GPU."""
    over_hosts: bool = False
    """Whether the graph can be made for ranks on several hosts."""
    schedule: str | None = None
    """The program's schedule, if it is not the operation's."""


@dataclass(frozen=True)
class Kind:
    """The key of the program that serves a call."""

    candidate: int
    dtype: str
    w_layout: str


class Operation:
    """Base of the fused collectives and layers: a table of arguments, and candidates.
    The first candidate that serves a call's dims runs it.

    Owns its programs and their buffers. Making, calling and closing one is collective.
    A context manager that closes it, unless an exception leaves the block.

    A subclass names the shapes of its arrays and overrides `candidates`. Its
    constructor sets `options`, and `weights` by `_hold`, before it calls this one.
    """

    inputs: Sequence[str] = ()
    """Internal: name and shape of each input, the weights' last: "x [rows, k]"."""
    output = ""
    """Internal: the same of the output, or of several: "out [m, n], state [m]"."""
    transposable = ""
    """Internal: the input that may be a transposed view."""
    scalable: Sequence[str] = ()
    """Internal: the inputs that may be a ScaledWeight."""
    over: Mapping[str, str] = {}
    """Internal: the input that an output may be."""
    sizes: Mapping[str, Any] = {}
    """Internal: tile sizes of the main graph, see `with_sizes`."""
    options: Mapping[str, Any] = {}
    """Internal: equal on all ranks, beside those that all operations have."""
    weights: tuple[Any, ...] = ()
    """Internal: the last inputs of each call, if the operation holds them. If some have
    the dtype of the others, all candidates are compiled at once, otherwise each at its
    first call."""
    known = Known()
    """Internal: what is the same in each call."""

    def __init__(
        self,
        *,
        world: World | None = None,
        schedule: str = "static",
        trace: bool | None = None,
        deterministic: str = "run",
    ):
        self.world = world = world_or_current(world)
        self._schedule, self._trace = schedule, trace
        self.deterministic = deterministic
        self._programs: dict[Kind, Program] = {}
        self._last: Program | None = None
        self._is_closed = False
        self._calls: OrderedDict[Any, tuple[Program, Bound]] = OrderedDict()
        self._output_shapes: dict[Any, Sequence[tuple[int, ...]]] = {}
        agreed = {**self.options, **self.sizes, "schedule": schedule}
        agreed["deterministic"] = deterministic
        name = type(self).__name__
        with world.exclusive:
            with world.refusing(f"the options of {name}"):
                check_options(schedule, trace, name)
                check_deterministic(deterministic)
                self._table = self.table(world.size, **self.options)
                self._candidates = self.candidates()
            self._agree(_listed({name: agreed[name] for name in sorted(agreed)}))
            if self.weights and self.known.dtype:
                for place in reversed(range(len(self._candidates))):
                    dtype, w_layout = self.known.dtype, self.known.w_layout
                    self._compile(Kind(place, dtype, w_layout))

    @classmethod
    def table(cls, ranks: int, **options: Any) -> ArgumentTable:
        """Internal: the arguments on `ranks` ranks, with options of the operation."""
        return ArgumentTable(
            cls.__name__,
            ranks,
            cls.inputs,
            cls.output,
            transposable=cls.transposable,
            scalable=cls.scalable,
            quantizes=options.get("activations") == FLOAT8,
            over=cls.over,
        )

    def candidates(self) -> Sequence[Candidate]:
        """Internal: the programs of which the first that serves a call runs it."""
        raise NotImplementedError

    def _hold(self, world: World, *weights: Any, **options: Any) -> None:
        """Check and keep the last inputs of each call. Raises on all ranks."""
        with world.refusing(f"the arguments of {type(self).__name__}"):
            table = self.table(world.size, **options)
            self.known, self.weights = table.hold(weights, world.device), weights

    @property
    def program(self) -> Program:
        """The program of the last call; before a call, that of the main graph."""
        program = self._last or next(iter(self._programs.values()), None)
        return program or self._refuse_early("program", "no call")

    def show(self, **dims: int) -> str:
        """Graph, plan and what is not proved of the program that serves a call with
        these dims, the numbers at that shape, and the chosen tiles with the reasons. If
        several programs serve them (dtypes, layouts of weights), the one of the last
        call is shown. Without dims, shows `program`, without numbers. WorldError before
        a call has compiled it."""
        if not dims:
            return self.program.show()
        dims = {**self.known.dims, **dims}
        self._table.check_dims(dims)
        programs = self._programs.items()
        matches = (
            program
            for kind, program in sorted(
                programs, key=lambda entry: entry[1] != self._last
            )
            if kind.candidate == self._place(dims)
        )
        program = next(matches, None) or self._refuse_early(
            f"show({_listed(dims)})", "no call that the same program serves"
        )
        names = [dim.name for dim in program.plan.graph.dims if dim.name in dims]
        return program.show(**{name: dims[name] for name in names})

    def synchronize(self) -> None:
        """Wait for the last call on every rank; raises its error. Collective."""
        with self.world.exclusive:
            self._check_open()
            for program in self._programs.values():
                program.synchronize()

    def close(self) -> None:
        """Free the buffers; collective, idempotent."""
        with self.world.exclusive:
            self._is_closed = True
            self._calls.clear()
            with ExitStack() as stack:
                for program in self._programs.values():
                    stack.callback(program.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()

    def call(self, inputs: Sequence[Any], out: Any = None, stream: Any = None) -> Any:
        """Internal: run on these inputs, followed by the weights; returns the output.
        Of an operation with several, `out` is None or a tuple, and the result a tuple.
        Arrays and errors as for `MatmulReduceScatter`."""
        world, inputs = self.world, (*inputs, *self.weights)
        num_outputs = len(self._table.outputs)
        outs = out if num_outputs > 1 and out is not None else (out,) * num_outputs
        with world.exclusive:
            try:
                self._check_open()
                stream = stream_for(world.backend, stream, inputs[0])
                is_scaled = any(type(value) is ScaledWeight for value in inputs)
                arrays = arrays_of(inputs) if is_scaled else inputs
                key = tuple(map(identity, arrays))
                if (shapes := self._output_shapes.get(key)) is not None:
                    outs = tuple(
                        empty_like(inputs[0], shape, stream) if out is None else out
                        for out, shape in zip(outs, shapes, strict=True)
                    )
                entry = self._calls.get((key, *map(identity, outs)))
                if entry is None:
                    arguments = self._table.bind(
                        inputs, outs, self.known, stream, world.device
                    )
            except Exception as error:
                world.refuse(as_refusal(error, f"the arguments of {self._table.name}"))
            if entry is not None:
                self._last, bound = entry
                self._last.launch(bound, stream)
                return outs if len(outs) > 1 else outs[0]
            if arguments.is_empty and not self._table.own_dim:
                self._agree("of no rows")
            else:
                self._run_new(arguments, key, stream)
            outs = arguments.outs
            return outs if len(outs) > 1 else outs[0]

    def _run_new(self, arguments: CallArguments, key: Any, stream: Any) -> None:
        """Run a call that is not remembered, and remember it."""
        dims = arguments.dims
        place = self._place(dims)
        kind = Kind(place, arguments.dtype, arguments.w_layout)
        program = self._programs.get(kind)
        if program is None:
            if is_capturing(self.world.backend, stream):
                self.world.refuse(cannot_capture_first_call(self._table.name))
            own_dim = self._table.own_dim
            shape = _listed({name: n for name, n in dims.items() if name != own_dim})
            self._agree(f"first call, {shape}, {kind.dtype}, w_layout={kind.w_layout}")
            program = self._compile(kind)
        graph = program.plan.graph
        dims = program.plan.chosen(dims, program.workers)
        arguments = replace(arguments, dims=dims)
        tensors = arguments.tensors(graph, self.world.rank)
        bound = program.bind(tensors, arguments.graph_dims(graph))
        self._last = program
        program.launch(bound, stream)
        out_keys = tuple(map(identity, arguments.outs))
        if UNKNOWN in (*out_keys, *key):
            return
        if len(self._output_shapes) >= REMEMBERED_CALLS:
            self._output_shapes.clear()
        shapes = [arguments.arrays[shape.name].shape for shape in self._table.outputs]
        self._output_shapes[key] = shapes
        self._calls[key, *out_keys] = program, bound.without_owners()
        if len(self._calls) > REMEMBERED_CALLS:
            self._calls.popitem(last=False)

    def _place(self, dims: Mapping[str, int]) -> int:
        """The position of the first candidate that serves a call."""
        candidates = enumerate(self._candidates)
        return next(place for place, candidate in candidates if candidate.serves(dims))

    def _agree(self, text: str) -> None:
        """Raise on every rank if the ranks make different steps of this operation."""
        text = f"{self._table.name}({text})"
        self.world.match_call(sign(text), lambda: text)

    def _compile(self, kind: Kind) -> Program:
        """Compile a candidate; collective."""
        candidate = self._candidates[kind.candidate]
        options = {**candidate.options, "dtype": kind.dtype}
        if kind.w_layout != "nk":
            options["w_layout"] = kind.w_layout
        if candidate.over_hosts:
            options["local_size"] = self.world.local_size
        with self.world.refusing(f"the options of {self._table.name}"):
            graph = candidate.graph(self.world.size, **options)
        policy = None
        if candidate.policy is not None:
            tuning = tuning_of(self.world)
            policy = partial(candidate.policy, tuning, kind.w_layout)
        schedule = candidate.schedule or self._schedule
        program = compile(graph, self.world, schedule=schedule, trace=self._trace)
        if candidate.capacity is not None:
            hint, workers = candidate.capacity, program.workers
            set_capacity_hint(program, lambda dims: hint(kind.w_layout, dims, workers))
        if policy is not None:
            set_policy(program, policy)
        self._programs[kind] = program
        return program

    def _refuse_early(self, name: str, got: str) -> NoReturn:
        raise WorldError(
            f"{self._table.name} has no program yet",
            where=f"{self._table.name}.{name}",
            wanted="a call before, which compiles the program",
            got=got,
            fix="make a call first",
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise WorldError(
                "the program is closed",
                where=self._table.name,
                wanted=f"an open {self._table.name}",
                got="a call after close()",
                fix=f"make a new {self._table.name}, or call it before close()",
            )


class ScalableOperation(Operation):
    """An operation by weights that may be scaled, with the option `activations`."""

    activations = ACTIVATIONS[0]

    def __init__(
        self,
        *,
        world: World | None = None,
        schedule: str = "static",
        trace: bool | None = None,
        deterministic: str = "run",
        activations: str = "16-bit",
    ):
        world = world_or_current(world)
        with world.refusing(f"the options of {type(self).__name__}"):
            check_activations(activations)
        self.activations = activations
        self.options = {**self.options, "activations": activations}
        super().__init__(
            world=world, schedule=schedule, trace=trace, deterministic=deterministic
        )

    @property
    def family(self) -> Sequence[TileShape]:
        """Internal: the shapes of the tiles of its programs."""
        return FLOAT8_FAMILY if self.activations == FLOAT8 else FAMILY


class WeightOperation(ScalableOperation):
    """An operation on x and the weight w [N, K], which may be a transposed view, or
    scaled."""

    transposable = "w"
    scalable = ("w",)

    def __call__(self, x: Any, w: Any, out: Any = None, *, stream: Any = None) -> Any:
        """Run on x and w; returns `out`, or a new array. Collective."""
        return self.call((x, w), out, stream)


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


Kept = TypeVar("Kept", bound=Operation)


def kept(world: World, kind: type[Kept], **options: Any) -> Kept:
    """The operation of `world` with these options, made at the first use."""
    # By repr: options that cannot be hashed are refused by the operation, on all ranks.
    key = kind, *map(repr, options.values())
    operations = cast("dict[object, Kept]", world.kept)
    operation = operations.get(key)
    if operation is None:
        operation = operations[key] = kind(world=world, **options)
    return operation


def with_sizes(kind: type[Kept], **sizes: Any) -> type[Kept]:
    """Internal, for tests and the CPU backend: the operation with other tile sizes. The
    sizes of a GPU's kernels are fixed; others are refused there."""
    return cast("type[Kept]", type(kind.__name__, (kind,), {"sizes": sizes}))


def shapes_up_to(name: str, most: int) -> Capacity:
    """Capacity for all dims in which `name` is up to `most`: a smaller one may need
    more memory than a larger one, which is split into fewer slices."""
    return lambda _, dims, __: [{**dims, name: n} for n in range(1, most + 1)]
