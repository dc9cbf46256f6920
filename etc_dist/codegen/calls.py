"""The struct of a call as CUDA text: what differs from `CallDefaults` of
kernels/worker/defaults.cuh, and the tensors and events in its tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from etc_dist.codegen.bounds import conjunction, in_range, waits_in_range
from etc_dist.codegen.dynamic_queues import QUEUES, call_members, queue_numbers
from etc_dist.codegen.expression import Writer, extent_names, linear, text
from etc_dist.codegen.layout import Arguments
from etc_dist.codegen.members import (
    COORD,
    INDEX,
    Constant,
    constants,
    function,
    indexed,
    method,
    packed,
    table,
    wrapped,
)
from etc_dist.codegen.names import (
    axis_name,
    call_type,
    dim_name,
    event_function,
    pace_name,
    tensor_function,
)
from etc_dist.codegen.tma_boxes import bulk_maps
from etc_dist.errors import CodegenError
from etc_dist.ir.call import RANK, TASK, Call, row_major, waiting_exprs, working_exprs
from etc_dist.ir.event import EventRef, EventTensor
from etc_dist.ir.expr import Const, Expr, Op, Symbol
from etc_dist.ir.flagged_tensors import carried, counted, has_flags
from etc_dist.ir.loads import loads_of
from etc_dist.ir.tensor import Region, Tensor
from etc_dist.schedule.plan import QUEUE, Lane, Plan

ELEMENTS = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "float",
    "int32": "i32",
    "float8_e4m3fn": "e4m3",
}
OTHER_MEMBERS = {
    *("kCall", "kWorld", "kRoles"),
    *("Coord", "c", "g", "running", "scratch", "sync", "thread", "threads"),
}
"""The other names of a call that a body, or its text, uses."""
VARIANTS = {
    **dict.fromkeys(("kIsHalf", "kGated", "kReduces", "kWeightIsKN", "kIsPart"), 0),
    **dict.fromkeys(("kSplit", "kShared", "kHasBias", "kIsBiased"), 0),
    **dict.fromkeys(("kHasCorrection", "kHasPosition"), 0),
    "kWeights": 1,
}
"""Constants of device functions that are generated where they differ from these."""
FEW_NUMBERS = 8
"""A longer array is generated once."""


def tensor_text(tensor: Tensor) -> str:
    """The function that returns a tensor, that of rank `rank` if it is symmetric."""
    element = ELEMENTS[tensor.dtype]
    element = f"Flagged<{element}>" if tensor.flagged else element
    macro = "ETC_SYMMETRIC" if tensor.kind == "symmetric" else "ETC_TENSOR"
    return _row(
        macro, tensor.name, element, str(len(tensor.shape)), *map(text, tensor.shape)
    )


def event_text(events: EventTensor) -> str:
    """The function that returns an element, that of rank `rank` if it is cross-rank."""
    axes = [Symbol(f"i{n}", "task") for n in range(len(events.axes))]
    parameters = ["const Args& g", *["i32 rank"] * events.cross_rank]
    parameters += [f"i32 {axis.name}" for axis in axes]
    macro = "ETC_CROSS_RANK_EVENT" if events.cross_rank else "ETC_EVENT"
    return _row(macro, events.name, linear(axes, events.shape), *parameters)


def _row(macro: str, *arguments: str) -> str:
    return "\n".join(wrapped(f"{macro}({', '.join(arguments)})"))


def call_text(plan: Plan, lane: Lane, call: Call, arguments: Arguments) -> str:
    """The struct of a call."""
    body, epilogue = call.function, call.function.epilogue
    number = plan.graph.calls.index(call)
    flags = _flags(plan, call)
    own_constants, lines_of_arrays = _own_constants(plan, call)
    numbers = numbers_of(plan, lane, call)
    call = _counted(call)
    writer, loaded_lines = _loaded(call)
    base = f"Args, {number}"
    if lane.policy == QUEUE:
        base += f", {QUEUES[lane.name]}"
    lines = [f"struct {call_type(call.name)} : CallDefaults<{base}> {{"]
    using = f"  template <class Task> using Function = {body.name}<Task>;"
    if epilogue is not None:
        using += f" template <class Task> using Epilogue = {epilogue.name}<Task>;"
    lines.append(using)
    _check_names(call, numbers)
    roles = " | ".join(f"k{role.capitalize()}Role" for role in body.roles)
    nonzero_numbers = {k: v for k, v in numbers.items() if v != 0}
    role_constants = {"kRoles": roles} if roles else {}
    lines += constants({**role_constants, **nonzero_numbers, **own_constants})
    lines += lines_of_arrays
    axes = ", ".join(axis_name(a.symbol.name) for a in call.axes)
    lines.append(f"  struct Coord {{ i32 {axes}; }};")
    lines += _order(call, arguments)
    lines += _units(lane, call, arguments)
    lines += _keywords(plan, call)
    lines += _surplus(call)
    lines += loaded_lines
    lines += _tables(plan, call, arguments, writer)
    lines += flags
    lines += _checks(plan, call, writer)
    if lane.policy == QUEUE:
        lines += call_members(lane, call)
    return "\n".join([*lines, "};"])


def numbers_of(plan: Plan, lane: Lane, call: Call) -> dict[str, int]:
    """The constants of a call that have defaults."""
    flags = {"kHasFlags": int(has_flags(call)), "kFlagWaits": len(carried(call.waits))}
    call = _counted(call)
    of_queue = queue_numbers(lane, call)
    if lane.policy != QUEUE:
        of_queue = dict.fromkeys(of_queue, 0)
    return {
        "kReads": len(call.reads),
        "kWrites": len(call.writes),
        "kWaits": len(call.waits),
        "kFreeWaits": len(call.free_waits),
        "kNotifies": len(call.notifies),
        "kPeers": len(_peers(call)),
        "kLoads": int(call.is_loaded),
        "kLimit": limit(plan, call),
        "kCountIsGiven": int(call.limited is not None and not call.waits_for_count),
        "kMayBeIdle": int(_may_be_idle(call)),
        "kLoadsAhead": int(_loads_ahead(lane, call)),
        "kWaitsAhead": call.streams_after or 0,
        "kReadsBeforeWait": int(call.function.begins_early),
        "kNotifiesPeers": int(any(r.events.cross_rank for r in call.notifies)),
        "kNotifiesRanks": int(_notifies_ranks(call)),
        "kNotifiesWhen": int(any(r.guards for r in call.notifies)),
        "kFar": int(plan.has_far and call.function.far),
        **flags,
        **of_queue,
    }


def _tables(
    plan: Plan, call: Call, arguments: Arguments, writer: Writer
) -> Iterator[str]:
    """The rows of operands, waits, notifications and peers."""
    operands = [
        _operand(region, bulk_maps(call, n, arguments), writer)
        for n, region in enumerate((*call.reads, *call.writes))
    ]
    yield from table("operand", operands)
    if waits := [*call.free_waits, *call.loaded_waits]:
        yield from indexed("EventRef wait", [_wait(plan, r, writer) for r in waits])
    if notifies := call.notifies:
        yield from indexed("EventRef notify", [_element(r, writer) for r in notifies])
    if peers := [*map(writer.text, _peers(call))]:
        yield from indexed("i32 peer", peers)


def _checks(plan: Plan, call: Call, writer: Writer) -> Iterator[str]:
    """The range checks of loaded values."""
    checks = {
        "waits_in_range": waits_in_range(call, writer),
        "in_range": in_range(call, plan.graph.world_size, plan.has_far, writer),
    }
    for name, conditions in checks.items():
        if condition := conjunction(conditions):
            yield from method(f"bool {name}", condition, COORD)


def _check_names(call: Call, numbers: dict[str, int]) -> None:
    """Refuse constants of a device function or its epilogue that replace others."""
    reserved_names = {*numbers, *OTHER_MEMBERS}
    for body in (call.function, call.function.epilogue):
        if body is None:
            continue
        if clashes := [name for name in body.constants if name in reserved_names]:
            raise CodegenError(
                f"constants= of {body} has names that generated code uses",
                where=f"call {call.name}",
                wanted=f"names other than {', '.join(sorted(reserved_names))}",
                got=", ".join(clashes),
                fix="rename these constants",
            )
        reserved_names |= set(body.constants)


def _own_constants(plan: Plan, call: Call) -> tuple[dict[str, Constant], list[str]]:
    """Those of a device function and its epilogue, and the lines of long arrays. One of
    these is that of the first call that has it."""
    own_constants, lines = _constants_of(call), list[str]()
    for name, value in tuple(own_constants.items()):
        if isinstance(value, tuple) and len(value) > FEW_NUMBERS:
            calls = (c for lane in plan.lanes for c in lane.calls)
            first = next(c for c in calls if _constants_of(c).get(name) == value)
            del own_constants[name]
            place = f"{call_type(first.name)}::{name}"
            reference = f"  static constexpr auto& {name} = {place};"
            lines += constants({name: value}) if first is call else [reference]
    return own_constants, lines


def _constants_of(call: Call) -> dict[str, Constant]:
    functions = [f for f in (call.function, call.function.epilogue) if f is not None]
    every = {k: v for function in functions for k, v in function.constants.items()}
    return {k: v for k, v in every.items() if v != VARIANTS.get(k)}


def _loaded(call: Call) -> tuple[Writer, list[str]]:
    """The table of the values that a task loads, and a writer of its rows' names."""
    loads = loads_of([*waiting_exprs(call), *working_exprs(call)])
    names: dict[Expr, str] = {
        load: f"loaded<{n}>(g, c)" for n, load in enumerate(loads)
    }
    rows = (
        Writer(names={k: v for k, v in names.items() if k != load}).text(load)
        for load in loads
    )
    return Writer(names=names), table("loaded", rows, "i32") if loads else []


def _order(call: Call, arguments: Arguments) -> list[str]:
    """The coordinate of task t."""
    extents = [_extent(axis.extent, arguments) for axis in call.axes[1:]]
    if all(extents) and call.order == row_major(call.axes, TASK):
        value = f"row_major<Coord>({', '.join(['t', *extents])})"
        return method("Coord at", value, INDEX)
    writer = Writer(extent_names(call), arguments.divisor_texts)
    parts, writer = writer.named(call.order, "part")
    value = f"{{{', '.join(writer.text(e) for e in call.order)}}}"
    if not parts:
        return method("Coord at", value, INDEX)
    declared = ", ".join(f"part_{n} = {part}" for n, part in enumerate(parts))
    rows = *wrapped(f"    const i32 {declared};"), *wrapped(f"    return {value};")
    return function("Coord at", rows, INDEX)


def _extent(extent: Expr, arguments: Arguments) -> str:
    """A constant, or an extent that the host prepares to divide by; else empty."""
    if isinstance(extent, Const):
        return f"FixedExtent<{extent.value}>{{}}" if extent.value > 0 else ""
    divisor = arguments.divisor_texts.get(extent)
    return f"Extent{{{text(extent)}, {divisor}}}" if divisor else ""


def _units(lane: Lane, call: Call, arguments: Arguments) -> Iterator[str]:
    """Members by which a worker finds its task of a unit, and begins it in time."""
    if call.pace != Const(0):
        yield from method("i32 pace", f"g.{pace_name(call.name)}")
    is_queued = lane.policy == QUEUE
    if is_queued and call.waits and not lane.queued(call):
        yield from method("i32 tasks", text(call.tasks))
    if is_queued or (lane.has_loops and call.function.roles):
        tasks = text(lane.group_size(call))
        divisor = arguments.divisor_text(lane.group_size(call))
        yield from method("Group group", f"{{{tasks}, {divisor}}}")


def _keywords(plan: Plan, call: Call) -> Iterator[str]:
    """The keyword-only parameters of the body that are dims or values of the call."""
    dims = {symbol.name for symbol in plan.graph.dims}
    dims |= {symbol.name for symbol, _ in plan.graph.derived}
    values = {n: f"g.{dim_name(n)}" for n in call.function.keywords if n in dims}
    values |= {name: text(value) for name, value in call.values}
    yield from packed(
        f"  ETC_NUMBER({name}, {value})" for name, value in values.items()
    )


def _surplus(call: Call) -> Iterator[str]:
    """Members for the tasks that do not exist: the place of the count, and its value;
    the end of the block that task t is in."""
    if call.limited is None or call.count is None:
        return
    place = linear(call.count.index, call.count.shape)
    yield from method("i32 count_place", place, COORD)
    yield from method("i32 count", text(call.count), COORD)
    along, block = axis_name(call.limited.symbol.name), call.block[1]
    yield from method("bool is_surplus", f"c.{along} >= count", "Coord c, i32 count")
    end = Writer(set()).text((TASK // block + 1) * block)
    yield from method("i32 block_end", end, INDEX)


def _operand(region: Region, maps: list[str], writer: Writer) -> str:
    tensor = region.tensor
    rank = "g.rank" if region.rank is None else writer.text(region.rank)
    place = f"g, {rank}" if tensor.kind == "symmetric" else "g"
    axes = zip(region.start, region.size, tensor.shape, strict=True)
    parts = [_part(start, size, extent, writer) for start, size, extent in axes]
    if maps:
        parts.insert(0, f"{{{', '.join(f'&g.{name}' for name in maps)}}}")
    verb = "bulk" if maps else "region"
    return f"{tensor_function(tensor.name)}({place}).{verb}({', '.join(parts)})"


def _part(start: Expr, size: Expr, extent: Expr, writer: Writer) -> str:
    """The part of an axis."""
    if start == Const(0) and size == extent:
        return "kAll"
    if size == Const(1):
        return writer.text(start)
    if isinstance(start, Op) and start.name == "*" and start.right == size:
        return f"tile_of({writer.text(start.left)}, {writer.text(size)})"
    return f"span_of({writer.text(start)}, {writer.text(size)})"


def _peers(call: Call) -> list[Expr]:
    """The ranks that a task writes to or notifies, for which it has to wait."""
    plain = [region for region in call.writes if not region.tensor.flagged]
    ranks = [region.rank for region in plain if region.rank is not None]
    for ref in call.notifies:
        ranks += [] if ref.rank is None else [ref.guarded(ref.rank, RANK)]
    return list(dict.fromkeys(ranks))


def _counted(call: Call) -> Call:
    """The call without events that flagged tensors carry, which nothing counts."""
    waits, notifies = counted(call.waits), counted(call.notifies)
    return replace(call, waits=waits, notifies=notifies)


def _flags(plan: Plan, call: Call) -> list[str]:
    """The events that flagged tensors carry, for errors."""
    rows = [_wait(plan, ref, Writer(set())) for ref in carried(call.waits)]
    return indexed("EventRef flag_wait", rows) if rows else []


def _wait(plan: Plan, ref: EventRef, writer: Writer) -> str:
    return _element(ref, writer, f".expects({writer.text(ref.expects)})")


def _element(ref: EventRef, writer: Writer, expects: str = "") -> str:
    """An element, for tasks that wait for it or notify it."""
    index = [writer.text(part) for part in ref.index]
    if ref.events.cross_rank:
        index.insert(0, "g.rank" if ref.rank is None else writer.text(ref.rank))
    element = f"{event_function(ref.events.name)}({', '.join(['g', *index])}){expects}"
    if not ref.guards:
        return element
    return f"{writer.text(ref.holds)} ? {element} : no_event()"


def _may_be_idle(call: Call) -> bool:
    """Whether data, or the number of rows of a rank, may leave a task without anything
    to write, to be checked before the body runs. Functions with roles have their own
    check."""
    may_be_empty = [
        r.tensor.has_own_rows or any(e.is_loaded for e in (*r.start, *r.size))
        for r in call.writes
    ]
    return bool(may_be_empty) and all(may_be_empty) and not call.function.roles


def _loads_ahead(lane: Lane, call: Call) -> bool:
    """Whether streamed operands can be loaded before a task's waits are met, or but the
    first ones: no task writes them, and which part of them a task reads depends on no
    data, or on some that is known by then."""
    # NOTE: nor in an unqueued call of a dynamic plan, although the proof allows for it.
    streams = call.function.streams
    if not streams or lane.policy == QUEUE or not call.waits:
        return False
    if call.is_loaded and call.streams_after is None:
        return False
    return all(call.reads[n].tensor.kind == "input" for n in streams)


def _notifies_ranks(call: Call) -> bool:
    """Whether all notifications are for the same element, on several ranks."""
    elements = {(r.events.name, r.index) for r in call.notifies}
    is_conditional = any(r.guards for r in call.notifies)
    return len(call.notifies) > 1 and len(elements) == 1 and not is_conditional


def limit(plan: Plan, call: Call) -> int:
    """A number for the tensor that the call's loaded extent is from; 0 without one."""
    return 0 if call.count is None else 1 + limits(plan).index(call.count.tensor)


def limits(plan: Plan) -> list[str]:
    """The tensors that loaded extents are from."""
    counts = (call.count for call in plan.graph.calls)
    return [*dict.fromkeys(count.tensor for count in counts if count is not None)]
