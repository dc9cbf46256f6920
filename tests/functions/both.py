"""Runs of both bodies of device functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.emulate import Emulator
from etc_dist.ir import GraphFunction
from etc_dist.runtime.cpu import simulate

Arrays = dict[str, Any]


def both_on_ranks(
    graph: GraphFunction | Emulator,
    inputs: Sequence[Arrays],
    dims: dict[str, int],
    *,
    check: bool = True,
    kernels: Path | None = None,
) -> Iterator[Sequence[Arrays]]:
    """The outputs of each rank, of the NumPy bodies and of the emulated ones. kernels:
    those with mutations, where a mutation has the same program."""
    is_program = isinstance(graph, Emulator)
    program = graph if is_program else Emulator(graph, workers=2, kernels=kernels)
    yield simulate(program.plan, inputs, dims, check=check).outputs
    yield program.run(list(inputs), dims)


def both(
    graph: GraphFunction | Emulator,
    arrays: Arrays,
    dims: dict[str, int],
    kernels: Path | None = None,
) -> Iterator[Arrays]:
    """The outputs of one rank."""
    for [outputs] in both_on_ranks(graph, [arrays], dims, kernels=kernels):
        yield outputs


def check_both(
    graph: GraphFunction | Emulator, arrays: Arrays, dims: dict[str, int]
) -> None:
    """All results of both are nearly equal."""
    expected, outputs = both(graph, arrays, dims)
    for name, array in expected.items():
        reference, result = (a.astype(np.float32) for a in (array, outputs[name]))
        np.testing.assert_allclose(result, reference, rtol=0.01, atol=0.01)
