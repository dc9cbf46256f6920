"""Plan -> CUDA source: includes, named constants, index maps and lists of calls.

No logic is generated: all control flow is in `kernels/`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etc_dist.codegen.calls import call_text, event_text, limits, tensor_text
from etc_dist.codegen.dynamic_queues import QUEUES, event_struct, lane_queue, releases
from etc_dist.codegen.expression import text
from etc_dist.codegen.layout import (
    MAX_SHARED_BYTES,
    MOST_STAGE_OFFSET,
    Arguments,
    periods,
    shared_memory,
)
from etc_dist.codegen.members import constants, method, wrapped
from etc_dist.codegen.names import call_type, loop_type, tensor_function
from etc_dist.codegen.tiles import row_multiples, tile_errors
from etc_dist.errors import CodegenError
from etc_dist.ir.call import RANK, Call
from etc_dist.ir.function import (
    PREPARE,
    TENSOR,
    TRANSFER,
    DeviceFunction,
)
from etc_dist.ir.tensor import Tensor
from etc_dist.schedule.loops import Item, Loop
from etc_dist.schedule.plan import QUEUE, TICKET, Lane, Plan

MAX_NEAR = 32
"""The most ranks of a host: a worker has one word with a bit for each."""
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
    shared_bytes: int
    """Shared memory of a worker."""
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
    source_texts = sorted({str(function.source) for function in functions})
    users = tuple(Path(s) for s in source_texts if Path(s).is_absolute())
    return Source(
        text="\n\n".join(_blocks(plan, trace, arguments, source_texts)) + "\n",
        entry=ENTRY,
        arguments=arguments,
        shared_bytes=shared_memory(plan)[0],
        sources=users,
        traced=trace,
        has_far=plan.has_far,
        row_multiples=row_multiples(graph),
    )


def _blocks(
    plan: Plan, trace: bool, arguments: Arguments, sources: Sequence[str]
) -> list[str]:
    """The parts of the text."""
    graph, is_dynamic = plan.graph, _is_dynamic(plan)
    headers = (*([FAR_HEADER] if plan.has_far else []), "worker/worker.cuh")
    blocks = [
        f"// {graph.name} on {graph.world_size} ranks, {plan.schedule} schedule",
        "\n".join(f'#include "{name}"' for name in (*headers, *sources)),
        "namespace etc {",
        arguments.text(),
    ]
    structs = [
        call_text(plan, lane, call, arguments)
        for lane in plan.lanes
        for call in lane.calls
    ]
    words = {w for struct in structs for w in re.findall(r"tensor_\w+", struct)}
    used_tensors = [t for t in graph.tensors if tensor_function(t.name) in words]
    if used_tensors:
        blocks.append("\n".join(map(tensor_text, used_tensors)))
    if graph.events:
        blocks.append("\n".join(map(event_text, graph.events)))
    if is_dynamic:
        blocks += [lane_queue(lane) for lane in plan.lanes]
        blocks += [event_struct(plan, events) for events in graph.events]
    blocks += structs
    if is_dynamic:
        blocks += releases(plan)
    blocks += [_loop(*member, arguments) for member in periods(plan)]
    return [*blocks, _program(plan, trace), "}  // namespace etc", _entry(plan)]


def _check_roles(plan: Plan) -> None:
    """Refuse calls of functions with roles that no worker can run."""
    graph, lane = plan.graph, plan.lane(TENSOR)
    calls = [c for c in lane.calls if c.function.roles]
    early = [c for c in calls if c.function.begins_early]
    if early := [c for c in early if PREPARE not in c.function.roles]:
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
            wanted="results in this rank's memory, except of the epilogue "
            "store_on_ranks",
            got="; ".join(far),
            fix="write to this rank's memory, and send that by a call of push_rows()",
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
    return n in tile and tile[n].mirrors is not None


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


def _is_dynamic(plan: Plan) -> bool:
    return any(lane.policy == QUEUE for lane in plan.lanes)


def _program(plan: Plan, trace: bool) -> str:
    shared_bytes, buffer_bytes = shared_memory(plan)
    values = {
        "kNear": plan.near * plan.has_far,
        "kHosts": plan.far_hosts,
        "kSharedBytes": shared_bytes,
        "kBufferBytes": buffer_bytes,
        "kTrace": int(trace),
        "kDynamic": int(_is_dynamic(plan)),
        "kTensorTickets": int(plan.lane(TENSOR).policy == TICKET),
        "kLimits": len(limits(plan)),
    }
    lines = ["struct Program : ProgramDefaults<Args> {"]
    lines += constants({k: v for k, v in values.items() if v != 0})
    for name, alias in ((TENSOR, "TensorCalls"), (TRANSFER, "TransferCalls")):
        lane = plan.lane(name)
        kind = "LoopedCalls" if lane.has_loops else "CallList"
        items = f"{kind}<{_items(lane, lane.items)}>"
        lines += wrapped(f"  using {alias} = {items};") if lane.calls else []
    if _is_dynamic(plan):
        names = [call_type(c.name) for ln in plan.lanes for c in ln.calls if c.waits]
        lines += wrapped(f"  using WaitingCalls = CallList<{', '.join(names)}>;")
        lines += [f"  using {queue} = etc::{queue};" for queue in QUEUES.values()]
    if plan.has_far:
        lines.append(f"  using Far = {FAR_TRANSPORT};")
    stages = f"SharedOf<Program>::kStageOffset <= {MOST_STAGE_OFFSET}"
    return "\n".join([*lines, "};", f"static_assert({stages});"])


def _loop(period: str, lane: Lane, loop: Loop, arguments: Arguments) -> str:
    number, divisor = text(loop.axis.extent), arguments.divisor_text(lane.period(loop))
    turns = method("Turns turns", f"{{{number}, g.{period}, {divisor}}}")
    name = loop_type(lane.name, loop.name)
    return "\n".join([f"struct {name} {{", *turns, "};"])


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
    return (
        'extern "C" __global__ __launch_bounds__(etc::kWorkerThreads, 1)\n'
        f"void {ENTRY}(const __grid_constant__ etc::Args g) {{\n"
        "  etc::run_worker<etc::Program>(g);\n}" + (_QUIET if plan.has_far else "")
    )


_QUIET = f"""

extern "C" __global__ void {QUIET}() {{
  etc::Program::Far::quiet();
}}"""
