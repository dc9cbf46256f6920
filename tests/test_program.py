"""Programs: arrays by name, outputs made, shapes proved, and refusals."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

import etc_dist
from etc_dist import Program
from etc_dist.errors import ArgumentError, RaceError, WorldError
from etc_dist.functions.add_partials import add_partials
from etc_dist.functions.push_rows import push_rows
from etc_dist.functions.scaled_weights import E4M3
from etc_dist.ir import GraphFunction, device_function
from etc_dist.ops.matmul import matmul_graph
from etc_dist.program import set_policy
from etc_dist.schedule import schedule_static
from etc_dist.schedule.plan import Choice
from etc_dist.verify.proof import prove
from tests.graphs.calls import Task, calls, one_call, whole
from tests.graphs.ring import ring
from tests.ops.arrays import Arrays
from tests.refusals import refused

pytestmark = pytest.mark.mpi


@device_function(
    source=Path(__file__).parent / "runtime" / "fill_ones.cuh", reads=0, writes=1
)
def fill_ones(y: Any) -> None:
    y[...] = 1


rounded = partial(
    one_call,
    function=add_partials("bfloat16"),
    reads=["a 1 rows/1 8 float32"],
    writes=["y rows/1 8 bfloat16"],
)
"""y is a, in another dtype."""
copied_bits = partial(
    one_call,
    function=push_rows(),
    reads=[f"x rows/1 16 {E4M3}"],
    writes=[f"y rows/1 16 {E4M3}"],
)
copies_own_rows = partial(
    one_call,
    function=push_rows(),
    reads=["x rows[tile(i, 2)] 8 float32"],
    writes=["y rows[tile(i, 2)] 8 float32"],
    parts="own_rows rows most",
    grid="i: ceildiv(most, 2)",
)
"""y is x, of which ranks have different numbers of rows."""


def copies(world_size: int) -> GraphFunction:
    """y is a, and z is b."""
    rows = "rows/1 8 float32"
    tasks = [
        Task(push_rows(), [f"{x} {rows}"], [f"{y} {rows}"], name=f"copy_{x}")
        for x, y in ("ay", "bz")
    ]
    return calls(world_size, tasks=tasks)


@pytest.fixture
def compiled(world) -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []

    def compiled(graph: Any = ring, **options: Any) -> Program:
        programs.append(etc_dist.compile(graph(world.size, **options), world))
        return programs[-1]

    yield compiled
    for program in programs:
        program.close()


@pytest.fixture
def program(compiled) -> Program:
    return compiled()


@pytest.fixture
def arrays(world) -> Arrays:
    return Arrays(world.backend)


@pytest.fixture
def inputs(world, arrays) -> Callable[..., dict[str, Any]]:
    """x and count for the ring, x all of this rank's number."""

    def inputs(rows: int = 8, columns: int = 8) -> dict[str, Any]:
        x = np.full((rows, columns), world.rank, np.float32)
        return {"x": arrays.put(x), "count": arrays.put(np.ones(4, np.int32))}

    return inputs


def fits(program: Program, inputs: dict[str, Any], arrays: Arrays) -> bool:
    """Whether a run of the ring has the right result on this rank."""
    y = program.run(**inputs)["y"]
    program.synchronize()
    previous = (program.world.rank - 1) % program.world.size
    return bool((arrays.get(y) == previous).all())


# ------------------------------------------------------------------------- runs


def test_outputs_are_made_like_the_inputs(program, inputs, arrays):
    operands = inputs()
    outputs = program.run(**operands)
    program.synchronize()
    assert list(outputs) == ["y"]
    assert type(outputs["y"]) is type(operands["x"])
    assert (outputs["y"].shape, outputs["y"].dtype) == ((8, 8), np.float32)
    assert fits(program, operands, arrays)


def test_outputs_that_are_given_are_filled(program, inputs, arrays, world):
    y = arrays.poisoned((8, 8), "float32")
    assert program.run(**inputs(), y=y)["y"] is y
    program.synchronize()
    assert (arrays.get(y) == (world.rank - 1) % world.size).all()


def test_inputs_may_be_one_array(compiled, arrays):
    x, y, z = (arrays.put_as(np.full((4, 8), n), "float32") for n in range(3))
    program = compiled(copies)
    program.run(a=x, b=x, y=y, z=z)
    program.synchronize()
    assert (arrays.get(y) == 0).all() and (arrays.get(z) == 0).all()


def test_one_program_takes_every_shape(program, inputs, arrays):
    for rows in (4, 64, 8, 64, 128, 4):
        assert fits(program, inputs(rows), arrays)


def test_ranks_may_have_different_numbers_of_rows(compiled, arrays, world, monkeypatch):
    """Which is proved once for the largest of them."""
    program, proved, host = compiled(copies_own_rows), [], np.arange(64, dtype="f4")

    def counted(plan, dims, *options):
        proved.append(dims)
        return prove(plan, dims, *options)

    monkeypatch.setattr("etc_dist.program.prove", counted)
    for counts in ((5, 8), (8, 0), (0, 0), (0, 8)):
        x = host.reshape(8, 8)[: counts[world.rank]]
        y = program.run(x=arrays.put(x.copy()))["y"]
        program.synchronize()
        assert np.array_equal(arrays.get(y), x)
    assert proved == [{"most": 8}]


def test_a_shape_is_proved_before_its_first_run_only(
    program, inputs, arrays, monkeypatch
):
    proved: list[int] = []

    def counted(plan, dims, *options):
        proved.append(dims["rows"])
        return prove(plan, dims, *options)

    monkeypatch.setattr("etc_dist.program.prove", counted)
    for rows in (4, 8, 4, 8, 12):
        assert fits(program, inputs(rows), arrays)
    assert proved == [4, 8, 12]


def test_a_program_shows_its_graph_its_plan_and_numbers(program):
    graph, plan = program.plan.graph.show(), program.plan.show()
    assert program.show().startswith(graph + plan + "not proved, since it depends on")
    assert "take: tiles units\n    = 16\n" in program.show(rows=64)
    assert program.source.startswith("// ring on")


# --------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("dims", "kind", "words"),
    [
        ({"row": 8}, ArgumentError, "wanted: integers of at least 0 for rows"),
        ({"rows": -8}, ArgumentError, "rows is out of range"),
        ({"rows": "8"}, TypeError, "rows expects an int"),
    ],
)
def test_a_program_shows_no_numbers_at_dims_that_do_not_fit(dims, kind, words, program):
    with pytest.raises(kind, match=words):
        program.show(**dims)


@pytest.mark.mpi(ranks=[2])
def test_a_wrong_graph_is_refused_before_it_runs(compiled, inputs, arrays, monkeypatch):
    bad, good = compiled(notifies=False), compiled()
    monkeypatch.setattr(bad._executor, "launch", lambda _: pytest.fail("launched"))
    for _ in range(2):
        with pytest.raises(RaceError, match=r"box\[0:4, 0:8\].*no event orders them"):
            bad.run(**inputs())
    assert fits(good, inputs(), arrays)


def unwaited(world_size: int, *, notifies: bool) -> GraphFunction:
    """y is x, by way of z: of four workers, each reads what it has written itself."""
    copy, end = push_rows(lane="tensor"), "4[i] n float32"
    events = {"grid": "i: 4", "notifies": ["ready[i]"] if notifies else []}
    tasks = [
        Task(copy, [f"x {end}"], [f"z {end}"], name="write", **events),
        Task(copy, [f"z {end}"], [f"y {end}"], name="read", grid="i: 4"),
    ]
    parts = "events ready [4] expects 1"
    return calls(world_size, tasks=tasks, parts=parts, kinds={"z": "local"})


@pytest.mark.parametrize(
    ("notifies", "fault"), [(False, ""), (True, "ready[0] on rank 0 is notified")]
)
def test_a_race_that_four_workers_hide_is_refused(notifies, fault, world, arrays):
    program = etc_dist.compile(unwaited(world.size, notifies=notifies), world)
    x = arrays.put(np.ones((4, 8), np.float32))
    words = f"132 workers each|{fault}|write[i=0]|read[i=0]|no event orders them"
    error = refused(lambda: program.run(x=x), words)
    assert notifies or isinstance(error, RaceError)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"x": None}, r"missing \['x'\], unknown none"),
        ({"z": "x"}, r"missing none, unknown \['z'\]"),
        ({"x": None, "z": "x"}, r"missing \['x'\], unknown \['z'\]"),
    ],
    ids=["missing", "unknown", "both"],
)
def test_arrays_are_named_as_the_tensors_are(change, text, program, inputs, arrays):
    operands = inputs()
    renamed = {
        **operands,
        **{name: operands.get(like) for name, like in change.items()},
    }
    with pytest.raises(
        ArgumentError, match=rf"inputs x, count; states none; .*\n.*{text}"
    ):
        program.run(**{n: a for n, a in renamed.items() if a is not None})
    assert fits(program, operands, arrays)


def bad_array(what: str, put: Callable[..., Any]) -> dict[str, Any]:
    memory = put(np.zeros((15, 8)), "float32")
    return {
        "one axis": {"x": put(np.zeros(8), "float32")},
        "other columns": {"x": put(np.zeros((8, 16)), "float32")},
        "other dtype": {"x": put(np.zeros((8, 8)), "float16")},
        "other rows than y": {"y": put(np.zeros((4, 8)), "float32")},
        "count too short": {"count": put(np.ones(1), "int32")},
        "y overlaps x": {"x": memory[:8], "y": memory[7:]},
        "y is x": {"x": memory[:8], "y": memory[:8]},
    }[what]


WORDS = {
    "one axis": r"dims of ring cannot be found[^$]*got: +\{'x': \[8\]",
    "other columns": r"wanted: x \[rows = 8, 8\] float32[^$]*got: +x \[8, 16\] float32",
    "other dtype": r"wanted: x \[rows = 8, 8\] float32[^$]*got: +x \[8, 8\] float16",
    "other rows than y": r"y \[rows = 8, 8\] float32[^$]*got: +y \[4, 8\] float32",
    "count too short": r"wanted: count \[4\] int32[^$]*got: +count \[1\] int32",
    "y overlaps x": r"wanted: y apart from x\n +got: +y overlaps x\n",
    "y is x": r"wanted: y apart from x\n",
}


@pytest.mark.parametrize("what", WORDS)
def test_an_array_that_does_not_fit_is_refused(what, program, inputs, arrays):
    with pytest.raises(ArgumentError) as caught:
        program.run(**{**inputs(), **bad_array(what, arrays.put_as)})
    # Ranks on GPUs differ in the device they name: then each line bears its rank.
    assert re.search(WORDS[what], str(caught.value).replace("rank 0: ", ""))
    assert fits(program, inputs(), arrays)


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("what", WORDS)
def test_an_array_that_does_not_fit_on_one_rank_is_refused_on_all(
    what, program, inputs, arrays, world
):
    operands = inputs()
    if world.rank == world.size - 1:
        operands |= bad_array(what, arrays.put_as)
    with pytest.raises(ArgumentError, match=rf"where: +rank {world.size - 1}: "):
        program.run(**operands)
    assert fits(program, inputs(), arrays)


def test_outputs_that_overlap_are_refused(compiled, arrays):
    a, memory = (arrays.poisoned(shape, "float32") for shape in ((4, 8), (7, 8)))
    with pytest.raises(ArgumentError, match=r"wanted: z apart from y\n.*z overlaps y"):
        compiled(copies).run(a=a, b=a, y=memory[:4], z=memory[3:])


def test_an_output_of_a_dtype_that_no_input_has_is_allocated(compiled, arrays):
    a = np.arange(32, dtype=np.float32).reshape(1, 4, 8)
    program = compiled(rounded)
    y = program.run(a=arrays.put(a))["y"]
    program.synchronize()
    assert type(y) is type(arrays.put(a))
    np.testing.assert_array_equal(arrays.get(y), a[0].astype(bfloat16))


def test_an_output_of_a_graph_without_inputs_is_allocated(compiled, arrays):
    program = compiled(partial(whole, function=fill_ones))
    y = program.run(dims={"n": 8})["y"]
    program.synchronize()
    np.testing.assert_array_equal(arrays.get(y), np.ones(8, np.float32))


def test_an_output_of_float8_is_made_as_bits_like_its_input(compiled, arrays):
    x = np.arange(32, dtype=np.uint8).reshape(2, 16)
    with compiled(copied_bits) as program:
        y = program.run(x=arrays.put(x))["y"]
        program.synchronize()
        assert arrays.put(x).dtype == y.dtype
        np.testing.assert_array_equal(arrays.get(y), x)


@pytest.mark.mpi(ranks=[2])
def test_ranks_with_different_shapes_are_refused(program, inputs, arrays, world):
    rows = 16 if world.rank == 1 else 8
    with pytest.raises(ArgumentError, match=r"rank 1: ring\(rows=16\)"):
        program.run(**inputs(rows))
    assert fits(program, inputs(), arrays)


def test_what_is_not_an_array_is_a_type_error_on_all_ranks(
    program, inputs, arrays, world
):
    operands = inputs()
    if world.rank == world.size - 1:
        operands["count"] = [1, 1, 1, 1]
    words = rf"where: +(rank {world.size - 1}|before)[^$]*count expects .*, got list"
    with pytest.raises(TypeError, match=words):
        program.run(**operands)
    assert fits(program, inputs(), arrays)


def test_a_context_manager_closes_a_program_unless_it_is_left_by_an_error(
    compiled, inputs
):
    with pytest.raises(KeyError), compiled() as program:
        raise KeyError
    program.run(**inputs())
    with program:
        program.run(**inputs())
    with pytest.raises(WorldError, match="the program is closed"):
        program.synchronize()


def test_a_closed_program_says_so(program, inputs, arrays):
    assert fits(program, inputs(), arrays)
    program.close()
    program.close()
    for use in (lambda: program.run(**inputs()), program.synchronize):
        with pytest.raises(WorldError, match="the program is closed"):
            use()


@pytest.mark.mpi(ranks=[1])
def test_a_policy_is_called_once_for_equal_dims():
    calls = []

    def policy(dims, workers):
        calls.append((dict(dims), workers))
        return [Choice("shape", len(calls), list)]

    program = SimpleNamespace(plan=schedule_static(matmul_graph(1)))
    set_policy(program, policy)
    sizes = {"m": 8, "n": 16, "k": 24}
    for dims, workers, shape in (
        (sizes, 4, 1),
        (dict(reversed(sizes.items())), 4, 1),
        (sizes | {"m": 9}, 4, 2),
        (sizes, 6, 3),
        (sizes, 4, 1),
    ):
        assert program.plan.chosen(dims, workers) == dims | {"shape": shape}
    assert calls == [(sizes, 4), (sizes | {"m": 9}, 4), (sizes, 6)]
