"""The host's cost of the custom operations of torch, above that of the objects that
they call, on either backend."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.device import Call, Gpu
from benchmarks.harness import Result, Run, Subject, provenance
from benchmarks.subjects.step_cost import fastest_us, without_launches
from etc_dist import AllGatherMatmul, Matmul, MatmulReduceScatter
from etc_dist.layers.mlp import SharedMLP
from etc_dist.ops.operation import Operation
from etc_dist.torch.tensors import as_array
from etc_dist.world import World

SIZE = 8
"""Of all axes: the cost does not depend on it."""
ROUNDS, CALLS = 1000, 20
PROTOCOL = (
    f"bfloat16 tensors of {SIZE} x {SIZE}, without gradients; added_us: the operation, "
    "whose object does nothing; object_us: the object without the launch, which is "
    f"given a result; mean of {CALLS} calls, the fastest of {ROUNDS} rounds"
)
OPS = torch.ops.etc_dist


class Case(NamedTuple):
    """An operation of torch, and the object that it calls on the same tensors."""

    name: str
    call: Call
    operation: Operation
    object_call: Call


def cases(world: World, where: str) -> Iterator[Case]:
    """The operations, after a first call."""
    made = [torch.randn(SIZE, SIZE, device=where).bfloat16() for _ in range(5)]
    x, gate, up, down, _ = made
    arrays, weight = [as_array(one) for one in made], gate.t()
    calls: dict[type[Operation], partial[Any]] = {
        Matmul: partial(OPS.matmul, x, weight),
        MatmulReduceScatter: partial(
            OPS.fused_matmul_reduce_scatter, x, weight, "sum", 0, ""
        ),
        AllGatherMatmul: partial(
            OPS.fused_all_gather_matmul, x, [weight], 0, "", return_A=False
        ),
        SharedMLP: partial(OPS.mlp, x, gate, up, down),
    }
    for kind, call in calls.items():
        call()
        operation: Any
        [operation] = (one for one in world.kept.values() if type(one) is kind)
        given = arrays if kind is SharedMLP else [*arrays[:2], arrays[-1]]
        object_call = partial(operation, *given)
        yield Case(call.func.__name__, call, operation, object_call)


def added_us(world: World, case: Case) -> float:
    """Microseconds of the operation, whose object does nothing."""
    [key] = (key for key, one in world.kept.items() if one is case.operation)
    world.kept[key] = lambda *arrays: None
    found = fastest_us(case.call, ROUNDS, CALLS)
    world.kept[key] = case.operation
    return round(found, 2)


def object_us(case: Case) -> float:
    """Microseconds of the object, without the launch."""
    case.object_call()
    with without_launches(case.operation.program):
        return round(fastest_us(case.object_call, ROUNDS, CALLS), 2)


def measure(run: Run) -> Iterator[Result]:
    device, world = run.device, run.device.world
    run.shared |= {"protocol": PROTOCOL, "torch": torch.__version__}
    where = f"cuda:{world.device}" if isinstance(device, Gpu) else "cpu"
    for case in cases(world, where):
        values: dict[str, Any] = {"call": case.name, "added_us": added_us(world, case)}
        if isinstance(device, Gpu):  # NumPy arrays are bound anew in each call
            values |= provenance(case.operation.program)
            values["object_us"] = object_us(case)
        yield values, []


SUBJECT = Subject("Time the host in calls of torch.ops.etc_dist.", measure)
