"""Each program of the layers as a graph: proved, simulated, without needless events."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from etc_dist.errors import GraphError, RaceError
from etc_dist.ir import GraphFunction
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_static
from etc_dist.verify.verify import verify
from tests.conftest import first_always, kept_proof
from tests.graphs.mixtures import moe_graph
from tests.layers.programs import (
    BASES,
    LOADED,
    PROGRAMS,
    SCHEDULES,
    Experts,
    Program,
    Sizes,
    base_of,
    without,
)
from tests.layers.reference import ROUTINGS, TOLERANCE

exhaustive = pytest.mark.exhaustive
programs = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
# Extensions are exhaustive where they do what their base does.
programs_of_bases = pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, id=name, marks=[] if name in BASES else [exhaustive])
        for name, program in PROGRAMS.items()
    ],
)
mixtures = [name for name, program in PROGRAMS.items() if isinstance(program, Experts)]


def options_of_graph(options: dict[str, Any]) -> dict[str, Any]:
    """Those that are not of the inputs alone."""
    return {k: v for k, v in options.items() if k not in ("ids", "equal")}


# ------------------------------------------------------------------------ the proof


def prove(program: Program, graph: GraphFunction, dims: dict[str, int], workers: int):
    """Prove both schedules, except for loaded values."""
    # Shapes that are drawn anew in each run are not proved again.
    proof_of = kept_proof if settings().derandomize else verify
    for schedule in SCHEDULES.values():
        unchecked = proof_of(schedule(graph), dims, workers).unchecked
        assert bool(unchecked) == program.loads
        assert all(any(name in text for name in LOADED) for text in unchecked)


@programs
@given(data=st.data(), pairs=st.integers(1, 5))
def test_program_is_proved_at_odd_shapes(program, data, pairs):
    world, options, sizes = program.draw_case(data)
    graph = program.small(world, **options)
    prove(program, graph, program.dims(world, sizes), 2 * pairs)


@programs_of_bases
def test_program_is_proved_on_few_and_many_ranks(program):
    for world in {program.worlds[0], 3, 8} & {*program.worlds}:
        graph = program.small(world, **program.experts(world))
        prove(program, graph, program.dims(world, program.sizes), 4)


@programs
def test_program_is_proved_at_real_shapes(program):
    for world, options, sizes in program.real:
        graph = program.large(world, **options)
        kept_proof(schedule_static(graph), program.dims(world, sizes), 132)


@pytest.mark.parametrize("experts", [136, 131, 70, 3])
@pytest.mark.parametrize("tokens", [9, 1056, 1057, 4500])
def test_moe_is_proved_with_logits_in_tiles(tokens, experts):
    program = PROGRAMS["moe"]
    graph = moe_graph(1, experts=experts, top_k=3)
    prove(program, graph, program.dims(1, (tokens, 40, 24)), 132)


@pytest.mark.parametrize(("name", "most"), [("moe", 16384), ("moe few tokens", 16)])
@given(experts=st.integers(1, 512), tokens=st.integers(1, 16384))
@example(experts=60, tokens=16)
@example(experts=316, tokens=1)
def test_any_number_of_experts_is_proved(name, most, experts, tokens):
    program = PROGRAMS[name]
    graph = program.large(1, experts=experts, top_k=min(experts, 3))
    dims = program.dims(1, ((tokens - 1) % most + 1, 40, 24))
    verify(schedule_static(graph), dims, 132)


@programs
def test_program_is_proved_whole_for_given_loads(program):
    graph = program.smallest
    dims = program.dims(program.world, program.sizes)
    for schedule in SCHEDULES.values():
        proof = verify(schedule(graph), dims, 4, tensors=program.tensors(graph))
        assert proof.unchecked == ()


def events() -> list[Any]:
    """Each event of each program. Those that an extension has from its base are
    exhaustive."""
    return [
        pytest.param(
            name,
            event,
            marks=[exhaustive]
            if name not in BASES and event in PROGRAMS[base_of(name)].protects
            else [],
        )
        for name in PROGRAMS
        for event in PROGRAMS[name].protects
    ]


@pytest.mark.parametrize(("name", "event"), events())
def test_each_event_is_needed(name, event):
    program = PROGRAMS[name]
    graph = program.smallest
    dims, tensors = program.dims(program.world, program.sizes), program.tensors(graph)

    def check(*verbs: str) -> None:
        lacking = without(graph, event, *verbs)
        verify(schedule_static(lacking), dims, 8, tensors=tensors)

    with pytest.raises(RaceError if event != "planned" else GraphError) as caught:
        check("waits", "notifies")
    assert re.search(rf" {program.protects[event]}\b", caught.value.got)
    with pytest.raises(GraphError):
        check("waits")


@programs
def test_no_other_event_is_there(program):
    graph = program.smallest
    assert {events.name for events in graph.events} == set(program.protects)


# ------------------------------------------------------------------- the simulation


def check_bits(
    program: Program,
    case: tuple[int, dict[str, Any], Sizes],
    seed: int,
    graph: GraphFunction | None = None,
) -> None:
    """Other interleavings and the other schedule give the same bits, near fp32."""
    world, options, sizes = case
    rng, dims = np.random.default_rng(seed), program.dims(world, sizes)
    graph = graph or program.small(world, **options_of_graph(options))
    inputs, answers = program.inputs(rng, world, sizes, **options)
    plans = {name: schedule(graph) for name, schedule in SCHEDULES.items()}
    runs = [
        # The data that a proof depends on are those of the first run.
        simulate(plans[name], inputs, dims, seed=n, epochs=2, check=n == seed).outputs
        for name, n in (("static", seed), ("static", seed + 1), ("dynamic", seed))
    ]
    dtype = options.get("dtype", "bfloat16")
    for rank, answer in enumerate(answers):
        assert len({run[rank]["y"].tobytes() for run in runs}) == 1
        answer.check(runs[0][rank]["y"], dtype)


@programs
@settings(max_examples=settings().max_examples // 4)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_odd_shapes_give_the_same_bits_near_fp32(program, data, seed):
    world, options, sizes = program.draw_case(data, most_ranks=3, most_rows=9)
    if isinstance(program, Experts):
        options["equal"] = data.draw(st.booleans())
    check_bits(program, (world, options, sizes), seed)


CORNERS = [
    corner
    for name, program in PROGRAMS.items()
    for corner in first_always(
        [(name, case) for case in program.corners], int(name in BASES)
    )
]


@pytest.mark.parametrize(("name", "case"), CORNERS, ids=str)
def test_corner_shapes_give_the_same_bits_near_fp32(name, case, seed):
    check_bits(PROGRAMS[name], case, seed)


@pytest.mark.parametrize(
    "dtype", first_always([(dtype_name,) for dtype_name in TOLERANCE], 1)
)
@programs_of_bases
def test_tiles_of_the_gpu_give_the_reference(program, dtype, rng):
    world, sizes = program.world, program.full
    experts = program.experts(world)
    graph = program.large(world, dtype=dtype, **experts)
    inputs, answers = program.inputs(rng, world, sizes, dtype, **experts)
    dims = program.dims(world, sizes)
    outputs = simulate(schedule_static(graph), inputs, dims).outputs
    for answer, out in zip(answers, outputs, strict=True):
        answer.check(out["y"], dtype)
        assert answer.error(out["y"]) < 1.5 * TOLERANCE[dtype]


def routings() -> list[Any]:
    """Each program with each routing and number of tokens, of which a routing has one
    without --all: a full tile of ten rows, one row more, and many tiles. A shared
    expert has all tokens, and rows are packed alike for any routing."""
    counts = (41, 11, 10, 1)
    return [
        pytest.param(name, routing, count, marks=[] if always else [exhaustive])
        for name in mixtures
        for routing_idx, routing in enumerate(ROUTINGS)
        for count in counts
        for always in [
            count == counts[routing_idx % len(counts)]
            and not PROGRAMS[name].shared
            and (name in BASES or routing_idx % 3 == 0)
        ]
    ]


@pytest.mark.parametrize(("name", "routing", "count"), routings())
def test_any_routing_gives_the_reference(name, routing, count, rng, seed):
    program = PROGRAMS[name]
    schedule = "dynamic" if count in (10, 41) else "static"
    world = 4 if program.world == 2 and count == 11 else program.world
    tokens = max(1, min(count, program.most[0]) // world)
    ids = ROUTINGS[routing](rng, world * tokens)
    sizes, top_k = (tokens, 24, 16), ids.shape[1]
    inputs, answers = program.inputs(rng, world, sizes, top_k=top_k, ids=ids)
    plan = SCHEDULES[schedule](program.small(world, top_k=top_k))
    dims = program.dims(world, sizes)
    outputs = simulate(plan, inputs, dims, seed=seed, workers=8).outputs
    for answer, out in zip(answers, outputs, strict=True):
        answer.check(out["y"])
