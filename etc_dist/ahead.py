"""Building ahead of time: graph function -> cubin, without a GPU or a world."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from etc_dist.codegen import generate
from etc_dist.compiler import check_options
from etc_dist.ir import GraphFunction
from etc_dist.ir.graph import expect_graph
from etc_dist.runtime.build import ARCH, expect_arch
from etc_dist.runtime.build import build as build_source
from etc_dist.schedule import SCHEDULES, Plan
from etc_dist.settings import Settings


@dataclass(frozen=True)
class Binary:
    """A graph compiled for a GPU architecture; made by `etc_dist.build`."""

    plan: Plan
    """The graph, and the order of its tasks."""
    target: str
    """The architecture, such as "sm_90a"."""
    source: str
    """The generated CUDA."""
    cubin: bytes
    """The compiled program."""
    registers: int
    """Registers of a thread."""
    spill_bytes: int
    """Bytes of registers that a thread stores in local memory; 0 is fast."""
    stack_bytes: int
    """Bytes of a thread's local variables that have no register."""
    remarks: tuple[str, ...]
    """Warnings of the compiler."""

    def show(self) -> str:
        """The compiler's report as stable text."""
        graph = self.plan.graph
        lines = [
            f"{graph.name} on {graph.world_size} ranks, {self.plan.schedule} schedule",
            f"  target     {self.target}",
            f"  cubin      {len(self.cubin)} bytes",
            f"  registers  {self.registers} a thread",
            f"  spills     {self.spill_bytes} bytes, stack {self.stack_bytes} bytes",
        ]
        lines += [f"  remark     {remark}" for remark in self.remarks]
        return "\n".join(lines) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the cubin to a file, for cuobjdump and similar tools."""
        Path(path).write_bytes(self.cubin)


def build(
    graph: GraphFunction,
    *,
    target: str = ARCH,
    schedule: str = "static",
    trace: bool = False,
) -> Binary:
    """Compile `graph` for a GPU architecture; needs neither a GPU nor MPI, but NVRTC.

    The graph is not proved: `verify` of `verify/verify.py` does that at a shape. The
    result is kept in the cache, where `compile` with the same options finds it.
    target: an architecture, as "sm_90a". schedule, trace: as for `etc_dist.compile`.

    Raises TypeError for what is not a GraphFunction, and the error of the stage that
    fails: ArgumentError, ScheduleError, CodegenError, BuildError."""
    expect_graph(graph)
    check_options(schedule, trace, f"build({graph.name})")
    expect_arch(target, f"build({graph.name})")
    plan = SCHEDULES[schedule](graph)
    source = generate(plan, trace=trace)
    cubin = build_source(source, Settings.load(), target)
    return Binary(
        plan,
        target,
        source.text,
        cubin.code,
        cubin.registers,
        cubin.spill_bytes,
        cubin.stack_bytes,
        cubin.remarks,
    )
