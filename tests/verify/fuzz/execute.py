"""Runs of accepted programs on the CPU backend, with the numbers they must give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from etc_dist.runtime.cpu import simulate
from etc_dist.schedule.plan import Plan
from tests.verify.fuzz.oracle import ACCEPTED, judge
from tests.verify.fuzz.order import Schedule, loaded_tensors
from tests.verify.fuzz.program import Call, Program
from tests.verify.fuzz.tasks import Expansion, Operand

Arrays = list[dict[str, Any]]
"""Of each rank, by tensor."""


def check_numbers(program: Program, plan: Plan, seed: int) -> bool:
    """Compare two runs of `plan`; False if the program is not accepted with all
    values of its int32 tensors, or computes others."""
    input_program = replace(program, given=tuple(program.values))
    is_dynamic = plan.schedule == "dynamic"
    if judge(input_program, is_dynamic) != {ACCEPTED}:
        return False
    expansion = Expansion(input_program, is_dynamic)
    before = arrays(input_program, expansion)
    after = [{name: a.copy() for name, a in of_rank.items()} for of_rank in before]
    for epoch in range(2):
        run(expansion, after, before if epoch else None)
        for name in loaded_tensors(input_program):
            values = [of_rank[name].tolist() for of_rank in after]
            if values != [list(of_rank) for of_rank in input_program.values[name]]:
                return False
    names = [t.name for t in input_program.tensors if t.kind in ("input", "state")]
    operands = [{name: of_rank[name] for name in names} for of_rank in before]
    results = simulate(
        plan,
        operands,
        input_program.dims,
        seed=seed,
        workers=input_program.workers,
        epochs=2,
    )
    for arrays_of_rank, references in zip(results.outputs, after, strict=True):
        for name, array in arrays_of_rank.items():
            np.testing.assert_array_equal(array, references[name])
    return True


def arrays(program: Program, expansion: Expansion) -> Arrays:
    """The caller's arrays, and NaN in all others."""
    arrays_of_ranks: Arrays = [{} for _ in range(program.world)]
    for rank, tensor in ((r, t) for r in range(program.world) for t in program.tensors):
        shape = expansion.shapes[tensor.name][rank]
        if tensor.dtype == "int32" and tensor.kind == "input":
            array = np.array(program.values[tensor.name][rank], np.int32)
        elif tensor.dtype == "int32":
            array = np.full(shape, -1, np.int32)
        elif tensor.kind in ("input", "state"):
            array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
            array += rank
        else:
            array = np.full(shape, np.nan, np.float32)
        arrays_of_ranks[rank][tensor.name] = array
    return arrays_of_ranks


def run(expansion: Expansion, memory: Arrays, fresh: Arrays | None) -> None:
    """Run all tasks one after the other. `fresh`: what arrays that are not the caller's
    begin with."""
    for tensor in expansion.program.tensors:
        if fresh is not None and tensor.kind not in ("input", "state"):
            for rank, of_rank in enumerate(memory):
                of_rank[tensor.name][...] = fresh[rank][tensor.name]

    def region(operand: Operand | None) -> Any:
        assert operand is not None
        box = tuple(slice(*bounds) for bounds in operand.box)
        return memory[operand.rank][operand.tensor][box]

    for number in Schedule(expansion).run(merge=False):
        task = expansion.tasks[number]
        num_reads = len(task.call.reads)
        regions = [region(operand) for operand in task.operands]
        if any(part.size for part in regions[num_reads:]):
            body(task.call)(*regions)


def body(call: Call) -> Callable[..., None]:
    """Copies an int32 tensor or what is sent, or combines all reads in one number."""

    def copies(operands: Sequence[Any]) -> bool:
        sizes = {operand.size for operand in operands}
        is_table = {str(operand.dtype) for operand in operands} == {"int32"}
        is_pair = len(call.reads) == len(call.writes) == len(sizes) == 1
        return is_pair and (is_table or call.function.far)

    def compute(*operands: Any) -> None:
        reads, writes = operands[: len(call.reads)], operands[len(call.reads) :]
        if copies(operands):
            writes[0][...] = reads[0].reshape(writes[0].shape)
            return
        total = 1.0 + len(call.name)
        for n, x in enumerate(reads):
            if n not in call.function.gathers:
                total += float(np.ravel(x) @ np.arange(1.0, x.size + 1))
        for y in writes:
            y[...] = total % 61

    return compute
