"""The fused collectives with float8 activations: against fp64 on the backend of the
world, emulated, over hosts, and proved."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from etc_dist import (
    AllGatherMatmul,
    MatmulAllReduce,
    MatmulAllReduceNorm,
    MatmulReduceScatter,
)
from etc_dist.emulate import Emulator
from etc_dist.functions.quantize_rows import ROWS
from etc_dist.functions.scaled_weights import E4M3, PER_BLOCK, Scaling
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.ops.all_gather_matmul import (
    all_gather_matmul_graph,
    gathered_matmul_graph,
)
from etc_dist.ops.exchange_model import TILES, TWO_SHOT
from etc_dist.ops.matmul import matmul_graph
from etc_dist.ops.matmul_all_reduce import matmul_all_reduce_graph
from etc_dist.ops.matmul_reduce_scatter import (
    matmul_reduce_scatter_graph,
    returned_matmul_graph,
)
from etc_dist.ops.tile_model import FLOAT8_FAMILY
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import SCHEDULES, schedule_static
from tests.conftest import kept_proof
from tests.emulate.cases import check
from tests.functions.compiled import check_compiled
from tests.graphs.rank_tiles import tile_dims
from tests.graphs.scaled import (
    dequantized_rows,
    draw_scaled,
    products_of_ranks,
)

BLOCKS = Scaling(PER_BLOCK, "float32", quantizes=True)
TOLERANCE = 4e-3
"""Roundings of a rank's sums, and of the result, to bfloat16."""
N, K = 264, 272
COLLECTIVES = [
    (AllGatherMatmul, {}),
    (MatmulReduceScatter, {}),
    (MatmulReduceScatter, {"partials": "float32"}),
    (MatmulAllReduce, {}),
    (AllGatherMatmul, {"deterministic": "batch"}),
]


def all_ranks(array):
    from mpi4py import MPI

    return np.stack(MPI.COMM_WORLD.allgather(array))


def error(result, expected):
    return float(np.linalg.norm(result - expected) / np.linalg.norm(expected))


@pytest.fixture
def rank_rng(rng, world):
    """This rank's random numbers."""
    return rng.spawn(world.size)[world.rank]


@pytest.mark.mpi(ranks=[1, 2])
@pytest.mark.parametrize("rows", [8, 1600])
@pytest.mark.parametrize(("kind", "options"), COLLECTIVES)
def test_each_collective_multiplies_codes(
    kind, options, rows, make, world, arrays, rank_rng
):
    is_gather = kind is AllGatherMatmul
    count = rows // world.size if is_gather else rows
    x = rank_rng.standard_normal((count, K)).astype(numpy_dtype("bfloat16"))
    codes, scales, w = draw_scaled(rank_rng, N, K, BLOCKS)
    op = make(kind, activations="float8", **options)
    y = arrays.get(op(arrays.put(x), arrays.put_scaled(codes, scales)))
    op.synchronize()
    exact = dequantized_rows(x)
    if is_gather:
        expected = np.concatenate(all_ranks(exact)) @ w.T
    else:
        expected = all_ranks(exact @ w.T).sum(0)
    if kind is MatmulReduceScatter:
        share = rows // world.size
        expected = expected[world.rank * share :][:share]
    assert error(y, expected) < TOLERANCE
    assert "quantize_rows" in op.show()


@pytest.mark.mpi(ranks=[1, 2])
def test_the_norm_follows_the_sum_of_products_of_codes(make, world, arrays, rank_rng):
    dtype, rows = numpy_dtype("bfloat16"), 6
    x = rank_rng.standard_normal((rows, K)).astype(dtype)
    codes, scales, w = draw_scaled(rank_rng, N, K, BLOCKS)
    residual, gain = np.ones((rows, N), dtype), np.ones(N, dtype)
    op = make(MatmulAllReduceNorm, activations="float8")
    operands = arrays.put(x), arrays.put_scaled(codes, scales)
    _, total = op(*operands, arrays.put(residual), arrays.put(gain))
    op.synchronize()
    expected = 1 + all_ranks(dequantized_rows(x) @ w.T).sum(0)
    assert error(arrays.get(total), expected) < TOLERANCE


OPTIONS = {"w_layout": BLOCKS.w_layout, "shapes": FLOAT8_FAMILY[:1]}
SIZES = {"rows": 140, "n": 200, "k": 272, "vectors": 25}
"""Two tiles of the rows of each rank; of n, two and a part of one."""
GRAPHS = {
    "gather": partial(all_gather_matmul_graph, packet_bytes=4096),
    "gather, few rows": gathered_matmul_graph,
    "scatter": matmul_reduce_scatter_graph,
    "scatter, in fp32": partial(matmul_reduce_scatter_graph, partials="float32"),
    "scatter, few rows": returned_matmul_graph,
    "sum": matmul_all_reduce_graph,
}


def dims_of(graph, algorithm=TILES, split=0):
    """With tiles of the only shape. split: the columns of tiles in two parts of k."""
    columns = FLOAT8_FAMILY[0].columns
    dims = tile_dims(graph, columns, split, 1 + split)
    dims |= {"algorithm": algorithm, "piece": 10, "early_strips": 1, **SIZES}
    return {dim.name: dims[dim.name] for dim in graph.dims}


# tests/layers/test_float8_activations.py has the others, between the matmuls of an MLP.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if is_alone else [pytest.mark.exhaustive])
        for name in GRAPHS
        for is_alone in [name in ("sum", "scatter, in fp32")]
    ],
)
def test_the_cuda_half_of_two_ranks_multiplies_codes(name):
    graph = GRAPHS[name](2, **OPTIONS)
    dims = dims_of(graph, split=1)
    operands = products_of_ranks(graph, name.split(",")[0], dims, BLOCKS)
    check(Emulator(graph, workers=2), *operands, dims)


@pytest.mark.parametrize("name", GRAPHS)
def test_tiles_and_transfers_wait_for_codes(name):
    for schedule in SCHEDULES.values():
        plan = schedule(GRAPHS[name](2, **OPTIONS))
        assert kept_proof(plan, dims_of(plan.graph, split=1), 4).unchecked == ()


@pytest.mark.parametrize(("world", "local_size"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("name", ["gather", "scatter", "sum"])
def test_codes_travel_over_hosts(name, world, local_size):
    plan = schedule_static(GRAPHS[name](world, local_size=local_size, **OPTIONS))
    dims = dims_of(plan.graph, TWO_SHOT)
    assert kept_proof(plan, dims, 4).unchecked == ()
    inputs, answers = products_of_ranks(plan.graph, name, dims, BLOCKS)
    outputs = simulate(plan, inputs, dims, epochs=2, seed=1).outputs
    for result, answer in zip(outputs, answers, strict=True):
        assert answer.error(result["y"]) < TOLERANCE


@pytest.mark.parametrize("name", ["gather", "gather, few rows"])
def test_codes_and_scales_travel_instead_of_rows(name):
    """A rank quantizes its own rows alone."""
    graph = GRAPHS[name](2, **OPTIONS)
    dtypes = [tensor.dtype for tensor in graph.tensors if tensor.kind == "symmetric"]
    assert sorted(dtypes) == ["float32", E4M3]
    env = graph.environment(dims_of(graph), 0)
    [call] = [c for c in graph.calls if c.function.name == "quantize_rows"]
    assert int(call.tasks.evaluate(env)) == -(-SIZES["rows"] // ROWS)


def test_a_matmul_without_transfers_quantizes_rows_during_others():
    """On several ranks, too: as many rows as on one rank."""
    later_rows = []
    for world in (1, 2):
        graph = matmul_graph(world, **OPTIONS)
        sizes = {**SIZES, "m": 2048, "n": 8192}
        dims = tile_dims(graph, FLOAT8_FAMILY[0].columns, 0, 1) | sizes
        env = graph.environment({dim.name: dims[dim.name] for dim in graph.dims}, 0)
        later_rows += [
            int(call.tasks.evaluate(env))
            for call in graph.calls
            if call.name == "quantize_later"
        ]
    assert later_rows == 2 * later_rows[:1] and later_rows[0] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", GRAPHS)
def test_programs_compile_without_spills(name):
    check_compiled(GRAPHS[name](2, **{**OPTIONS, "shapes": FLOAT8_FAMILY}))
