"""The dense MLP: exact results, and which of its programs serves which rows."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.errors import ArgumentError, WorldError
from etc_dist.layers.mlp import MLP
from etc_dist.layers.mlp_few_rows import FEW_ROWS
from etc_dist.layers.mlp_packed_rows import are_packed, most_packed

MANY, PACKED, FEW = "mlp_graph", "mlp_packed_rows_graph", "mlp_few_rows_graph"


@pytest.mark.mpi
def test_large_gates_make_the_result_exact(world, arrays):
    """silu(32) is 32 and silu(0) is 0, so that a row of x with a single 1 selects one
    column, and gives small integers, which differ between rows."""
    rows, hidden, inner = 5, 40, 24
    rngs = [np.random.default_rng(rank) for rank in range(world.size)]
    shares = [
        (
            32 * rng.integers(0, 2, (inner, hidden)),
            rng.integers(-1, 2, (inner, hidden)),
            rng.integers(-1, 2, (hidden, inner)),
        )
        for rng in rngs
    ]
    picked = world.rank * rows + np.arange(rows)
    expected = sum((gate * up).T[picked % hidden] @ down.T for gate, up, down in shares)
    weights = [arrays.put_as(weight, "bfloat16") for weight in shares[world.rank]]
    mlp = MLP(*weights, world=world)
    out = mlp(arrays.put_as(np.eye(hidden)[picked % hidden], "bfloat16"))
    mlp.synchronize()
    np.testing.assert_array_equal(arrays.get(out), expected)
    mlp.close()


@pytest.mark.mpi
def test_few_and_many_rows_take_turns(make, arrays, world, compiled):
    layer, most = make("mlp few rows", 264, 136), FEW_ROWS // world.size
    # Without synchronising in between.
    calls = [layer.rows(count) for count in (1, most + 1, most, 300, 2)]
    names = []
    for x, out, _ in calls:
        layer.layer(x, out)
        names.append(layer.program)
    layer.layer.synchronize()
    for _, out, answer in calls:
        answer.check(arrays.get(out))
    dims = {"rows": 2, "hidden": 264, "inner": 136}
    hints = layer.layer.program._capacity_hint(dims)
    assert hints == [{**dims, "rows": rows} for rows in range(1, most + 1)]
    assert names == [FEW, MANY, FEW, MANY, FEW]
    assert compiled == [MANY, FEW]


@pytest.mark.mpi(min_size=2)
def test_rows_are_packed_where_that_makes_tiles_fewer(make, world, compiled):
    layer = make("mlp packed rows", 40, 24, few_rows=FEW_ROWS)
    few, half = FEW_ROWS // world.size, 256 // world.size
    # Together, all ranks' first rows fill one tile; full tiles are as many apart.
    expected = {few: FEW, few + 1: PACKED, half: PACKED, 256: MANY, 512: MANY, 1: FEW}
    for rows, name in expected.items():
        layer.check(rows)
        assert layer.program == name
        if name == PACKED:
            hint = layer.layer.program._capacity_hint({"rows": rows, "hidden": 40})
            assert hint == [{"rows": most_packed(world.size), "hidden": 40}]
    assert compiled == [MANY, PACKED, FEW]


# Four ranks' rows: two tiles of four at most, or five of eight; never nine of twelve.
def test_tiles_are_shared_where_that_saves_more_than_a_quarter():
    counts = (1, 128, 129, 192, 256, 257, 320, 321, 512, 513, 768)
    assert [n for n in counts if are_packed(4, n)] == [1, 128, 257, 320]


@pytest.mark.parametrize("world_size", range(1, 9))
def test_most_packed_is_the_largest_packed_number(world_size):
    packed = [r for r in range(1, 5000) if are_packed(world_size, r)]
    assert most_packed(world_size) == max(packed, default=0)


@pytest.mark.mpi
def test_one_rank_packs_nothing(one_rank, make, compiled):
    make("mlp", 40, 24, packed=True)
    assert compiled == [MANY]


@pytest.mark.mpi(min_size=2)
def test_ranks_that_would_run_other_programs_are_refused(make, world):
    layer = make("mlp few rows", 40, 24)
    x, out, _ = layer.rows(1 if world.rank == 0 else FEW_ROWS)
    with pytest.raises(ArgumentError, match="the ranks do not make the same call"):
        layer.layer(x, out)
    layer.check(2)


@pytest.fixture
def growing(make, monkeypatch):
    """A layer whose program for few rows needs memory, and the shapes it requests."""
    layer = make("mlp few rows", 40, 24)
    layer.check(2)
    executor, grown = layer.layer.program._executor, []
    grow, prepare = executor.grow, executor.prepare

    def counted(*shapes):
        grown.extend(shapes)
        grow(*shapes)

    monkeypatch.setattr(executor, "grow", counted)
    monkeypatch.setattr(
        executor, "prepare", lambda *call: prepare(*call) if grown else None
    )
    return layer, grown


@pytest.mark.mpi
def test_a_program_that_grows_allocates_for_all_few_rows(growing, world):
    layer, grown = growing
    for rows in (3, FEW_ROWS // world.size):
        layer.check(rows)
    assert [dims["rows"] for dims in grown] == [*range(1, FEW_ROWS // world.size + 1)]


@pytest.mark.mpi
def test_a_program_that_grows_is_not_captured(growing, monkeypatch):
    layer, grown = growing
    x, out, _ = layer.rows(3)
    with monkeypatch.context() as patch:
        patch.setattr("etc_dist.program.is_capturing", lambda *_: True)
        with pytest.raises(WorldError, match="captured before it has memory"):
            layer.layer(x, out)
    assert not grown
    layer.check(3)


@pytest.mark.mpi
@pytest.mark.gpu
def test_few_rows_are_captured_once_there_is_room(make, arrays, world):
    import cupy

    layer, most = make("mlp few rows", 264, 136), FEW_ROWS // world.size
    stream = cupy.cuda.Stream(non_blocking=True)
    calls = [layer.rows(count) for count in (2, most)]
    with stream:
        stream.begin_capture()
        with pytest.raises(WorldError, match="captured before it has memory"):
            layer.layer(*calls[0][:2])
        stream.end_capture()
    layer.layer(*calls[0][:2])
    layer.layer.synchronize()
    with stream:
        stream.begin_capture()
        for x, out, _ in calls:
            layer.layer(x, out)
        graph = stream.end_capture()
    for _ in range(3):
        for _, out, _ in calls:
            out.fill(np.nan)
        cupy.cuda.runtime.deviceSynchronize()
        graph.launch(stream)
        stream.synchronize()
        for _, out, answer in calls:
            answer.check(arrays.get(out))
    # Many rows have memory of their own, which may still grow.
    layer.check(300)
