"""The collectives and the MLP over several hosts, in which a rank sends each tile or
row once to each host."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import etc_dist
from etc_dist.codegen import generate
from etc_dist.emulate import Emulator
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import GraphFunction
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.ops.all_gather_matmul import all_gather_matmul_graph
from etc_dist.ops.matmul_reduce_scatter import matmul_reduce_scatter_graph
from etc_dist.ops.tile_model import FAMILY
from etc_dist.runtime.argument_block import Places, fill
from etc_dist.runtime.cpu import simulate
from etc_dist.runtime.memory_plan import Capacity, plan_memory
from etc_dist.schedule import SCHEDULES, schedule_static
from etc_dist.verify.verify import verify
from tests.conftest import kept_proof
from tests.functions.compiled import check_compiled
from tests.graphs.rank_tiles import tile_dims
from tests.ops.arrays import Host
from tests.world.jobs import run_on_hosts

exhaustive = pytest.mark.exhaustive
SIZES = (TileShape(16, 64, swapped=True),)
TILES = {"shapes": SIZES}
GRAPHS = {
    "matmul_reduce_scatter": (matmul_reduce_scatter_graph, TILES),
    "float_partials": (partial(matmul_reduce_scatter_graph, partials="float32"), TILES),
    "all_gather_matmul": (
        all_gather_matmul_graph,
        {"packet_bytes": 48, **TILES},
    ),
}
ROWS, N, K = (
    21,
    40,
    520,
)  # two row blocks: packets of three rows, a tile that ends early


def integers(world: int, *shape: int, dtype: str = "bfloat16") -> list[Host]:
    """An array for each rank, whose sums are exact: of long rows, most are zeros."""
    rng, share = np.random.default_rng(world), 96 / shape[-1]
    arrays = [rng.integers(-1, 2, shape) for _ in range(world)]
    return [
        (a * (rng.random(shape) < share)).astype(numpy_dtype(dtype)) for a in arrays
    ]


def example(
    graph: GraphFunction, rows: int, n: int, k: int, dtype: str = "bfloat16"
) -> tuple[list[dict[str, Host]], list[Host]]:
    """Each rank's inputs and expected output."""
    world = graph.world_size
    dims = {"rows": rows, "n": n, "k": k, **tile_dims(graph)}
    shape = [int(e.evaluate(dims)) for e in graph.tensor("x").shape]
    xs, ws = (integers(world, *s, dtype=dtype) for s in (shape, (n, k)))
    products = [
        x.astype(np.float32) @ w.astype(np.float32).T
        for x, w in zip(xs, ws, strict=True)
    ]
    if graph.name == "all_gather_matmul_graph":
        whole = np.stack(xs).astype(np.float32)
        expected = [whole @ w.astype(np.float32).T for w in ws]
    else:
        total = sum(product.reshape(world, rows, n) for product in products)
        expected = list(total)
    return [{"x": x, "w": w} for x, w in zip(xs, ws, strict=True)], expected


@pytest.mark.parametrize(
    ("world", "local_size"),
    [(2, 1), (4, 2), *(pytest.param(*s, marks=exhaustive) for s in [(4, 1), (6, 2)])],
)
@pytest.mark.parametrize(
    "schedule", ["static", pytest.param("dynamic", marks=exhaustive)]
)
@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_over_hosts_is_proved_and_right(name, world, local_size, schedule):
    make, sizes = GRAPHS[name]
    plan = SCHEDULES[schedule](make(world, local_size=local_size, **sizes))
    dims = {"rows": ROWS, "n": N, "k": K, **tile_dims(plan.graph, split=2, parts=2)}
    kept_proof(plan, dims, 4)
    inputs, expected = example(plan.graph, ROWS, N, K)
    results = simulate(plan, inputs, dims, epochs=2, seed=1).outputs
    for outputs, y in zip(results, expected, strict=True):
        np.testing.assert_array_equal(outputs["y"].astype(np.float32), y)


@pytest.mark.parametrize(
    ("name", "dtype", "local_size", "has_far"),
    [
        ("matmul_reduce_scatter", "bfloat16", 1, True),
        *(
            pytest.param(*case, marks=exhaustive)
            for case in [
                ("matmul_reduce_scatter", "bfloat16", 1, False),
                ("matmul_reduce_scatter", "float16", 2, False),
                ("float_partials", "bfloat16", 1, False),
                ("float_partials", "float16", 2, True),
                ("all_gather_matmul", "bfloat16", 1, False),
                ("all_gather_matmul", "bfloat16", 2, True),
            ]
        ),
    ],
)
def test_kernels_of_graphs_over_hosts(name, dtype, local_size, has_far):
    """By the transport to far ranks; or with all ranks on one host, whose memory they
    map."""
    options = {"local_size": local_size, "dtype": dtype, "shapes": SIZES}
    graph = GRAPHS[name][0](2 * local_size, **options)
    inputs, expected = example(graph, 40, 264, 72, dtype)
    dims = {"rows": 40, "n": 264, "k": 72, **tile_dims(graph, 64)}
    program = Emulator(graph, workers=2, has_far=has_far)
    results = program.run(inputs, dims, seed=1, runs=2)
    for outputs, y in zip(results, expected, strict=True):
        np.testing.assert_array_equal(outputs["y"].astype(np.float32), y)


@pytest.mark.parametrize(("hosts", "near"), [(8, 8), (128, 8), (1024, 1)])
@pytest.mark.parametrize("name", GRAPHS)
def test_tables_of_many_ranks_are_by_near_rank_and_by_host(name, hosts, near):
    graph = GRAPHS[name][0](hosts * near, local_size=near)
    plan = replace(schedule_static(graph), has_far=True)
    dims, rank = {"rows": 256, "n": 256, "k": 64}, near * (hosts // 2)
    dims |= tile_dims(graph, 128)
    peers = [0] * rank + [1024 * (r + 1) for r in range(near)]
    places = Places(peers, control=1, status=1, local=1, wait_limit=1)
    capacity = Capacity().grown(plan_memory(plan, dims))
    block = fill(plan, generate(plan), dims, rank, capacity, places, 132)
    assert (block["peer"].tolist(), block["first_near"]) == (peers[rank:], rank)
    bits = np.unpackbits(block["far_senders"].view(np.uint8), bitorder="little")
    far_hosts = [host for host in range(hosts) if host != hosts // 2]
    assert np.flatnonzero(bits).tolist() == far_hosts


def test_a_graph_of_64_ranks_is_proved():
    graph = matmul_reduce_scatter_graph(64, local_size=8, **TILES)
    dims = {"rows": 16, "n": 16, "k": 8, **tile_dims(graph)}
    verify(schedule_static(graph), dims, 2)


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize(
    ("name", "local_size"),
    [
        ("matmul_reduce_scatter", 1),
        ("all_gather_matmul", 1),
        pytest.param("float_partials", 1, marks=exhaustive),
        *(pytest.param(name, None, marks=exhaustive) for name in GRAPHS),
    ],
)
def test_a_graph_for_hosts_runs_on_this_world(name, local_size, world, arrays):
    """Hosts of one rank, or those of the world."""
    hosts = {"local_size": local_size or world.local_size}
    graph = GRAPHS[name][0](world.size, shapes=FAMILY[-1:], **hosts)
    inputs, expected = example(graph, 264, 520, 72)
    with etc_dist.compile(graph, world) as program:
        operands = {key: arrays.put(array) for key, array in inputs[world.rank].items()}
        y = arrays.poisoned(expected[world.rank].shape, "bfloat16")
        for _ in range(3):
            program.run(**operands, y=y, dims=tile_dims(graph, 256))
        program.synchronize()
        np.testing.assert_array_equal(arrays.get(y), expected[world.rank])


@exhaustive
@pytest.mark.parametrize("name", GRAPHS)
def test_kernels_compile_without_spills(name):
    check_compiled(GRAPHS[name][0](8, local_size=4, shapes=FAMILY[-1:]))


@pytest.mark.parametrize("ranks", [4, pytest.param(2, marks=exhaustive)])
def test_operations_run_over_two_hosts(ranks):
    source = """
import numpy as np, etc_dist
from mpi4py import MPI
from etc_dist.ir.tensor import numpy_dtype

world, rows, n, k = etc_dist.start(), 20, 264, 40
rng, bf16 = np.random.default_rng(world.rank), numpy_dtype("bfloat16")
gather = MPI.COMM_WORLD.allgather
own = slice(world.rank * rows, (world.rank + 1) * rows)

x, w = rng.integers(-1, 2, (rows * world.size, k)), rng.integers(-1, 2, (n, k))
total = sum(gather(x @ w.T))[own]
for partials in (None, "float32"):
    arrays = x.astype(bf16), w.astype(bf16)
    y = etc_dist.matmul_reduce_scatter(*arrays, partials=partials)
    assert (y.astype(int) == total.astype(bf16).astype(int)).all()
y = etc_dist.all_gather_matmul(x[own].astype(bf16), w.T.copy().astype(bf16).T)
assert (y.astype(int) == np.concatenate(gather(x[own])) @ w.T).all()

x = rng.integers(-9, 9, (3, 64))
total = sum(gather(x))
x = x.astype(bf16)
for turn in range(3):
    assert (etc_dist.all_reduce(x).astype(int) == total).all()
etc_dist.all_reduce(x, out=x)
assert (x.astype(int) == total).all()

shapes = (48, 64), (48, 64), (64, 48), (rows, 64)
gate, up, down, x = (rng.standard_normal(s).astype(bf16) for s in shapes)
with etc_dist.MLP(gate, up, down) as mlp:
    y = mlp(x).copy()
    assert all((mlp(x) == y).all() for _ in range(5))
x = np.concatenate(gather(x)).astype(np.float32)
gate, up, down = (w.astype(np.float32) for w in (gate, up, down))
left = x @ gate.T
expected = sum(gather(left / (1 + np.exp(-left)) * (x @ up.T) @ down.T))[own]
error = np.linalg.norm(y - expected) / np.linalg.norm(expected)
assert error < 0.006, error
print("right on", world.hosts.count, "hosts", flush=True)
world.close()
"""
    code, output = run_on_hosts(source, ranks)
    assert code == 0, output
    assert output.count("right on 2 hosts") == ranks


@exhaustive
def test_late_messages_do_not_change_bits():
    source = """
import random, time
import numpy as np, etc_dist
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ops.operation import with_sizes
from etc_dist.world.mpi import MpiChannel

receive, held = MpiChannel.receive, [0.0]

def late(channel, kind):
    if time.monotonic() < held[0]:
        return None
    if random.random() < 0.02:
        held[0] = time.monotonic() + random.random() * 0.004
    return receive(channel, kind)

MpiChannel.receive = late
world, rng = etc_dist.start(), np.random.default_rng(0)
shapes = (TileShape(16, 64, swapped=True),)
sums = with_sizes(etc_dist.MatmulReduceScatter, shapes=shapes)
rows = with_sizes(etc_dist.AllGatherMatmul, shapes=shapes, packet_bytes=96)
x, w = (rng.standard_normal((n, 24)).astype(numpy_dtype("bfloat16")) for n in (80, 40))
operations = sums(), sums(partials="float32"), sums(schedule="dynamic"), rows()
bits = [{op(x, w).tobytes() for turn in range(20)} for op in operations]
assert [len(found) for found in bits] == [1] * 4 and bits[0] == bits[2]
print("the same bits", flush=True)
world.close()
"""
    code, output = run_on_hosts(source)
    assert code == 0, output
    assert output.count("the same bits") == 4
