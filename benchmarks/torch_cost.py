"""The host's cost of the custom operations of torch, above that of the objects that
they call.

launch/mpirun -n 1 benchmarks/torch_cost.py

Prints microseconds on either backend, and records them on GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.device import Call, Gpu
from benchmarks.harness import begin, parser_for, provenance, record, say
from benchmarks.step_cost import fastest_us, without_launches
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


def main() -> int:
    parser = parser_for("Time the host in calls of torch.ops.etc_dist.", "torch_cost")
    options = parser.parse_args()
    device = begin(options.cpu)
    world = device.world
    where = f"cuda:{world.device}" if isinstance(device, Gpu) else "cpu"
    for case in cases(world, where):
        added = added_us(world, case)
        say(world, f"{case.name}: {added:.1f} us above its object")
        if isinstance(device, Gpu):  # NumPy arrays are bound anew in each call
            facts = {**device.machine(), **provenance(case.operation.program)}
            facts |= {"op": "torch_cost", "protocol": PROTOCOL, "call": case.name}
            costs = {"added_us": added, "object_us": object_us(case)}
            say(world, f"{case.name}: the object {costs['object_us']:.1f} us")
            record(
                device, options.record, {**facts, **costs, "torch": torch.__version__}
            )
    world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
