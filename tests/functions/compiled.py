"""Programs compiled for a GPU."""

from __future__ import annotations

import etc_dist
from etc_dist.ir import GraphFunction


def check_compiled(graph: GraphFunction) -> None:
    """The CUDA bodies of `graph` compile without spills and warnings."""
    binary = etc_dist.build(graph, target="sm_90a")
    assert (binary.spill_bytes, binary.stack_bytes, binary.remarks) == (0, 0, ())
