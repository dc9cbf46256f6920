"""Plan -> CUDA source: includes, named constants, index maps and lists of calls.

No logic is generated: all control flow is in `kernels/`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etc_dist.codegen.bounds import conjunction, in_range, waits_in_range
from etc_dist.codegen.boxes import boxes
from etc_dist.codegen.dynamic_queues import (
    QUEUES,
    call_members,
    event_struct,
    lane_queue,
    releases,
)
from etc_dist.codegen.expression import linear, text
from etc_dist.codegen.layout import (
    SHARED_BYTES,
    Arguments,
    notification_unit,
)
from etc_dist.codegen.members import block, constant, indexed, method, select
from etc_dist.codegen.names import (
    axis_name,
    call_type,
    events_name,
    pace_name,
    tensor_name,
    units_name,
)
from etc_dist.codegen.tiles import check_tiles, row_multiples
from etc_dist.errors import CodegenError
from etc_dist.ir.call import RANK, Call
from etc_dist.ir.event import EventRef
from etc_dist.ir.expr import Const
from etc_dist.ir.function import TENSOR, TRANSFER
from etc_dist.ir.tensor import Tensor
from etc_dist.schedule.plan import QUEUE, STRIDED, TICKET, Lane, Plan

ELEMENTS = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "float",
    "int32": "i32",
}
ENGINES = {
    "functions/matmul.cuh": "Matmul",
    "functions/grouped_matmul.cuh": "GroupedMatmul",
}
"""The engine that runs the GEMMs of each of these sources."""
WEIGHT = 1
"""The operand of a GEMM that is its weight."""
MAX_WORLD = 32
"""A worker has one word with a bit for each peer that has started."""
ENTRY = "etc_dist_program"


@dataclass(frozen=True)
class Source:
    """Generated text, with all that a launch of it needs."""

    text: str
    entry: str
    arguments: Arguments
    cluster: int
    has_matmul: bool
    workspace: int
    sources: tuple[Path, ...]
    traced: bool
    row_multiples: Mapping[Tensor, int]
    """The number that the row length of a tensor must be a multiple of."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        """The graph, its number of ranks and the schedule, of the first line."""
        return title_of(self.text)


def title_of(text: str) -> str:
    return text.partition("\n")[0].removeprefix("// ")


def generate(plan: Plan, *, trace: bool = False, check: bool = True) -> Source:
    """The source of `plan`: equal plans give equal text. Raises CodegenError for plans
    that no kernel supports. With `check`, also for regions that the CUDA bodies do not
    support; the CPU backend runs these."""
    graph = plan.graph
    if graph.world_size > MAX_WORLD:
        raise CodegenError(
            f"graph {graph.name} has too many ranks",
            where=f"plan {graph.name}",
            wanted=f"at most {MAX_WORLD} ranks",
            got=str(graph.world_size),
            fix="use fewer ranks in one program",
        )
    if check:
        check_tiles(graph)
    arguments = Arguments.of(plan)
    calls = [c for lane in plan.lanes for c in lane.calls]
    matmuls = [c for c in calls if c.function.source in ENGINES]
    own = sorted({str(c.function.source) for c in calls})
    users = tuple(Path(s) for s in own if Path(s).is_absolute())
    constants = _constants(plan, calls, matmuls, trace)
    blocks = [
        f"// {graph.name} on {graph.world_size} ranks, {plan.schedule} schedule",
        "\n".join(f'#include "{name}"' for name in ("worker/worker.cuh", *own)),
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
    engine = _kind(matmuls[0])[0] if matmuls else "NoEngine"
    blocks += [_program(plan, constants, engine), "}  // namespace etc", _entry(plan)]
    return Source(
        text="\n\n".join(blocks) + "\n",
        entry=ENTRY,
        arguments=arguments,
        cluster=plan.cluster,
        has_matmul=bool(matmuls),
        workspace=max((c.function.workspace for c in calls), default=0),
        sources=users,
        traced=trace,
        row_multiples=row_multiples(graph),
    )


def _constants(
    plan: Plan, calls: Sequence[Call], matmuls: Sequence[Call], trace: bool
) -> dict[str, int]:
    if early := [c for c in matmuls if c.function.reads_before_wait]:
        raise CodegenError(
            f"graph {plan.graph.name} has a matrix multiplication that reads early",
            where=f"plan {plan.graph.name}: {', '.join(c.name for c in early)}",
            wanted="no reads_before_wait= of a matrix multiplication",
            got="; ".join(f"{c.name}: {c.function.reads_before_wait}" for c in early),
            fix="omit reads_before_wait=: the weight is loaded ahead where possible",
        )
    if far := [
        f"{c.name} writes {region}"
        for c in matmuls
        for region in c.writes
        if region.rank not in (None, RANK) and not _sends(c)
    ]:
        raise CodegenError(
            f"graph {plan.graph.name} has a GEMM that writes to a peer's memory",
            where=f"plan {plan.graph.name}",
            wanted="results on the own rank, except those of matmul_send",
            got="; ".join(far),
            fix="write to the own rank, and send the result by another call",
        )
    kinds = {_kind(c) for c in matmuls}
    if len(kinds) > 1:
        raise CodegenError(
            f"graph {plan.graph.name} mixes kinds of matrix multiplication",
            where=f"plan {plan.graph.name}: {', '.join(c.name for c in matmuls)}",
            wanted="one engine, one dtype and one weight layout in a program",
            got="; ".join(f"{engine} {dict(k)}" for engine, *k in sorted(kinds)),
            fix="bring the weights into one layout and dtype",
        )
    of_matmul = dict(matmuls[0].function.constants) if matmuls else {}
    sends = any(map(_sends, calls))
    return {
        "kWorld": plan.graph.world_size,
        "kCluster": plan.cluster,
        "kTensorCluster": plan.lane(TENSOR).cluster,
        "kHasMatmul": int(bool(matmuls)),
        "kSends": int(sends),
        "kGathers": int(any(map(_gathers, calls))),
        "kHasGate": int(any(c.function.constants["kGated"] for c in matmuls)),
        "kIsHalf": int(of_matmul.get("kIsHalf", 0)),
        "kWeightIsKN": int(of_matmul.get("kWeightIsKN", 0)),
        "kIsFloat": int(of_matmul.get("kIsFloat", 0)),
        "kHasThin": int(any(c.function.constants.get("kIsThin") for c in matmuls)),
        "kTrace": int(trace),
        "kDynamic": int(_is_dynamic(plan)),
        "kTensorTickets": int(plan.lane(TENSOR).policy == TICKET),
        "kHasRuns": int(any(_has_runs(plan, c) for c in calls)),
    }


def _kind(call: Call) -> tuple[Any, ...]:
    """The properties that all GEMMs of a program must share."""
    constants = call.function.constants
    names = "kIsHalf", "kWeightIsKN", "kIsFloat"
    shared = tuple((k, constants.get(k, 0)) for k in names)
    return ENGINES[str(call.function.source)], *shared


def _sends(call: Call) -> bool:
    """Whether the transfer lane's warps forward the call's tiles."""
    return call.function.name == "matmul_send"


def _gathers(call: Call) -> bool:
    """Whether the warps of the transfer lane gather rows for the call's GEMM."""
    return call.function.source in ENGINES and bool(call.function.gathers)


def _call(plan: Plan, lane: Lane, call: Call, number: int, arguments: Arguments) -> str:
    function = call.function
    lines = [f"struct {call_type(call.name)} {{"]
    lines.append(f"  template <class Task> using Function = {function.name}<Task>;")
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
        "kIsMatmul": int(function.source in ENGINES),
        "kSends": int(_sends(call)),
        "kWeightAhead": int(_has_weight_ahead(plan, call)),
        "kGathers": int(_gathers(call)),
        "kReadsBeforeWait": int(bool(function.reads_before_wait)),
        "kHasRuns": int(_has_runs(plan, call)),
        **function.constants,
    }
    lines += [f"  static constexpr {constant(k, v)};" for k, v in constants.items()]
    names = ", ".join(axis_name(a.symbol.name) for a in call.axes)
    lines.append(f"  struct Coord {{ i32 {names}; }};")
    lines.append(method("i32 units", f"g.{units_name(call.name)}"))
    lines.append(method("i32 tasks", text(call.tasks)))
    pace = "0" if call.pace == Const(0) else f"g.{pace_name(call.name)}"
    lines.append(method("i32 pace", pace))
    order = ", ".join(text(e) for e in call.order)
    lines.append(method("Coord at", f"{{{order}}}", "i32 t"))
    if call.empty_until is not None and constants["kHasRuns"]:
        lines.append(method("i32 empty_until", text(call.empty_until), "i32 t"))
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
    fits = conjunction(in_range(call, plan.graph.world_size))
    lines += block("bool waits_in_range", waits_fit)
    lines += block("bool in_range", fits)
    if _is_dynamic(plan):
        lines += call_members(lane, call, _is_grouped(call))
    lines.append("};")
    return "\n".join(lines)


def _may_be_idle(call: Call) -> bool:
    """Whether data may leave a task without anything to write, to be checked before the
    body runs. GEMMs have their own check."""
    loaded = [any(e.is_loaded for e in (*r.start, *r.size)) for r in call.writes]
    return bool(loaded) and all(loaded) and call.function.source not in ENGINES


def _has_weight_ahead(plan: Plan, call: Call) -> bool:
    """Whether a GEMM's weight can be loaded before the waits of a task are met: no task
    writes it, and its region has no loads."""
    if not _is_grouped(call) or _is_dynamic(plan) or call.is_loaded or not call.waits:
        return False
    return call.reads[WEIGHT].tensor.kind == "input"


def _has_runs(plan: Plan, call: Call) -> bool:
    """Whether one worker completes runs of empty tasks: grouped GEMMs that are claimed
    dynamically."""
    is_dynamic = plan.lane(TENSOR).policy != STRIDED
    return call.empty_until is not None and _is_grouped(call) and is_dynamic


def _is_grouped(call: Call) -> bool:
    return ENGINES.get(str(call.function.source)) == "GroupedMatmul"


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
    ranks = [r.rank for r in call.writes] + [r.rank for r in call.notifies]
    return list(dict.fromkeys(text(rank) for rank in ranks if rank is not None))


def _index(ref: EventRef) -> str:
    offset = linear(ref.index, ref.events.shape)
    return f"u32(g.{events_name(ref.events.name)} + {offset})"


def _wait(plan: Plan, ref: EventRef) -> str:
    unit = notification_unit(plan, ref.events)
    expects = text(ref.expects)
    scope = str(ref.events.cross_rank).lower()
    return f"{{g.rank, {_index(ref)}, u32({expects}) * {unit}u, {scope}}}"


def _notify(ref: EventRef) -> str:
    rank = "g.rank" if ref.rank is None else text(ref.rank)
    scope = str(ref.events.cross_rank).lower()
    return f"{{{rank}, {_index(ref)}, 0, {scope}}}"


def _program(plan: Plan, constants: Mapping[str, int], engine: str) -> str:
    lists = []
    for name, alias in ((TENSOR, "TensorCalls"), (TRANSFER, "TransferCalls")):
        types = ", ".join(call_type(c.name) for c in plan.lane(name).calls)
        lists.append(f"  using {alias} = CallList<{types}>;")
    if _is_dynamic(plan):
        queued = [
            call_type(c.name) for lane in plan.lanes for c in lane.calls if c.waits
        ]
        lists.append(f"  using QueuedCalls = CallList<{', '.join(queued)}>;")
        lists += [f"  using {queue} = etc::{queue};" for queue in QUEUES.values()]
    aliases = [f"  static constexpr int {n} = etc::{n};" for n in constants]
    shared = SHARED_BYTES[constants["kHasMatmul"]]
    return "\n".join(
        [
            "struct Program {",
            "  using Args = etc::Args;",
            f"  using Engine = etc::{engine};",
            *aliases,
            *lists,
            "};",
            f"static_assert(Program::Engine::kSharedBytes == {shared});",
        ]
    )


def _entry(plan: Plan) -> str:
    cluster = f"__cluster_dims__({plan.cluster}, 1, 1) " if plan.cluster > 1 else ""
    return (
        f'extern "C" __global__ {cluster}__launch_bounds__(etc::kWorkerThreads, 1)\n'
        f"void {ENTRY}(const __grid_constant__ etc::Args g) {{\n"
        "  etc::run_worker<etc::Program>(g);\n}"
    )
