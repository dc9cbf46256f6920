"""Device functions: the tiled computations that a graph function calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from inspect import Parameter, signature
from pathlib import Path
from types import MappingProxyType
from typing import Any

from etc_dist.errors import GraphError
from etc_dist.ir.expr import is_whole
from etc_dist.ir.given import require, require_function
from etc_dist.ir.names import RESERVED
from etc_dist.ir.operand import Operand

TENSOR, TRANSFER = "tensor", "transfer"
LANES = (TENSOR, TRANSFER)


@dataclass(frozen=True)
class TmaBox:
    """The box of the last two axes that one bulk tensor copy moves, in elements.

    halves: of both halves of a matrix's rows, eight of either in turn; the operand
    names those of the first half, and the next operand the same of the second.
    large: rows of another box of the operand, for copies that may take more at once."""

    rows: int
    columns: int
    halves: bool = False
    large: int = 0

    @property
    def small_and_large(self) -> tuple[TmaBox, ...]:
        """Each box alone; the second only where there is a large one."""
        small = replace(self, large=0)
        return (small, replace(small, rows=self.large)) if self.large else (small,)


@dataclass(frozen=True)
class DeviceFunction:
    """A computation on one tile: the same meaning in NumPy and in CUDA.

    body(*reads, *writes): NumPy views of the call's regions, clipped at the edges; it
    fills the writes. It is the executable specification. Keyword-only parameters get
    the dim, named number or coordinate of their name, and `rank`.
    source: the `.cuh` file that defines `template <class Task> struct <name>`: a path,
    or a name below `kernels/`.
    lane: "tensor" (the worker's 256 compute threads run a task together) or "transfer"
    (one warp runs a task, beside the tensor lane).
    cluster: workers that run one task together (2 share operands by TMA multicast).
    parts: counter increments that one notification is made of on the device, where
    several warps finish their share of a task independently.
    boxes: operands (by position: reads, then writes) that the device reads or writes by
    bulk tensor copies, with the box of one copy.
    constants: named integers the `.cuh` body sees as `Task::name`.
    workspace: bytes of local scratch for each worker.
    gathers: reads (by position) of which a task reads only elements that other data
    selects. Their regions may include elements that no task writes; all that tasks
    write of them must be written, and ordered, before the task.
    tile: operands (by position: reads, then writes) with the region that the CUDA body
    serves; a call with another region is refused where its program is compiled for
    GPUs. Operands that are left out take any region.
    reads_before_wait: reads (by position) that the CUDA body may do once all waits of
    the task but the last are met (early reads). Only on the tensor lane. The CUDA body
    then gets a second argument: a function that waits for the last event, and returns
    false after an abort.
    """

    name: str
    body: Callable[..., None]
    source: str | Path
    lane: str
    reads: int
    writes: int
    cluster: int = 1
    parts: int = 1
    boxes: Mapping[int, TmaBox] = field(default_factory=dict)
    constants: Mapping[str, int] = field(default_factory=dict)
    workspace: int = 0
    gathers: Sequence[int] = ()
    reads_before_wait: Sequence[int] = ()
    tile: Mapping[int, Operand] = field(default_factory=dict)

    @property
    def terms(self) -> str:
        """What two device functions of one name may differ in."""
        boxes = [(n, *astuple(box)) for n, box in self.boxes.items()]
        numbers = (self.parts, self.workspace, boxes, [*self.constants.items()])
        tile = "; ".join(f"{n}: {operand}" for n, operand in self.tile.items())
        return f"{self.name} {self.source} {numbers} {tile}"

    @cached_property
    def keywords(self) -> tuple[str, ...]:
        """The keyword-only parameters of the body that have no default."""
        try:
            parameters = signature(self.body).parameters.values()
        except (TypeError, ValueError):  # a built-in function without a signature
            return ()
        return tuple(
            p.name
            for p in parameters
            if p.kind is Parameter.KEYWORD_ONLY and p.default is Parameter.empty
        )

    def __str__(self) -> str:
        return f"device function {self.name}"

    def __post_init__(self) -> None:
        where = str(self)
        _check_source(self.source, where)
        _check_operands(self, where)
        _check_constants(self.constants, where)
        _check_tile(self, where)
        for name in ("boxes", "constants", "tile"):
            frozen = MappingProxyType(dict(sorted(getattr(self, name).items())))
            object.__setattr__(self, name, frozen)
        for name in ("gathers", "reads_before_wait"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.lane not in LANES or self.cluster not in (1, 2):
            raise GraphError(
                f"device function {self.name} asks for what no worker has",
                where=f"device function {self.name}",
                wanted=f"lane in {LANES}, cluster 1 or 2 (2 on the tensor lane)",
                got=f"lane {self.lane!r}, cluster {self.cluster}",
                fix="choose one of these",
            )
        if self.lane == TRANSFER and self.reads_before_wait:
            raise GraphError(
                f"device function {self.name} has early reads on the transfer lane",
                where=f"device function {self.name}",
                wanted="no reads_before_wait= on the transfer lane",
                got=f"reads_before_wait = {self.reads_before_wait}",
                fix="move it to the tensor lane, or read after all waits",
            )
        if self.lane == TRANSFER and self.cluster != 1:
            raise GraphError(
                f"device function {self.name} asks for a cluster of warps",
                where=f"device function {self.name}",
                wanted="cluster 1 on the transfer lane",
                got=f"cluster {self.cluster}",
                fix="move it to the tensor lane or use cluster 1",
            )


def device_function(
    *,
    source: str | Path,
    reads: int,
    writes: int,
    lane: str = TENSOR,
    constants: Mapping[str, int] | None = None,
    gathers: Sequence[int] = (),
    reads_before_wait: Sequence[int] = (),
    tile: Mapping[int, Operand] | None = None,
) -> Callable[[Callable[..., Any]], DeviceFunction]:
    """Make a device function of a NumPy body; see `DeviceFunction` for the terms."""

    def decorate(body: Callable[..., Any]) -> DeviceFunction:
        require_function(body, "@device_function(...)")
        return DeviceFunction(
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

    return decorate


def _check_source(source: str | Path, where: str) -> None:
    # Whether it exists is the build's to say: proofs and CPUs do without it.
    require(
        isinstance(source, (str, Path)),
        source,
        f"the source of {where} is no path",
        where=where,
        wanted="the path of a .cuh file, or its name below kernels/",
        fix='write source=Path(__file__).with_suffix(".cuh")',
    )


def _check_operands(made: DeviceFunction, where: str) -> None:
    for name in ("reads", "writes"):
        count = getattr(made, name)
        require(
            is_whole(count) and count >= 0,
            count,
            f"{name}= of {where} is no count",
            where=where,
            wanted="a whole number, 0 or more",
            fix="count the regions that the body is given: first reads, then writes",
        )
    for name in ("gathers", "reads_before_wait"):
        named = getattr(made, name)
        require(
            isinstance(named, Sequence)
            and all(is_whole(n) and 0 <= n < made.reads for n in named),
            named,
            f"{name}= of {where} names what it does not read",
            where=where,
            wanted=f"a list of positions of its {made.reads} reads",
            fix=f"name operands that are read, counted from 0: {name}=[0]",
        )


def _check_tile(made: DeviceFunction, where: str) -> None:
    count = made.reads + made.writes
    require(
        isinstance(made.tile, Mapping)
        and all(
            is_whole(n) and 0 <= n < count and isinstance(operand, Operand)
            for n, operand in made.tile.items()
        ),
        made.tile,
        f"tile= of {where} does not describe its operands",
        where=where,
        wanted=f"a dict from positions, 0 to {count - 1}, to Operand(...)",
        fix="write, for example, tile={0: Operand((64, 'k'))}",
    )


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and name not in RESERVED


def _check_constants(constants: Mapping[str, int], where: str) -> None:
    require(
        isinstance(constants, Mapping)
        and all(_is_name(k) and is_whole(v) for k, v in constants.items()),
        constants,
        f"constants= of {where} are no named integers",
        where=where,
        wanted="a dict from identifiers, which are no C++ words, to whole numbers",
        fix='write constants={"kName": 3}',
    )
