"""Programs for these tests, each with its NumPy reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from etc_dist.functions.weight_layouts import CHUNK_COLUMNS
from etc_dist.ir import device_function
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.schedule import Plan, schedule_static
from tests.graphs.rank_tiles import gather, scatter, tile_dims

Array = np.ndarray[Any, Any]
OPS = ("matmul_reduce_scatter", "all_gather_matmul")


@dataclass(frozen=True)
class Case:
    """A plan with inputs, expected y and tolerance, by rank."""

    plan: Plan
    inputs: list[dict[str, Array]]
    dims: dict[str, int]
    expected: list[Array]
    bound: list[Array]

    def check(self, rank: int, y: Array) -> None:
        off = np.abs(y.astype(np.float64) - self.expected[rank]) - self.bound[rank]
        assert off.max(initial=-1.0) <= 0.0, f"rank {rank} is off by {off.max()} more"


def case(
    op: str,
    world: int,
    rng: np.random.Generator,
    dims: tuple[int, int, int] = (32, 32, 32),
    dtype: str = "float32",
    w_layout: str = "nk",
) -> Case:
    """`op` with random inputs of `dims` (rows, n, k)."""
    rows, n, k = dims
    is_scatter = op == "matmul_reduce_scatter"
    x_shape = (world, rows, k) if is_scatter else (rows, k)
    inputs = [
        {
            "x": rng.standard_normal(x_shape).astype(numpy_dtype(dtype)),
            "w": rng.standard_normal((n, k) if w_layout == "nk" else (k, n)).astype(
                numpy_dtype(dtype)
            ),
        }
        for _ in range(world)
    ]
    xs = [i["x"].astype(np.float64) for i in inputs]
    ws = [i["w"].astype(np.float64) for i in inputs]
    if w_layout == "kn":
        ws = [w.T for w in ws]
    rounding = {"float32": 2**-18, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
    if is_scatter:
        parts = [[xs[q][r] @ ws[q].T for q in range(world)] for r in range(world)]
        expected = [np.sum(p, axis=0) for p in parts]
        bound = [rounding * np.sum(np.abs(p), axis=0) + 1e-4 for p in parts]
    else:
        expected = [np.stack([x @ w.T for x in xs]) for w in ws]
        bound = [rounding * np.abs(y) + 1e-4 for y in expected]
    plan, columns = plan_of(op, world, dtype, w_layout), 16
    if w_layout == "kn":
        columns = CHUNK_COLUMNS
    dims = {"rows": rows, "n": n, "k": k, **tile_dims(plan.graph, columns)}
    return Case(plan, inputs, dims, expected, bound)


def plan_of(op: str, world: int, dtype: str = "float32", w_layout: str = "nk") -> Plan:
    options = {"dtype": dtype, "w_layout": w_layout}
    if op == "matmul_reduce_scatter":
        return schedule_static(scatter(world, **options))
    return schedule_static(gather(world, packet_bytes=256, **options))


def with_call(plan: Plan, name: str, **changes: Any) -> Plan:
    """The plan of the same graph with one call changed: a planted fault."""
    assert any(call.name == name for call in plan.graph.calls)
    calls = tuple(
        replace(call, **changes) if call.name == name else call
        for call in plan.graph.calls
    )
    return schedule_static(replace(plan.graph, calls=calls))


@device_function(source="", reads=1, writes=1, lane="transfer")
def send(x: Array, box: Array) -> None:
    box[...] = x


def ring_inputs(rank: int, n: int) -> dict[str, Array]:
    x = np.arange(n, dtype=np.float32) + 100 * rank
    return {"x": x, "count": np.ones(4, np.int32)}
