"""Programs compiled for a GPU."""

from __future__ import annotations

import etc_dist
from etc_dist.ahead import Binary
from etc_dist.ir import GraphFunction


def check_compiled(graph: GraphFunction, schedule: str = "static") -> Binary:
    """The CUDA bodies of `graph` compile without spills and warnings."""
    binary = etc_dist.build(graph, target="sm_90a", schedule=schedule)
    assert (binary.spill_bytes, binary.stack_bytes, binary.remarks) == (0, 0, ())
    return binary


def check_wgmmas(cubin: bytes) -> None:
    """The compiler knows that the operands of wgmmas are alike for a warp. Else it
    moves them from the registers of lanes before each wgmma."""
    words = memoryview(cubin[: len(cubin) // 16 * 16]).cast("Q")
    code = [word & 0xFFF for word in words[::2]]  # of 16 bytes, code or not
    # HGMMA, also of registers; QGMMA, of float8; R2UR.
    wgmmas, move = (0x9F0, 0xDF0, 0x9F3), 0x2CA
    places = [n for n, instruction in enumerate(code) if instruction in wgmmas]
    moved = [n for n in places if move in code[n - 8 : n]]
    assert len(moved) < len(places) / 4
