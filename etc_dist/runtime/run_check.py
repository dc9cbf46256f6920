"""Checks the parts of a program that a proof leaves out, with the data of each run."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from etc_dist.cache import Recent
from etc_dist.errors import EtcDistError, GraphError, WorldError
from etc_dist.messages import show_message
from etc_dist.schedule.plan import Plan
from etc_dist.verify.unchecked import list_unchecked
from etc_dist.verify.verify import verify
from etc_dist.world import World

Loaded = Mapping[str, np.ndarray[Any, Any]]
"""The tensors that index expressions load from, by name, after a run."""
REMEMBERED = 1024
"""Digests of the data of correct runs that are kept, to verify no data twice."""


class RunCheck:
    """Checks the runs of one plan, on all ranks alike.

    Tensors that index expressions load from are written once. So after a run they have
    the values that were loaded, and `verify` can enumerate the run."""

    def __init__(self, plan: Plan, world: World, workers: int):
        self._plan, self._world, self._workers = plan, world, workers
        self._names = tuple(tensor.name for tensor in plan.graph.loaded_tensors())
        self._unchecked = list_unchecked(plan)
        setting = world.settings.verify
        self.is_wanted = bool(self._names) and (
            setting == "data" or (setting == 1 and world.backend == "cpu")
        )
        """Whether each run is checked: its proof leaves parts out, and the settings
        require the check on this backend."""
        self._has_warned = False
        self._correct: Recent[tuple[Any, ...], bool] = Recent(REMEMBERED)

    def check(
        self, read: Callable[[Sequence[str]], Loaded], dims: Mapping[str, int]
    ) -> None:
        """Verify the run that has just ended on all ranks; `read` returns this rank's
        data by name. Collective. Raises RaceError, DeadlockError or GraphError."""
        arrays: dict[str, np.ndarray[Any, Any]] = {}

        def digest() -> bytes:
            arrays.update(read(self._names))
            parts = [arrays[name].tobytes() for name in self._names]
            return hashlib.sha256(b"".join(parts)).digest()

        key = (*dims.items(), *self._world.agree(digest))
        if self._correct.get(key):
            return
        every = self._world.agree(lambda: arrays)
        tensors = {
            name: [arrays_of_rank[name] for arrays_of_rank in every]
            for name in self._names
        }
        fault = self._world.agree(lambda: self._find_fault(tensors, dims))[0]
        if fault is not None:
            raise fault
        self._correct.put(key, True)

    def warn(self) -> None:
        """Warn, once per process, that runs are not checked, if the proof leaves parts
        out and the settings require a proof."""
        if self._has_warned or not self._unchecked:
            return
        if self._world.settings.verify and self._world.rank == 0:
            self._has_warned = True
            _warn(
                f"etc_dist: {self._plan.graph.name}: what depends on run-time data is "
                "not proved (program.show() lists it); ETC_DIST_VERIFY=data checks "
                "each run"
            )

    def show(self) -> str:
        """The parts that are not proved, and whether each run is checked."""
        if not self._unchecked:
            return ""
        when = "checked after each run" if self.is_wanted else "not checked"
        lines = [f"not proved, since it depends on run-time data; {when}"]
        lines += [f"  {what}" for what in self._unchecked]
        return "\n".join(lines) + "\n"

    def _find_fault(
        self, tensors: Mapping[str, list[np.ndarray[Any, Any]]], dims: Mapping[str, int]
    ) -> EtcDistError | None:
        """The fault of the run; on rank 0, which enumerates the tasks of all ranks."""
        if self._world.rank != 0:
            return None
        try:
            verify(self._plan, dims, self._workers, tensors)
        except GraphError as error:
            return type(error)(
                f"a run gave no valid result: {error.what}",
                where=f"{error.where}, with the run's {', '.join(self._names)}",
                wanted=error.wanted,
                got=error.got,
                fix=error.fix,
            )
        return None


def cannot_capture(text: str) -> WorldError:
    """The error for a captured run of a program whose runs are checked."""
    return WorldError(
        "a program whose runs are checked cannot be captured",
        where=text,
        wanted="eager runs: with ETC_DIST_VERIFY=data the host checks each run",
        got="a stream that is capturing",
        fix="capture it with ETC_DIST_VERIFY=1",
    )


@functools.cache
def _warn(text: str) -> None:
    show_message(f"{text}\n")
