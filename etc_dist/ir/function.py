"""Device functions: the tiled computations that a graph function calls."""

from __future__ import annotations

import dis
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property, lru_cache
from inspect import Parameter, signature
from pathlib import Path
from types import CodeType, MappingProxyType
from typing import Any

from etc_dist.errors import GraphError
from etc_dist.ir.expr import Const, Expr, wrap
from etc_dist.ir.operand import Operand

TENSOR, TRANSFER = "tensor", "transfer"
LANES = (TENSOR, TRANSFER)
LOAD, GATHER, COMPUTE, STORE = "load", "gather", "compute", "store"
PREPARE = "prepare"
ROLES = (PREPARE, LOAD, GATHER, COMPUTE, STORE)
SCRATCH_BYTES = 24576
"""Shared memory that a body on the tensor lane may use."""

MAX_INT, MAX_FLOAT = 2**31 - 1, 3.4028234e38
"""The largest constants of a CUDA body."""


@dataclass(frozen=True)
class TmaBox:
    """The box of the last two axes that one bulk tensor copy moves, in elements.

    large: rows of a second, larger box of the same operand; 0: there is none.
    rows: a number, or one that `Graph.let` named."""

    rows: int | Expr
    columns: int
    large: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.rows, Const):  # so that equal boxes compare equal
            object.__setattr__(self, "rows", self.rows.value)

    def at(self, env: Mapping[str, int]) -> TmaBox:
        """The box with its number of rows."""
        return replace(self, rows=int(wrap(self.rows).evaluate(env)))

    @property
    def small_and_large(self) -> tuple[TmaBox, ...]:
        """Internal: the box without `large`, then the large one, if there is one."""
        small = replace(self, large=0)
        return (small, replace(small, rows=self.large)) if self.large else (small,)


@dataclass(frozen=True)
class DeviceFunction:
    """A computation on one tile, as a NumPy body and an equivalent CUDA body.

    body(*reads, *writes): fills the writes. Its arguments are NumPy views of the call's
    regions, clipped at the edges. It is the executable specification. A keyword-only
    parameter gets the dim, named number or coordinate of its name, or the `rank`.
    source: the `.cuh` file that defines `template <class Task> struct <name>`: a path,
    or a name below `kernels/`.
    lane: "tensor" (the worker's 256 compute threads run a task together) or "transfer"
    (one warp runs a task, concurrently with the tensor lane).
    boxes: operands (by position: reads, then writes) that the device copies by bulk
    tensor copies, with the box of one copy.
    constants: named numbers the `.cuh` body sees as `Task::name`: an int, or a float
    for a Python float, or an array for a tuple of ints. Named numbers of the graph that
    are keyword-only parameters of the body are `Call::number_<name>(g)`.
    roles: the roles, of ROLES, that the CUDA half divides a task into, for other warps
    each; `kernels/worker/roles.cuh` describes them. None: the CUDA half is a body that
    the lane's threads run.
    shared: bytes of a worker's shared memory that the CUDA half uses, without the ring
    of stages.
    streams: reads (by position) that the load role may copy before the task's waits are
    met. Only done for inputs, at regions that depend on no data.
    gathers: reads (by position) of which a task reads only elements that other data
    selects. Their regions may include elements that no task writes. Every write to
    them must be ordered before the task.
    tile: operands (by position: reads, then writes) with the region that the CUDA body
    supports. Compilation for GPUs refuses other regions. Operands that are left out
    take any region.
    epilogue: the device function that the CUDA half applies to its results, as
    `Call::Epilogue`; `functions/epilogue.py` describes those of matmuls.
    reads_before_wait: reads (by position) that the CUDA body may do before the task's
    last wait is met (early reads). Only on the tensor lane. The CUDA body then gets a
    second argument: a function that waits for the last event, and returns false after
    an abort.
    loads_before_wait: the loads that determine a task's regions and notifications come
    before its last wait is met. The CUDA body gets the second argument then, too.
    far: a task may write and notify a rank of another host: one region, one element.
    Only `push_far` may, but the verifier, the executors, the code generator and the
    prediction treat such tasks in another way, and know hosts only by their numbers.
    starts: keyword-only parameters of the body -> the operand and the axis of whose
    region they get the first index. Only float8 matmuls have them: a view of weights
    does not show which rows it has, and `values=` have no coordinates. The CUDA body
    reads it from the region."""

    name: str
    body: Callable[..., None]
    source: str | Path
    lane: str
    reads: int
    writes: int
    boxes: Mapping[int, TmaBox] = field(default_factory=dict)
    constants: Mapping[str, int | float | tuple[int, ...]] = field(default_factory=dict)
    roles: Sequence[str] = ()
    shared: int = SCRATCH_BYTES
    streams: Sequence[int] = ()
    gathers: Sequence[int] = ()
    reads_before_wait: Sequence[int] = ()
    tile: Mapping[int, Operand] = field(default_factory=dict)
    epilogue: DeviceFunction | None = None
    loads_before_wait: bool = False
    far: bool = False
    starts: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def terms(self) -> str:
        """Internal: the properties that may differ between device functions of the same
        name."""
        boxes = [(n, *astuple(box)) for n, box in self.boxes.items()]
        numbers = (boxes, [*self.constants.items()])
        roles = (*self.roles, self.shared, *self.streams)
        tile = "; ".join(f"{n}: {operand}" for n, operand in self.tile.items())
        text = f"{self.name} {self.source} {numbers} {roles} {tile}"
        return text if self.epilogue is None else f"{text}; {self.epilogue.terms}"

    @property
    def begins_early(self) -> bool:
        """Internal: whether a task begins before its last wait is met."""
        return bool(self.reads_before_wait) or self.loads_before_wait

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Internal: the parameters of the body."""
        try:
            return tuple(signature(self.body).parameters.values())
        except (TypeError, ValueError):  # a built-in function without a signature
            return (Parameter("operands", Parameter.VAR_POSITIONAL),)

    @cached_property
    def keywords(self) -> tuple[str, ...]:
        """Internal: the keyword-only parameters of the body."""
        return tuple(
            p.name for p in self.parameters if p.kind is Parameter.KEYWORD_ONLY
        )

    @cached_property
    def defaults(self) -> frozenset[str]:
        """Internal: the keyword-only parameters that need no value."""
        return frozenset(
            p.name
            for p in self.parameters
            if p.name in self.keywords and p.default is not Parameter.empty
        )

    def __str__(self) -> str:
        return f"device function {self.name}"

    def __copy__(self) -> DeviceFunction:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceFunction:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self} cannot be pickled, as its body is Python code: call the function "
            "that makes it, or its graph, in each process"
        )

    def __post_init__(self) -> None:
        _check_operands(self)
        _check_names(self)
        _check_constants(self)
        _check_body(self)
        for name in ("boxes", "constants", "tile", "starts"):
            frozen = MappingProxyType(dict(sorted(getattr(self, name).items())))
            object.__setattr__(self, name, frozen)
        for name in ("gathers", "reads_before_wait", "roles", "streams"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_lane(self)


def device_function(
    *,
    source: str | Path,
    reads: int,
    writes: int,
    lane: str = TENSOR,
    constants: Mapping[str, int | float] | None = None,
    gathers: Sequence[int] = (),
    reads_before_wait: Sequence[int] = (),
    tile: Mapping[int, Operand] | None = None,
) -> Callable[[Callable[..., Any]], DeviceFunction]:
    """Make a device function of a NumPy body, body(*reads, *writes, *, values).

    The body gets NumPy views of the regions of a call, clipped at the tensors' edges,
    and fills the writes. Its keyword-only parameters get dims, named numbers and
    coordinates of the call, by name, or the `rank`.

    source: the `.cuh` file with the CUDA body: an absolute path, or a name below
        `kernels/`. Only a build for GPUs and the emulator read it.
    reads, writes: the numbers of operands of a call.
    lane: "tensor" (256 threads run a task) or "transfer" (one warp does, concurrently).
    constants: numbers that the CUDA body reads as `Task::name`.
    gathers: reads (by position) of which the body touches only elements that other
        operands select; the others may be unwritten.
    reads_before_wait: reads (by position) that the CUDA body may do before its task's
        last wait is met.
    tile: the regions that the CUDA body supports, by position of the operand.

    Raises GraphError for a body or arguments that do not fit each other.
    docs/language.md describes both bodies."""

    def decorate(body: Callable[..., Any]) -> DeviceFunction:
        function = DeviceFunction(
            name=body.__name__,
            body=body,
            source=source,
            lane=lane,
            reads=reads,
            writes=writes,
            constants={} if constants is None else constants,
            gathers=gathers,
            reads_before_wait=reads_before_wait,
            tile={} if tile is None else tile,
        )
        _check_parameters(function)
        return function

    return decorate


def _check_operands(function: DeviceFunction) -> None:
    if min(function.reads, function.writes) < 0:
        raise GraphError(
            f"{function} has a negative number of operands",
            where=str(function),
            wanted="reads= and writes= of 0 or more",
            got=f"reads={function.reads}, writes={function.writes}",
            fix="count the regions that the body is given: first reads, then writes",
        )
    every = function.reads + function.writes
    operand_positions = [n for o in function.tile.values() for n in (o.like, o.mirrors)]
    for name, positions, count in (
        ("gathers", [*function.gathers], function.reads),
        ("reads_before_wait", [*function.reads_before_wait], function.reads),
        ("streams", [*function.streams], function.reads),
        ("tile", [*function.tile], every),
        ("starts", [operand for operand, _ in function.starts.values()], every),
        ("like= or mirrors", [n for n in operand_positions if n is not None], every),
    ):
        if any(not 0 <= n < count for n in positions):
            raise GraphError(
                f"{name}= of {function} names an operand that does not exist",
                where=str(function),
                wanted=f"positions below {count}",
                got=str(positions),
                fix="count operands from 0: first reads, then writes",
            )


def _check_names(function: DeviceFunction) -> None:
    """A multiple or a part of a named extent needs an operand with this extent."""
    extents = [e for operand in function.tile.values() for e in operand.extents or ()]
    names = {e.name for e in extents if not e.is_scaled}
    bad = [str(e) for e in extents if e.is_scaled and not (e.name and e.name in names)]
    if bad:
        raise GraphError(
            f"tile= of {function} has a multiple or a part of an unknown extent",
            where=str(function),
            wanted="times= or per= with the name of an extent that has none of them",
            got=", ".join(bad),
            fix="give the extent that is multiplied or divided the same name",
        )


def is_name(text: str) -> bool:
    """Whether generated code can have this name."""
    return text.isidentifier() and text.isascii() and text[0] != "_"


def _check_constants(function: DeviceFunction) -> None:
    bad = [k for k in function.constants if not is_name(k)]
    bad += [function.name] * (not function.name.isascii())
    if bad:
        raise GraphError(
            f"{function} or its constants= has names that C++ cannot use",
            where=str(function),
            wanted="ASCII identifiers without a leading underscore",
            got=", ".join(map(repr, bad)),
            fix='rename them, as in constants={"kName": 3}',
        )
    large = [
        f"{name}={value}"
        for name, values in function.constants.items()
        for value in (values if isinstance(values, tuple) else (values,))
        if not abs(value) <= (MAX_FLOAT if isinstance(value, float) else MAX_INT)
    ]
    if large:
        raise GraphError(
            f"constants= of {function} has numbers that its CUDA body cannot hold",
            where=str(function),
            wanted="integers of 32 bits, and floats in the range of fp32",
            got=", ".join(large),
            fix="choose smaller numbers",
        )


def _check_parameters(function: DeviceFunction) -> None:
    """Refuses a body that cannot be called with all operands of a call."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p for p in function.parameters if p.kind in kinds]
    num_required = sum(p.default is Parameter.empty for p in positional)
    has_rest = any(p.kind is Parameter.VAR_POSITIONAL for p in function.parameters)
    num_operands = function.reads + function.writes
    if num_required > num_operands or (len(positional) < num_operands and not has_rest):
        raise GraphError(
            f"the body of {function} does not have a parameter for each operand",
            where=str(function),
            wanted=f"{num_operands} positional parameters: {function.reads} reads, "
            f"then {function.writes} writes",
            got=", ".join(p.name for p in positional) or "none",
            fix="correct reads= and writes=; dims and coordinates are keyword-only "
            "parameters, after a *",
        )


def _check_body(function: DeviceFunction) -> None:
    """Refuses `y = ...` where y is an operand that the body writes, and that it uses
    nowhere: then the operand stays as it was."""
    code = getattr(function.body, "__code__", None)
    if code is None:
        return
    output_names = code.co_varnames[function.reads : code.co_argcount]
    for name in output_names:
        if name in _only_stored(code):
            raise GraphError(
                f"the body of {function} does not write its operand {name}",
                where=str(function),
                wanted=f"{name}[...] = ..., which fills the operand's elements",
                got=f"{name} = ..., which makes a new array",
                fix=f"in {function.name}, assign to {name}[...]",
            )


@lru_cache(1024)  # factories make many functions of one body
def _only_stored(code: CodeType) -> set[object]:
    """The names that the code assigns to, and does not load."""
    names_by_kind: dict[str, set[object]] = {"LOAD": set(), "STORE": set()}
    for instruction in dis.get_instructions(code):
        kind, names = instruction.opname.partition("_")[0], instruction.argval
        names_by_kind.get(kind, set()).update(
            names if isinstance(names, tuple) else {names}
        )
    return names_by_kind["STORE"] - names_by_kind["LOAD"]


def _check_lane(function: DeviceFunction) -> None:
    faults = {
        f"lane in {LANES}": function.lane not in LANES,
        "no reads_before_wait= on the transfer lane": function.lane == TRANSFER
        and function.begins_early,
        "no roles= on the transfer lane": function.lane == TRANSFER and function.roles,
        f"roles of {ROLES}, with 'load' and 'compute'": function.roles
        and not {LOAD, COMPUTE} <= {*function.roles} <= {*ROLES},
        "streams= only with roles=": function.streams and not function.roles,
    }
    wanted = [rule for rule, broken in faults.items() if broken]
    if wanted:
        raise GraphError(
            f"{function} cannot run on a worker",
            where=str(function),
            wanted="; ".join(wanted),
            got=f"lane {function.lane!r}, "
            f"reads_before_wait {function.reads_before_wait}, "
            f"roles {function.roles}, streams {function.streams}",
            fix="use lane='tensor', or change these arguments of device_function",
        )
