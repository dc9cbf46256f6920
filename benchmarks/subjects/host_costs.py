"""The host's time in a model's step and in the operations of torch, on either backend,
without the launch, which takes about 3 microseconds more on GPUs."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from benchmarks.decoder_launches import read_prompts
from benchmarks.device import Call, Device, Gpu
from benchmarks.harness import Result, Run, Subject, numbers, provenance
from etc_dist import AllGatherMatmul, Matmul, MatmulReduceScatter
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.layers.mlp import SharedMLP
from etc_dist.models.config import ModelConfig
from etc_dist.models.heads import HeadLayout
from etc_dist.models.model import Model
from etc_dist.models.weights import weight_shapes
from etc_dist.ops.operation import Operation
from etc_dist.program import Program
from etc_dist.world import World

ROWS = 1, 8, 32, 128
POSITIONS, PROMPT = 1024, 8
ROUNDS, STEPS, CPU_ROUNDS = 4000, 20, 100
PROTOCOL = (
    f"model.step of Python lists, without the launch; mean of {STEPS} calls, the "
    f"fastest of {ROUNDS} rounds"
)
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    layers=1,
    hidden=256,
    inner=256,
    vocabulary=1024,
    heads=4,
    kv_heads=2,
    head_dim=64,
    head=HeadLayout(64, 64),
    positions=POSITIONS,
    norm_eps=1e-6,
    rope_base=1e4,
    rope={},
    is_tied=False,
    stop_tokens=(),
)


def without_launches(program: Program) -> AbstractContextManager[Any]:
    """Calls of a program do everything but the launch."""
    return patch.object(program._executor, "launch", lambda *_: None)


def fastest_us(device: Device, call: Call, rounds: int) -> float:
    """Microseconds of a call in the fastest round, since others are those of a busy
    machine."""
    return round(float(device.host_us(call, rounds, STEPS).min()), 2)


def step_cost(
    device: Device, weights: dict[str, Any], rows: int
) -> tuple[float, dict[str, Any]]:
    """Microseconds of a step, and where it ran."""
    rounds = ROUNDS if isinstance(device, Gpu) else CPU_ROUNDS
    world = device.world
    with Model(CONFIG, weights, batch=rows, positions=POSITIONS, world=world) as model:
        for _ in range(rows):
            model.pages.add(POSITIONS)
        table = model.pages.table
        read_prompts(model, np.ones((rows, PROMPT), np.int32))
        step_rows = [1] * rows, list(range(rows)), [PROMPT] * rows
        model.step(*step_rows, table)
        with without_launches(model.program):
            cost = fastest_us(device, lambda: model.step(*step_rows, table), rounds)
        return cost, provenance(model.program)


# ------------------------------------------------------------------ operations of torch


SIZE = 8
"""Of all axes: the cost does not depend on it."""
TORCH_ROUNDS = 1000
TORCH_PROTOCOL = (
    f"bfloat16 tensors of {SIZE} x {SIZE}, without gradients; added_us: the operation, "
    "whose object returns one result; object_us: the object without the launch, with "
    f"a new result; mean of {STEPS} calls, the fastest of {TORCH_ROUNDS} rounds"
)


class Case(NamedTuple):
    """An operation of torch, and the object that it calls on the same tensors."""

    name: str
    call: Call
    operation: Operation
    object_call: Call


def torch_cases(torch: Any, world: World, where: str) -> Iterator[Case]:
    """The operations, after a first call."""
    as_array = import_module("etc_dist.torch.tensors").as_array
    ops = torch.ops.etc_dist
    tensors = [torch.randn(SIZE, SIZE, device=where).bfloat16() for _ in range(5)]
    x, gate, up, down, _ = tensors
    arrays, weight = [as_array(value) for value in tensors], gate.t()
    calls: dict[type[Operation], partial[Any]] = {
        Matmul: partial(ops.matmul, x, weight),
        MatmulReduceScatter: partial(
            ops.fused_matmul_reduce_scatter, x, weight, "sum", 0, ""
        ),
        AllGatherMatmul: partial(
            ops.fused_all_gather_matmul, x, [weight], 0, "", return_A=False
        ),
        SharedMLP: partial(ops.mlp, x, gate, up, down),
    }
    for kind, call in calls.items():
        call()
        operation: Any
        [operation] = (value for value in world.kept.values() if type(value) is kind)
        inputs = arrays[:4] if kind is SharedMLP else arrays[:2]
        object_call = partial(operation.call, inputs)
        yield Case(call.func.__name__, call, operation, object_call)


def added_us(device: Device, case: Case) -> float:
    """Microseconds of the operation, whose object returns one result."""
    operations = device.world.kept
    [key] = (
        key for key, operation in operations.items() if operation is case.operation
    )
    result = case.object_call()
    operations[key] = SimpleNamespace(call=lambda inputs: result)
    cost_us = fastest_us(device, case.call, TORCH_ROUNDS)
    operations[key] = case.operation
    return cost_us


def object_us(device: Device, case: Case) -> float:
    """Microseconds of the object, without the launch."""
    case.object_call()
    with without_launches(case.operation.program):
        return fastest_us(device, case.object_call, TORCH_ROUNDS)


def measure_torch(run: Run) -> Iterator[Result]:
    device, world = run.device, run.device.world
    torch: Any = import_module("torch")
    run.shared |= {"protocol": TORCH_PROTOCOL, "torch": torch.__version__}
    where = f"cuda:{world.device}" if isinstance(device, Gpu) else "cpu"
    for case in torch_cases(torch, world, where):
        values: dict[str, Any] = {"call": case.name, "added_us": added_us(device, case)}
        if isinstance(device, Gpu):  # NumPy arrays are bound anew in each call
            values |= provenance(case.operation.program)
            values["object_us"] = object_us(device, case)
        yield values, []


def measure_step(run: Run) -> Iterator[Result]:
    run.shared["protocol"] = PROTOCOL
    element = numpy_dtype("bfloat16")
    weights = {name: np.zeros(s, element) for name, s in weight_shapes(CONFIG).items()}
    for rows in run.options.rows:
        cost, where = step_cost(run.device, weights, rows)
        yield {"rows": rows, "host_us": cost, **where}, []


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--rows", type=numbers, default=ROWS, help="of each step")


SUBJECTS = {
    "step_cost": Subject(
        "Time the host in a model's step.",
        measure_step,
        add_options,
        settings={"verify": 0},  # without checks of the data
    ),
    "torch_cost": Subject(
        "Time the host in calls of torch.ops.etc_dist.", measure_torch
    ),
}
