"""Graphs of one task, whose body is in a file of its name or in cuda_functions.cuh,
and of rows that data selects."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etc_dist.functions.push_rows import push_rows
from etc_dist.ir import DeviceFunction, GraphFunction, device_function
from tests.graphs.calls import Task, calls, one_call, whole

FOLDER = Path(__file__).parent


def one_task(body: str, dtype: str, lane: str = "tensor") -> GraphFunction:
    """y [m] is what `body` makes of x [n]."""
    return whole(1, function=_function(body, lane), dtype=dtype, y="m")


def chosen_task(bodies: Sequence[str]) -> GraphFunction:
    """The same, for the body of the number `chosen`: one library for all of them."""
    distance = "maximum({0} - chosen, chosen - {0})"
    tasks = [
        Task(
            _function(body, "tensor"),
            ["x n int32"],
            ["y m int32"],
            grid=f"i: maximum(0, 1 - {distance.format(body_idx)})",
        )
        for body_idx, body in enumerate(bodies)
    ]
    return calls(1, tasks=tasks, dims="n m chosen")


def gathered_rows(row: str = "at") -> GraphFunction:
    """y [n, 4] = rows of x [m, 4], of the numbers `row`, by `at` and m."""
    number = re.sub(r"\bat\b", "at.load(i)", row)
    reads, writes = [f"x m[{number}] 4 float32"], ["y n[i] 4 float32"]
    options = {"dims": "n m", "grid": "i: n", "parts": "input at [n] int32"}
    return one_call(1, push_rows(), reads, writes, **options)


def _function(name: str, lane: str) -> DeviceFunction:
    def body(x: Any, y: Any) -> None:
        raise AssertionError("only the CUDA body runs here")

    body.__name__ = name
    own_source = FOLDER / f"{name}.cuh"
    source = own_source if own_source.exists() else FOLDER / "cuda_functions.cuh"
    return device_function(source=source, reads=1, writes=1, lane=lane)(body)
