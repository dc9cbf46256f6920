"""Plan -> CUDA source: includes, named constants, index maps and lists of calls.

No logic is generated: all control flow is in `kernels/`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etc_dist.codegen.bounds import conjunction, in_range, waits_in_range
from etc_dist.codegen.boxes import boxes
from etc_dist.codegen.dynamic_queues import (
    QUEUES,
    call_members,
    event_struct,
    lane_queue,
    releases,
)
from etc_dist.codegen.expression import extent_names, linear, text
from etc_dist.codegen.layout import (
    MAX_SHARED_BYTES,
    MOST_STAGE_OFFSET,
    Arguments,
    notification_unit,
    periods,
    shared_memory,
)
from etc_dist.codegen.members import block, constant, indexed, method, select
from etc_dist.codegen.names import (
    axis_name,
    call_type,
    dim_name,
    events_name,
    loop_type,
    pace_name,
    tensor_name,
    units_name,
)
from etc_dist.codegen.tiles import row_multiples, tile_errors
from etc_dist.errors import CodegenError
from etc_dist.ir.call import RANK, TASK, Call
from etc_dist.ir.event import EventRef
from etc_dist.ir.expr import Const
from etc_dist.ir.function import (
    FORWARD,
    FORWARD_BYTES,
    TENSOR,
    TRANSFER,
    DeviceFunction,
)
from etc_dist.ir.tensor import Tensor
from etc_dist.schedule.loops import Item, Loop
from etc_dist.schedule.plan import QUEUE, TICKET, Lane, Plan

ELEMENTS = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "float",
    "int32": "i32",
    "float8_e4m3fn": "e4m3",
}
TASK_MEMBERS = {"Coord", "c", "g", "running", "scratch", "sync", "thread", "threads"}
"""What kernels/worker/task.cuh adds to the members of a call."""
MAX_NEAR = 32
"""The most ranks of a host: a worker has one word with a bit for each that has
started."""
ENTRY, QUIET = "etc_dist_program", "etc_dist_quiet"
"""The kernel; that of programs with far ranks which waits until all messages of this
rank have arrived."""
FAR_HEADER, FAR_TRANSPORT = "far/nvshmem.cuh", "Nvshmem"
"""The transport to far ranks: its header, and the struct there."""


@dataclass(frozen=True)
class Source:
    """Generated text, with all that a launch of it needs."""

    text: str
    entry: str
    arguments: Arguments
    cluster: int
    shared_bytes: int
    """Shared memory of a worker."""
    workspace: int
    sources: tuple[Path, ...]
    traced: bool
    has_far: bool
    """Whether it is linked with the transport to far ranks."""
    row_multiples: Mapping[Tensor, int]
    """The number that the row length of a tensor must be a multiple of."""

    @property
    def digest(self) -> str:
        """16 hex digits that differ between texts."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        """The graph, its number of ranks and the schedule, of the first line."""
        return title_of(self.text)


def title_of(text: str) -> str:
    """The title of a generated text, from its first line."""
    return text.partition("\n")[0].removeprefix("// ")


def generate(plan: Plan, *, trace: bool = False, check: bool = True) -> Source:
    """The source of `plan`: equal plans give equal text. Raises CodegenError for plans
    that no kernel supports. With `check`, also for regions that the CUDA bodies do not
    support; the CPU backend runs these."""
    graph = plan.graph
    if plan.near > MAX_NEAR:
        raise CodegenError(
            f"graph {graph.name} has too many ranks",
            where=f"plan {graph.name}",
            wanted=f"at most {MAX_NEAR} ranks on a host",
            got=str(plan.near),
            fix="start fewer ranks on each host",
        )
    if plan.has_far and _is_dynamic(plan):
        raise CodegenError(
            f"graph {graph.name} has a dynamic plan over several hosts",
            where=f"plan {graph.name}",
            wanted='the schedule "static" on GPUs of several hosts: a notification '
            "from another host cannot release tasks, as no code of this GPU runs then",
            got=f"the schedule {plan.schedule!r}",
            fix='pass schedule="static", or set ETC_DIST_BACKEND=cpu',
        )
    if check:
        for error in tile_errors(graph):
            raise error
    arguments = Arguments.of(plan)
    calls = [c for lane in plan.lanes for c in lane.calls]
    _check_roles(plan)
    functions = [c.function for c in calls]
    functions += [f.epilogue for f in functions if f.epilogue is not None]
    _check_sources(functions)
    own = sorted({str(function.source) for function in functions})
    users = tuple(Path(s) for s in own if Path(s).is_absolute())
    constants = _constants(plan, calls, trace)
    headers = (*([FAR_HEADER] if plan.has_far else []), "worker/worker.cuh")
    blocks = [
        f"// {graph.name} on {graph.world_size} ranks, {plan.schedule} schedule",
        "\n".join(f'#include "{name}"' for name in (*headers, *own)),
        "namespace etc {",
        "\n".join(f"constexpr int {k} = {v};" for k, v in constants.items()),
        arguments.text(),
    ]
    if _is_dynamic(plan):
        blocks += [lane_queue(lane) for lane in plan.lanes]
        blocks += [event_struct(plan, events) for events in graph.events]
    for lane in plan.lanes:
        for call in lane.calls:
            number = graph.calls.index(call)
            blocks.append(_call(plan, lane, call, number, arguments))
    if _is_dynamic(plan):
        blocks += releases(plan)
    blocks += [_loop(*member, arguments) for member in periods(plan)]
    blocks += [_program(plan, constants), "}  // namespace etc", _entry(plan)]
    return Source(
        text="\n\n".join(blocks) + "\n",
        entry=ENTRY,
        arguments=arguments,
        cluster=plan.cluster,
        shared_bytes=constants["kSharedBytes"],
        workspace=FORWARD_BYTES * any(FORWARD in c.function.roles for c in calls),
        sources=users,
        traced=trace,
        has_far=plan.has_far,
        row_multiples=row_multiples(graph),
    )


def _check_roles(plan: Plan) -> None:
    """Refuse calls of functions with roles that no worker can run."""
    graph, lane = plan.graph, plan.lane(TENSOR)
    calls = [c for c in lane.calls if c.function.roles]
    if early := [c for c in calls if c.function.reads_before_wait]:
        raise CodegenError(
            f"graph {graph.name} has a function with roles that reads early",
            where=f"plan {graph.name}: {', '.join(c.name for c in early)}",
            wanted="no reads_before_wait= of a function with roles=",
            got="; ".join(f"{c.name}: {c.function.reads_before_wait}" for c in early),
            fix="omit reads_before_wait=; name inputs in streams= to load them ahead",
        )
    if far := [
        f"{c.name} writes {region}"
        for c in calls
        for n, region in enumerate(c.writes, len(c.reads))
        if region.rank not in (None, RANK) and not _reaches_peers(c, n)
    ]:
        raise CodegenError(
            f"graph {graph.name} has a GEMM that writes to a peer's memory",
            where=f"plan {graph.name}",
            wanted="results in this rank's memory, except of matmul_send and of the "
            "epilogue store_on_ranks",
            got="; ".join(far),
            fix="write to this rank's memory, and send that by a call of push_rows()",
        )
    if narrow := [c for c in calls if c.function.cluster != lane.cluster]:
        raise CodegenError(
            f"graph {graph.name} mixes clusters of functions with roles",
            where=f"plan {graph.name}: {', '.join(c.name for c in narrow)}",
            wanted=f"functions with roles= on the lane's cluster of {lane.cluster}",
            got="; ".join(f"{c.name}: cluster {c.function.cluster}" for c in narrow),
            fix="use one cluster= for all functions with roles=",
        )
    size, buffer = shared_memory(plan)
    if size < MOST_STAGE_OFFSET + buffer:
        raise CodegenError(
            f"graph {graph.name} needs too much shared memory",
            where=f"plan {graph.name}",
            wanted=f"shared= of at most {MAX_SHARED_BYTES - MOST_STAGE_OFFSET} bytes",
            got=f"{buffer}",
            fix="lower shared= of these device functions, or use smaller tiles",
        )


def _reaches_peers(call: Call, n: int) -> bool:
    """Whether the CUDA half of a function with roles may write operand n to a peer."""
    tile = call.function.tile
    mirrors = n in tile and tile[n].mirrors is not None
    return mirrors or FORWARD in call.function.roles


def _constants(plan: Plan, calls: Sequence[Call], trace: bool) -> dict[str, int]:
    shared_bytes, buffer_bytes = shared_memory(plan)
    hosts = {"kNear": plan.near, "kHosts": plan.far_hosts}
    return {
        "kWorld": plan.graph.world_size,
        **(hosts if plan.has_far else {}),
        "kCluster": plan.cluster,
        "kTensorCluster": plan.lane(TENSOR).cluster,
        "kSharedBytes": shared_bytes,
        "kBufferBytes": buffer_bytes,
        "kTrace": int(trace),
        "kDynamic": int(_is_dynamic(plan)),
        "kTensorTickets": int(plan.lane(TENSOR).policy == TICKET),
        "kLimits": len(_limits(plan)),
    }


def _call(plan: Plan, lane: Lane, call: Call, number: int, arguments: Arguments) -> str:
    function = call.function
    lines = [f"struct {call_type(call.name)} {{"]
    lines.append(f"  template <class Task> using Function = {function.name}<Task>;")
    own = function.constants
    if (epilogue := function.epilogue) is not None:
        lines.append(f"  template <class Task> using Epilogue = {epilogue.name}<Task>;")
        own = {**own, **epilogue.constants}
    peers = _peers(call)
    constants = {
        "kCall": number,
        "kCluster": function.cluster,
        "kWorld": plan.graph.world_size,
        "kWaits": len(call.waits),
        "kFreeWaits": len(call.free_waits),
        "kLoads": int(call.is_loaded),
        "kPeers": len(peers),
        "kNotifies": len(call.notifies),
        "kNotifiesPeers": int(any(r.events.cross_rank for r in call.notifies)),
        "kReads": len(call.reads),
        "kWrites": len(call.writes),
        "kMayBeIdle": int(_may_be_idle(call)),
        "kLoadsAhead": int(_loads_ahead(plan, call)),
        "kWaitsAhead": call.streams_after or 0,
        "kReadsBeforeWait": int(bool(function.reads_before_wait)),
        "kLimit": _limit(plan, call),
    }
    if _notifies_ranks(call):
        constants["kNotifiesRanks"] = 1
    if call.limited is not None and not call.waits_for_count:
        constants["kCountIsGiven"] = 1
    if any(ref.guards for ref in call.notifies):
        constants["kNotifiesWhen"] = 1
    if plan.has_far and function.far:
        constants["kFar"] = 1
    _check_names(call, constants)
    declared = {**constants, **own}
    lines += [f"  static constexpr {constant(k, v)};" for k, v in declared.items()]
    lines.append(f"  static constexpr u32 kRoles = {_roles(call)};")
    names = ", ".join(axis_name(a.symbol.name) for a in call.axes)
    lines.append(f"  struct Coord {{ i32 {names}; }};")
    lines.append(method("i32 units", f"g.{units_name(call.name)}"))
    lines.append(method("i32 tasks", text(call.tasks)))
    lines += _numbers(plan, call)
    pace = "0" if call.pace == Const(0) else f"g.{pace_name(call.name)}"
    lines.append(method("i32 pace", pace))
    divisors = arguments.divisor_texts
    order = ", ".join(text(e, extent_names(call), divisors) for e in call.order)
    lines.append(method("Coord at", f"{{{order}}}", "i32 t"))
    lines += _surplus(call)
    lines += select("auto operand", list(_operands(call)))
    lines += select("Box box", list(boxes(call, arguments)))
    if any(large := list(boxes(call, arguments, large=True))):
        lines += select("Box large_box", large)
    waits = (*call.free_waits, *call.loaded_waits)
    lines += indexed("EventRef wait", [_wait(plan, r) for r in waits])
    lines += indexed("i32 peer", peers)
    lines += indexed("EventRef notify", [_notify(r) for r in call.notifies])
    steps = [
        str(notification_unit(plan, r.events) // function.parts) for r in call.notifies
    ]
    lines += indexed("u32 notify_step", steps, "int n")
    waits_fit = conjunction(waits_in_range(call))
    fits = conjunction(in_range(call, plan.graph.world_size, plan.has_far))
    lines += block("bool waits_in_range", waits_fit)
    lines += block("bool in_range", fits)
    if _is_dynamic(plan):
        lines += call_members(lane, call)
    elif lane.has_loops:
        lines.append(method("i32 group_size", text(lane.group_size(call))))
        lines.append(method("i32 group_units", text(lane.group_units(call))))
    if _is_dynamic(plan) or lane.has_loops:
        by_units = arguments.divisor_text(lane.group_units(call))
        lines.append(method("Divisor by_group_units", by_units))
    lines.append("};")
    return "\n".join(lines)


def _check_names(call: Call, constants: Mapping[str, int]) -> None:
    """Refuse constants of a device function, or of its epilogue, that would replace
    others."""
    known = {*constants, *TASK_MEMBERS}
    for function in (call.function, call.function.epilogue):
        if function is None:
            continue
        if taken := [name for name in function.constants if name in known]:
            raise CodegenError(
                f"constants= of {function} has names that generated code uses",
                where=f"call {call.name}",
                wanted=f"names other than {', '.join(sorted(known))}",
                got=", ".join(taken),
                fix="rename these constants",
            )
        known |= set(function.constants)


def _check_sources(functions: Iterable[DeviceFunction]) -> None:
    """Refuse two CUDA bodies of one name: where their files have equal include guards,
    the compiler would take the first one for both."""
    sources: dict[str, str] = {}
    for function in functions:
        source = str(function.source)
        if sources.setdefault(function.name, source) != source:
            raise CodegenError(
                f"two device functions are named {function.name}",
                where=f"{function.name} of {source}",
                wanted="one CUDA body of each name in a graph",
                got=f"another one in {sources[function.name]}",
                fix="rename one of them, and the struct in its file",
            )


def _numbers(plan: Plan, call: Call) -> list[str]:
    """The named numbers that the body takes by keyword."""
    derived = {symbol.name for symbol, _ in plan.graph.derived}
    dims = derived | {symbol.name for symbol in plan.graph.dims}
    values = {n: f"g.{dim_name(n)}" for n in call.function.keywords if n in dims}
    values |= {name: text(value) for name, value in call.values}
    return [method(f"i32 number_{name}", value) for name, value in values.items()]


def _roles(call: Call) -> str:
    names = [f"k{role.capitalize()}Role" for role in call.function.roles]
    return " | ".join(names) or "0"


def _may_be_idle(call: Call) -> bool:
    """Whether data may leave a task without anything to write, to be checked before the
    body runs. Functions with roles have their own check."""
    loaded = [any(e.is_loaded for e in (*r.start, *r.size)) for r in call.writes]
    return bool(loaded) and all(loaded) and not call.function.roles


def _loads_ahead(plan: Plan, call: Call) -> bool:
    """Whether streamed operands can be loaded before a task's waits are met, or but the
    first ones: no task writes them, and which part of them a task reads depends on no
    data, or on some that is known by then."""
    # NOTE: nor in an unqueued call of a dynamic plan, although the proof allows for it.
    streams = call.function.streams
    if not streams or _is_dynamic(plan) or not call.waits:
        return False
    if call.is_loaded and call.streams_after is None:
        return False
    return all(call.reads[n].tensor.kind == "input" for n in streams)


def _notifies_ranks(call: Call) -> bool:
    """Whether all notifications are for the same element, on several ranks."""
    elements = {(r.events.name, r.index) for r in call.notifies}
    is_conditional = any(r.guards for r in call.notifies)
    return len(call.notifies) > 1 and len(elements) == 1 and not is_conditional


def _limit(plan: Plan, call: Call) -> int:
    """A number for the tensor that the call's loaded extent is from; 0 without one."""
    return 0 if call.count is None else 1 + _limits(plan).index(call.count.tensor)


def _limits(plan: Plan) -> list[str]:
    """The tensors that loaded extents are from."""
    counts = (call.count for call in plan.graph.calls)
    return [*dict.fromkeys(count.tensor for count in counts if count is not None)]


def _surplus(call: Call) -> Iterator[str]:
    """Members for the tasks that do not exist: the place of the count, and its value;
    the end of the block that task t is in."""
    if call.limited is None or call.count is None:
        return
    place = linear(call.count.index, call.count.shape)
    yield method("i32 count_place", place, "Coord c")
    yield method("i32 count", text(call.count), "Coord c")
    along, block = axis_name(call.limited.symbol.name), call.block[1]
    head = "  ETC_DEVICE static bool is_surplus(Coord c, i32 count)"
    yield f"{head} {{ return c.{along} >= count; }}"
    yield method("i32 block_end", text((TASK // block + 1) * block, set()), "i32 t")


def _is_dynamic(plan: Plan) -> bool:
    return any(lane.policy == QUEUE for lane in plan.lanes)


def _operands(call: Call) -> Iterator[str]:
    for region in (*call.reads, *call.writes):
        element = ELEMENTS[region.tensor.dtype]
        rank = "g.rank" if region.rank is None else text(region.rank)
        base = f"g.{tensor_name(region.tensor.name)}"
        if region.tensor.kind == "symmetric":
            base = f"g.peer[{rank}] + {base}"
        shape = ", ".join(text(e) for e in region.tensor.shape)
        start = ", ".join(text(e) for e in region.start)
        size = ", ".join(text(e) for e in region.size)
        axes = len(region.start)
        yield (
            f"make_tile<{element}, {axes}>({base}, {rank}, {{{shape}}}, {{{start}}}, "
            f"{{{size}}})"
        )


def _peers(call: Call) -> list[str]:
    ranks = [r.rank for r in call.writes if r.rank is not None]
    ranks += [r.guarded(r.rank, RANK) for r in call.notifies if r.rank is not None]
    return list(dict.fromkeys(map(text, ranks)))


def _index(ref: EventRef) -> str:
    offset = linear(ref.index, ref.events.shape)
    return f"u32(g.{events_name(ref.events.name)} + {offset})"


def _wait(plan: Plan, ref: EventRef) -> str:
    unit = notification_unit(plan, ref.events)
    expects = text(ref.expects)
    scope = str(ref.events.cross_rank).lower()
    return _when(ref, f"{{g.rank, {_index(ref)}, u32({expects}) * {unit}u, {scope}}}")


def _notify(ref: EventRef) -> str:
    rank = "g.rank" if ref.rank is None else text(ref.rank)
    scope = str(ref.events.cross_rank).lower()
    return _when(ref, f"{{{rank}, {_index(ref)}, 0, {scope}}}")


def _when(ref: EventRef, element: str) -> str:
    """`element` for tasks that wait for it or notify it."""
    if not ref.guards:
        return element
    return f"{text(ref.holds)} ? EventRef{element} : no_event()"


def _program(plan: Plan, constants: Mapping[str, int]) -> str:
    lists = []
    for name, alias in ((TENSOR, "TensorCalls"), (TRANSFER, "TransferCalls")):
        lane = plan.lane(name)
        calls = f"CallList<{', '.join(call_type(c.name) for c in lane.calls)}>"
        if lane.has_loops:
            calls = f"LoopedCalls<{calls}, {_items(lane, lane.items)}>"
        lists.append(f"  using {alias} = {calls};")
    if _is_dynamic(plan):
        waiting = [
            call_type(c.name) for lane in plan.lanes for c in lane.calls if c.waits
        ]
        lists.append(f"  using WaitingCalls = CallList<{', '.join(waiting)}>;")
        lists += [f"  using {queue} = etc::{queue};" for queue in QUEUES.values()]
    aliases = [f"  static constexpr int {n} = etc::{n};" for n in constants]
    if plan.has_far:
        aliases.append(f"  using Far = {FAR_TRANSPORT};")
    return "\n".join(
        [
            "struct Program {",
            "  using Args = etc::Args;",
            *aliases,
            *lists,
            "};",
            f"static_assert(SharedOf<Program>::kStageOffset <= {MOST_STAGE_OFFSET});",
        ]
    )


def _loop(period: str, lane: Lane, loop: Loop, arguments: Arguments) -> str:
    lines = [f"struct {loop_type(lane.name, loop.name)} {{"]
    lines.append(method("i32 turns", text(loop.axis.extent)))
    lines.append(method("i32 period", f"g.{period}"))
    by_period = arguments.divisor_text(lane.period(loop))
    lines.append(method("Divisor by_period", by_period))
    return "\n".join([*lines, "};"])


def _items(lane: Lane, items: Sequence[Item]) -> str:
    """Types of a lane's calls and loops."""
    types = []
    for item in items:
        if isinstance(item, Loop):
            loop = loop_type(lane.name, item.name)
            types.append(f"Loop<{loop}, {_items(lane, item.items)}>")
        else:
            types.append(call_type(item.name))
    return ", ".join(types)


def _entry(plan: Plan) -> str:
    cluster = f"__cluster_dims__({plan.cluster}, 1, 1) " if plan.cluster > 1 else ""
    return (
        f'extern "C" __global__ {cluster}__launch_bounds__(etc::kWorkerThreads, 1)\n'
        f"void {ENTRY}(const __grid_constant__ etc::Args g) {{\n"
        "  etc::run_worker<etc::Program>(g);\n}" + (_QUIET if plan.has_far else "")
    )


_QUIET = f"""

extern "C" __global__ void {QUIET}() {{
  etc::Program::Far::quiet();
}}"""
