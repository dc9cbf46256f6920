"""Runs that follow one another on a program that the first of them aborts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from etc_dist.codegen.layout import ABORT_OFFSET, CONTROL, HEAD_BYTES
from etc_dist.codegen.names import address_name
from etc_dist.emulate import Emulator
from etc_dist.emulate.rank_memory import EmulatedMemory
from etc_dist.ir import GraphFunction
from etc_dist.ir.tensor import numpy_dtype
from tests.emulate.cases import PART, copy_on
from tests.graphs.calls import Task, calls
from tests.graphs.sent_far import sent_far
from tests.graphs.stages import copied

Host = np.ndarray[Any, Any]
PARTS = 6
DIMS = {"n": PARTS * PART}


def sent_in_vain(world_size: int, *, num_wanted: int | None = None) -> GraphFunction:
    """y is the other rank's x, by tasks that wait for `num_wanted` or `count`
    notifications and get one. z is x, by tasks that do not wait."""
    parts = f"""
        let parts = n // {PART}
        input count [8] int32
        symmetric box [n] bfloat16
        cross-rank events came [parts] expects {num_wanted or "count.load(0)"}
    """
    part, on_peer = f"[tile(i, {PART})]", "on((rank + 1) % 2)"
    copy, x, grid = copy_on("transfer"), f"x n{part} bfloat16", {"grid": "i: parts"}
    to, sent_events = [f"box.{on_peer}{part}"], [f"came.{on_peer}[i]"]
    copied_parts = [f"box{part}"], [f"y n{part} bfloat16"]
    tasks = [
        Task(copy, [x], to, name="send", notifies=sent_events, **grid),
        Task(copy, *copied_parts, name="take", waits=["came[i]"], **grid),
        Task(copy_on("tensor"), [x], [f"z n{part} bfloat16"], name="keep", **grid),
    ]
    return calls(world_size, tasks=tasks, dims="n", parts=parts)


def sent_far_in_vain(ranks: int, local_size: int) -> GraphFunction:
    """`sent_in_vain` by one message, for partners on two hosts."""
    options = {"copy": copy_on("transfer"), "keep": copy_on("tensor")}
    settings = {"dtype": "bfloat16", "counts": True, "local_size": local_size}
    return sent_far(ranks, **options, **settings)


class Aborted:
    """All ranks of `sent_in_vain`; in the first run a wait times out on those that
    wait for two notifications."""

    def __init__(
        self, program: Emulator, seed: int = 0, counts: Sequence[int] = (2, 2)
    ):
        self.program, self.seed = program, seed
        dims = [DIMS] * len(counts)
        self.memory = EmulatedMemory(
            program.plan, program.source, dims, program.workers
        )
        self.memory.begin()
        numbers = np.arange(DIMS["n"]).astype(numpy_dtype("bfloat16"))
        inputs = [
            {"x": numbers + rank, "count": np.full(8, count, np.int32)}
            for rank, count in enumerate(counts)
        ]
        self.arrays = [
            program._arrays(rank, arrays, DIMS) for rank, arrays in enumerate(inputs)
        ]

    def run(self, runs: int) -> str:
        return self.program._call(self.memory, self.arrays, self.seed, runs)

    def words(self, rank: int) -> Host:
        """The symmetric block of a rank."""
        return self.memory._symmetric[rank].view(np.uint32)

    def area(self, rank: int, epoch: int) -> Host:
        """A rank's event counters and queues of an epoch."""
        capacity = int(self.memory._arguments[rank]["event_capacity"])
        start = HEAD_BYTES // 4 + epoch % 2 * capacity
        return self.words(rank)[start : start + capacity]

    def far_area(self, rank: int, epoch: int) -> Host:
        """The words for far notifications of an epoch, as 64-bit words."""
        capacity = int(self.memory._arguments[rank]["event_capacity"])
        start = HEAD_BYTES // 8 + (1 + epoch % 2) * capacity
        return self.words(rank).view(np.uint64)[start : start + capacity]

    def reset(self) -> None:
        """Reset the counters as the host of a GPU does."""
        for rank, control in enumerate(self.memory.control):
            control[:] = np.zeros(1, CONTROL)
            control["epoch"] = 1
            first_tensor = int(self.memory._arguments[rank][address_name("box")])
            self.words(rank)[: first_tensor // 4] = 0


def check_skipped(program: Emulator) -> None:
    """Of four runs in a row the first is aborted. The others change nothing but the
    epoch, nor do later ones."""
    runs = Aborted(program)
    assert runs.run(4) == ""
    for rank in range(2):
        assert runs.words(rank)[ABORT_OFFSET // 4] == 1
        assert runs.words(rank)[:2].tolist() == [1, 1]  # started, by each rank
        assert runs.area(rank, 1)[:PARTS].tolist() == [1] * PARTS
        assert not runs.area(rank, 2).any()
        assert runs.memory.control[rank]["epoch"] == 5
        assert runs.memory.control[rank]["begun"] == 0
        assert runs.memory.control[rank]["resident"] == program.workers
        runs.memory.control[rank]["resident"] = 0  # as where no wait failed
        runs.arrays[rank]["z"][:] = 7
    before = [array.copy() for array in runs.memory._symmetric]
    assert runs.run(2) == ""
    for rank, arrays in enumerate(runs.arrays):
        assert (arrays["z"] == 7).all()
        assert np.isnan(arrays["y"].astype(np.float32)).all()
        assert (runs.memory._symmetric[rank] == before[rank]).all()
        assert runs.memory.control[rank]["epoch"] == 7
        assert runs.memory.control[rank]["resident"] == 0


def copied_in_vain(lane: str) -> GraphFunction:
    """Three copies, of which the second one, on `lane`, waits for a notification too
    many. It is claimed first, the third one is queued."""
    lanes = "tensor", lane, "tensor"
    copies = [(copy_on(copy_lane), PART) for copy_lane in lanes]
    return copied(1, copies=copies, extra=1)
