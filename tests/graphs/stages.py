"""Graphs that use the ring of stages in other ways than the library's: stages of
different sizes, no store role, tasks that gather after tasks that do not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.codegen.layout import ALIGNMENT, MAX_SHARED_BYTES
from etc_dist.functions.epilogue import swiglu
from etc_dist.functions.weight_layouts import silu
from etc_dist.ir import (
    DeviceFunction,
    Graph,
    GraphFunction,
    ceildiv,
    graph_function,
    tile,
)
from etc_dist.ir.function import COMPUTE, LOAD, TENSOR, TmaBox
from tests.emulate.cases import Example
from tests.graphs.calls import Task, calls
from tests.graphs.dense import own_rows
from tests.layers.reference import Answer, draw

RING_BYTES = 20 * 1024
"""More than 16 of the smallest stages, and no multiple of the large ones. The ring
begins at offset ALIGNMENT: these programs need no more for mbarriers and work items."""


def copy_stages(rows: int) -> DeviceFunction:
    """Through stages of so many rows of 128 bytes."""

    def body(source: Any, to: Any) -> None:
        to[...] = source

    return DeviceFunction(
        name="copy_stages",
        body=body,
        source=Path(__file__).with_name("copy_stages.cuh"),
        lane=TENSOR,
        reads=1,
        writes=1,
        roles=(LOAD, COMPUTE),
        shared=MAX_SHARED_BYTES - ALIGNMENT - RING_BYTES,
        boxes={0: TmaBox(8, 64)},
        constants={"kRows": rows},
    )


SIZES = (8, 300), (24, 170)


@graph_function
def copied(
    g: Graph,
    *,
    copies: Sequence[tuple[DeviceFunction, int]],
    columns: Sequence[int] = (),
    extra: int = 0,
) -> None:
    """y is x, by copies one after the other, each after all tasks of the one before.
    copies: the functions, and rows of their tasks. extra: so many notifications more
    are expected by the second one, which is wrong."""
    n, other_axes = g.dims("n"), (slice(None),) * len(columns)
    source, copy_events = g.input("x", (n, *columns), "bfloat16"), []
    for copy_idx, (function, size) in enumerate(copies):
        is_last = copy_idx == len(copies) - 1
        name, make = ("y", g.output) if is_last else (f"half_{copy_idx}", g.local)
        to = make(name, (n, *columns), "bfloat16")
        num_parts = g.let(f"parts_{copy_idx}", ceildiv(n, size))
        expects = num_parts + (extra if copy_idx == 0 else 0)
        waits, copy_events = copy_events, []
        if not is_last:
            copy_events = [g.events(f"copied_{copy_idx}", (1,), expects=expects)[0]]
        (i,) = grid = g.grid(i=num_parts)
        region = (tile(i, size), *other_axes)
        ends = {"reads": [source[region]], "writes": [to[region]]}
        events = {"waits": waits, "notifies": copy_events}
        g.call(function, grid, name=f"copy_{copy_idx}", **ends, **events)
        source = to


def in_stages(*sizes: tuple[int, int]) -> dict[str, Any]:
    """Options of `copied`: rows of a stage and of a task of each copy."""
    return {"copies": [(copy_stages(s), rows) for s, rows in sizes], "columns": (64,)}


def copies(rows: int) -> Example:
    x = draw(np.random.default_rng(9), (rows, 64), "bfloat16")
    wide = x.astype(np.float32)
    return [{"x": x}], [Answer(wide, np.abs(wide))], {"n": rows}


ROWS, COLUMNS = 100, 256


def gathered_last(world_size: int) -> GraphFunction:
    """y is the SwiGLU of rows of x that `tokens` names, after another product."""
    width = COLUMNS // 2
    parts = f"""
        input x [{ROWS}, k] bfloat16
        input both [1, 2 * n, k] bfloat16
        local other [{ROWS}, 2 * n] bfloat16
    """
    gate, up = (f"both[0, span({n} + j * {width}, {width}), :]" for n in ("0", "n"))
    plain = Task(
        partial(own_rows, name="plain_rows"),
        ["x[:, :]", f"both[0, tile(j, {COLUMNS}), :]"],
        [f"other[:, tile(j, {COLUMNS})]"],
        name="plain",
        grid=f"j: ceildiv(2 * n, {COLUMNS})",
    )
    gated = Task(
        partial(own_rows, epilogue=swiglu, gathers=True, name="gated_rows"),
        ["x[:, :]", gate, up, f"tokens {ROWS} int32"],
        [f"y {ROWS} n[tile(j, {width})] bfloat16"],
        name="gated",
        grid=f"j: ceildiv(n, {width})",
    )
    return calls(world_size, tasks=[plain, gated], dims="k n", parts=parts)


def gathered(k: int, n: int) -> Example:
    rng = np.random.default_rng(11)
    x, gate_up = draw(rng, (ROWS, k), "bfloat16"), draw(rng, (1, 2 * n, k), "bfloat16")
    tokens = rng.integers(0, ROWS, ROWS).astype(np.int32)
    rows, weights = x[tokens].astype(np.float32), gate_up[0].astype(np.float32)
    gate, up = np.split(rows @ weights.T, 2, axis=1)
    y = silu(gate) * up
    magnitude = np.prod(np.split(np.abs(rows) @ np.abs(weights).T, 2, axis=1), axis=0)
    return (
        [{"x": x, "both": gate_up, "tokens": tokens}],
        [Answer(y, magnitude + np.abs(y))],
        {"k": k, "n": n},
    )
