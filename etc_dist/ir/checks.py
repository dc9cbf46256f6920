"""Checks of a call that is added to a graph: GraphErrors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import TYPE_CHECKING

from etc_dist.errors import GraphError, expect_range
from etc_dist.ir.call import TASK, Call, waiting_loads, working_loads
from etc_dist.ir.event import EventTensor
from etc_dist.ir.expr import Const, Expr, Symbol
from etc_dist.ir.flagged_tensors import check_flags
from etc_dist.ir.function import TENSOR
from etc_dist.ir.loads import INT32, UPPER_BOUND, loads_of, refuse_loads
from etc_dist.ir.tensor import Tensor

if TYPE_CHECKING:
    from etc_dist.ir.graph import GraphFunction


def check_call(call: Call, where: str, graph_names: Set[str]) -> None:
    """Raise GraphError unless `call`, made at `where`, is correct. `graph_names`: the
    symbols that every expression of the graph may use."""
    _check_operands(call, where)
    _check_own_rows(call, where)
    _check_keywords(call, where, graph_names)
    _check_coordinates(call, where, graph_names)
    _check_loads(call, where)
    _check_ranks(call, where)
    _check_far(call, where)
    _check_reads_before_wait(call, where)
    _check_streams_after(call, where)
    _check_count(call, where, graph_names)
    _check_pace(call, where)
    check_flags(call, where)


def check_members(
    call: Call, where: str, tensors: Sequence[Tensor], events: Sequence[EventTensor]
) -> None:
    """Raise GraphError for tensors and event tensors of another graph, and for writes
    to inputs."""
    shapes = {(tensor.name, tensor.shape) for tensor in tensors}
    regions, refs = (*call.reads, *call.writes), (*call.waits, *call.notifies)
    foreign = [str(r) for r in regions if r.tensor not in tensors]
    foreign += [str(r) for r in refs if r.events not in events]
    foreign += [
        str(load)
        for load in (*waiting_loads(call), *working_loads(call))
        if (load.tensor, load.shape) not in shapes
    ]
    if foreign:
        raise GraphError(
            f"call {call.name} uses tensors or events of another graph",
            where=where,
            wanted="tensors and event tensors made by this g",
            got=", ".join(foreign),
            fix="make them in this graph function, by g.local(...), g.events(...), ...",
        )
    inputs = [str(r) for r in call.writes if r.tensor.kind == "input"]
    if inputs:
        raise GraphError(
            f"call {call.name} writes an input",
            where=where,
            wanted="writes to state, output, local or symmetric tensors",
            got=", ".join(inputs),
            fix="declare the tensor by g.output(...) if no task reads its old values, "
            "by g.state(...) if it is updated in place",
        )


def refuse_loads_of_written_state(graph: GraphFunction) -> None:
    """Raise GraphError for a state that tasks write and index expressions load from: no
    proof shows which value a load finds."""
    loaded_tensors = [
        tensor for tensor in graph.loaded_tensors() if tensor.kind == "state"
    ]
    for call in graph.calls:
        for region in call.writes:
            if region.tensor in loaded_tensors:
                name = region.tensor.name
                raise GraphError(
                    f"state {name} is written, and index expressions load from it",
                    where=f"graph {graph.name}, call {call.name} writes {region}",
                    wanted="loads from a state that no task of the graph writes",
                    got=f"a write, and {name}.load(...) in an index expression",
                    fix=f"write the new values to another tensor, such as an output, "
                    f"and give that as {name} in the next run",
                )


def checked_local_size(local_size: int | None, ranks: int, name: str) -> int:
    """The ranks on each host; GraphError if hosts would be unequal."""
    if local_size is None:
        return ranks
    size = expect_range(local_size, 1, ranks, "local_size")
    if ranks % size:
        raise GraphError(
            "the hosts of a graph have different numbers of ranks",
            where=f"graph {name}",
            wanted=f"local_size: a divisor of {ranks}, the number of ranks",
            got=str(size),
            fix="pass local_size=world.local_size",
        )
    return size


def check_extents(
    what: str, where: str, shape: Sequence[Expr], ranked: Set[str]
) -> None:
    """Raise GraphError for a shape that differs between ranks: by a symbol in
    `ranked`."""
    rank_extents = [str(n) for n in shape if any(s.name in ranked for s in n.symbols)]
    if rank_extents:
        raise GraphError(
            f"the shape of {what} depends on the rank",
            where=where,
            wanted="the same shape on every rank",
            got=", ".join(rank_extents),
            fix="use the same shape on all ranks, as large as the largest needs",
        )


def check_symbols(
    what: str,
    where: str,
    exprs: Sequence[Expr],
    usable_names: Set[str],
    *,
    wanted: str = "",
    fix: str = "use dims of this graph, and no coordinates of a grid",
) -> None:
    """Raise GraphError for symbols that are not among `usable_names`, described by
    `wanted`."""
    unusable_names = [
        s.name for e in exprs for s in e.symbols if s.name not in usable_names
    ]
    if unusable_names:
        raise GraphError(
            f"{what} uses unknown symbols",
            where=where,
            wanted=wanted or f"only {', '.join(sorted(usable_names))}",
            got=", ".join(unusable_names),
            fix=fix,
        )


def _check_operands(call: Call, where: str) -> None:
    if not call.axes:
        raise GraphError(
            f"the grid of call {call.name} has no axis",
            where=where,
            wanted="at least one axis",
            got="g.grid()",
            fix="write i, j = grid = g.grid(i=..., j=...), and give grid",
        )
    function, num_operands = call.function, (len(call.reads), len(call.writes))
    if num_operands != (function.reads, function.writes):
        raise GraphError(
            f"call {call.name} does not fit device function {function.name}",
            where=where,
            wanted=f"{function.reads} reads and {function.writes} writes",
            got=f"{num_operands[0]} reads and {num_operands[1]} writes",
            fix="give one region for each operand",
        )


def _check_own_rows(call: Call, where: str) -> None:
    """Rows of which a rank may have fewer are accessed by tiles and spans, which are
    clipped."""
    regions = [r for r in (*call.reads, *call.writes) if r.tensor.has_own_rows]
    for region in regions:
        if not region.kept_axes[0] or region.size[0] == region.tensor.shape[0]:
            raise GraphError(
                f"call {call.name} accesses rows that a rank may not have",
                where=f"{where}: {region}",
                wanted=f"tile(i, size) or span(start, size) of {region.tensor.name}",
                got="one index, or all rows, on the first axis",
                fix="write the largest number of rows, as in span(0, largest): regions "
                "are clipped",
            )


def _check_keywords(call: Call, where: str, graph_names: Set[str]) -> None:
    value_names = {name for name, _ in call.values}
    function = call.function
    names = (
        graph_names
        | {axis.symbol.name for axis in call.axes}
        | value_names
        | {*function.starts}
    )
    required_names = [
        name for name in function.keywords if name not in function.defaults
    ]
    missing_names = [name for name in required_names if name not in names]
    extra = sorted(value_names - {*call.function.keywords})
    if extra:
        raise GraphError(
            f"values= of call {call.name} has names that its body does not take",
            where=f"{where}, {call.function}",
            wanted="keyword-only parameters: "
            + (", ".join(call.function.keywords) or "none"),
            got=", ".join(extra),
            fix="name a parameter after * in the body",
        )
    unnamed = [str(v) for _, v in call.values if not _is_named(v, graph_names)]
    if unnamed:
        raise GraphError(
            f"values= of call {call.name} has expressions",
            where=f"{where}, {call.function}",
            wanted="dims, numbers of g.let, or constants",
            got=", ".join(unnamed),
            fix="name the expression: g.let(name, expression)",
        )
    constants = [(name, v.value) for name, v in call.values if isinstance(v, Const)]
    if large := [
        f"{name}={n}" for name, n in constants if not INT32[0] <= n <= INT32[1]
    ]:
        raise GraphError(
            f"values= of call {call.name} has numbers that its CUDA body cannot hold",
            where=f"{where}, {call.function}",
            wanted="integers of 32 bits",
            got=", ".join(large),
            fix="choose smaller numbers",
        )
    if missing_names:
        raise GraphError(
            f"the body of call {call.name} takes values that the call does not have",
            where=f"{where}, {call.function}",
            wanted=f"keyword-only parameters among {', '.join(sorted(names))}",
            got=", ".join(missing_names),
            fix="name a dim, a number of g.let, a coordinate of the grid, or rank; "
            "operands are positional parameters",
        )


def _is_named(value: Expr, graph_names: Set[str]) -> bool:
    return isinstance(value, Const) or (
        isinstance(value, Symbol) and value.name in graph_names
    )


def _check_coordinates(call: Call, where: str, graph_names: Set[str]) -> None:
    """Refuse coordinates of other grids."""
    for what, expr, allowed in _expressions(call, graph_names):
        check_symbols(
            f"call {call.name}",
            f"{where}: {what}",
            [expr],
            allowed,
            fix="use the coordinates of this call's own grid",
        )


def _expressions(
    call: Call, graph_names: Set[str]
) -> Iterator[tuple[str, Expr, Set[str]]]:
    """All expressions of `call`, each with a description and the allowed symbols."""
    yield from ((f"extent of {a.symbol}", a.extent, graph_names) for a in call.axes)
    coordinates = graph_names | {a.symbol.name for a in call.axes}
    task = graph_names | {TASK.name}
    for region in (*call.reads, *call.writes):
        yield from ((str(region), e, coordinates) for e in region.parts)
    for ref in (*call.waits, *call.notifies):
        yield from ((str(ref), e, coordinates) for e in ref.parts)
    yield from ((f"order {e}", e, task) for e in call.order)
    yield f"pace {call.pace}", call.pace, graph_names


def _check_loads(call: Call, where: str) -> None:
    for what, exprs in (
        ("the grid", [a.extent for a in call.axes]),
        ("the order", call.order),
        ("the pace", [call.pace]),
    ):
        refuse_loads(f"{what} of call {call.name}", where, exprs, UPPER_BOUND)


def _check_ranks(call: Call, where: str) -> None:
    for ref in call.waits:
        if ref.rank is not None:
            raise GraphError(
                f"call {call.name} waits on another rank's event",
                where=f"{where}: {ref}",
                wanted="waits on elements of the same rank; peers notify them",
                got=str(ref),
                fix="notify events.on(this rank) in the producer",
            )
    for region in call.reads:
        if region.rank is not None:
            raise GraphError(
                f"call {call.name} reads another rank's memory",
                where=f"{where}: {region}",
                wanted="reads of the same rank's memory; peers push into it",
                got=str(region),
                fix="write to tensor.on(reader) in a task of the owner",
            )


def _check_far(call: Call, where: str) -> None:
    """A far function sends one region of symmetric memory and one notification."""
    if not call.function.far:
        return
    ranks = [region.rank for region in call.writes]
    ranks += [ref.rank for ref in call.notifies]
    is_conditional = any(ref.guards for ref in call.notifies)
    if len(ranks) != 2 or len(set(ranks)) > 1 or None in ranks or is_conditional:
        raise GraphError(
            f"call {call.name} does not send one region with one notification",
            where=where,
            wanted="writes=[tensor.on(r)[...]], notifies=[events.on(r)[...]], with the "
            "same rank r in both, and without .when(...)",
            got=", ".join(map(str, (*call.writes, *call.notifies))),
            fix="write and notify once here, and notify further events in a call that "
            "waits for this one's on rank r",
        )
    # NOTE: transports send registered memory only. And the caller may change its arrays
    # after the run, while the bytes are on their way.
    if unsendable_reads := [r for r in call.reads if r.tensor.kind != "symmetric"]:
        raise GraphError(
            f"call {call.name} sends a tensor that is not symmetric",
            where=where,
            wanted="reads of symmetric tensors",
            got=", ".join(
                f"{region}, {region.tensor.kind}" for region in unsendable_reads
            ),
            fix="copy the rows by push_rows() to a symmetric tensor, and send that",
        )


def _check_reads_before_wait(call: Call, where: str) -> None:
    """Early reads need a wait, and no load but of the last wait's expected count; or
    also loads that are valid before that wait, of a function that does them early."""
    earlier_loads = [
        r for r in call.loaded_waits if r.is_loaded or r is not call.waits[-1]
    ]
    has_early_work = call.limited is not None or bool(working_loads(call))
    if call.function.loads_before_wait:
        has_early_work = call.limited is not None and len(call.waits) == 1
    has_early_loads = bool(earlier_loads) or has_early_work
    if call.function.begins_early and (has_early_loads or not call.waits):
        raise GraphError(
            f"call {call.name} cannot read before its last wait",
            where=where,
            wanted="at least one wait, and no loads but of the last wait's count",
            got=f"{len(call.waits)} waits, {'' if has_early_loads else 'not '}loaded",
            fix="use a device function without reads_before_wait=, or one with "
            "loads_before_wait=",
        )


def _check_streams_after(call: Call, where: str) -> None:
    """Operands streamed before the last waits are inputs, and those waits are the only
    loaded ones."""
    after, streams = call.streams_after, call.function.streams
    if after is None:
        return
    kinds = {call.reads[n].tensor.kind for n in streams}
    first = call.waits[: max(after, 0)]
    is_loaded = any(wait in call.loaded_waits for wait in first)
    if 0 < after < len(call.waits) and not is_loaded and kinds == {"input"}:
        return
    waits = f"{len(call.waits)} waits, {len(call.loaded_waits)} of them loaded"
    raise GraphError(
        f"call {call.name} cannot load streamed operands before its last wait",
        where=where,
        wanted="0 < streams_after < the number of waits, of which these first ones are "
        "not loaded, and a function that streams inputs",
        got=f"streams_after={after}, {waits}, streams {list(streams)} of kinds "
        f"{sorted(kinds)}",
        fix="omit streams_after=",
    )


def _check_count(call: Call, where: str, graph_names: Set[str]) -> None:
    """A loaded extent depends on loops only. It is an array's of the caller, or the
    first wait, which is alike for all tasks of a turn, orders its load."""
    counts = [axis.count for axis in call.axes if axis.count is not None]
    if not counts:
        return
    symbols = {s.name for i in counts[0].index for s in i.symbols}
    is_plain = symbols <= graph_names | {*call.loop_names} and not loads_of(
        counts[0].index
    )
    is_known = len(counts) == 1 and call.knows_count
    if is_known and is_plain and call.function.lane == TENSOR:
        return
    raise GraphError(
        f"the grid of call {call.name} cannot have these loaded extents",
        where=where,
        wanted="one of them, loaded at an index without coordinates of the grid; a "
        "function of the tensor lane; and a count of an input or a state, or a first "
        "wait without loads or coordinates of the grid, after which it is known",
        got=f"{', '.join(map(str, call.axes))}; waits for "
        f"{', '.join(map(str, call.waits)) or 'nothing'}; {call.function.lane} lane",
        fix="name the event of the task that writes the count first in waits=",
    )


def _check_pace(call: Call, where: str) -> None:
    """A pace counts from the begin of a run, which a turn of a loop does not."""
    if call.loops and call.pace != Const(0):
        raise GraphError(
            f"call {call.name} in a loop has a pace",
            where=where,
            wanted="no pace= of a call in a loop",
            got=f"pace={call.pace}",
            fix="omit pace=",
        )
