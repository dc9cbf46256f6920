"""Waits of the host for a GPU, with a time limit."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

from etc_dist.errors import WorldError
from etc_dist.world.processes import YIELDING_TO_GPU, Backoff


def wait_until(is_done: Callable[[], bool], limit: float, gpu: str) -> None:
    """Poll `is_done`; WorldError naming `gpu` after `limit` seconds."""
    if is_done():
        return
    backoff = Backoff(limit, yielding=YIELDING_TO_GPU)
    while not is_done():
        if not backoff.pause():
            raise _timed_out(gpu, limit)


def wait_for_call(call: Callable[[], object], limit: float, gpu: str) -> None:
    """Make a blocking call; WorldError naming `gpu` after `limit` seconds, in which
    the call continues in another thread. Raises what the call raises."""
    faults: list[Exception] = []

    def target() -> None:
        try:
            call()
        except Exception as fault:
            faults.append(fault)

    thread = Thread(target=target, name=f"etc_dist: wait for {gpu}", daemon=True)
    thread.start()
    thread.join(limit)
    if thread.is_alive():
        raise _timed_out(gpu, limit)
    if faults:
        raise faults[0]


def _timed_out(gpu: str, limit: float) -> WorldError:
    return WorldError(
        f"{gpu} does not answer",
        where=gpu,
        wanted=f"the end of its work within {limit:g} s",
        got="its work has not ended",
        fix="look at nvidia-smi and at the kernel log for Xid errors; raise "
        "ETC_DIST_WORLD_LIMIT if other work on this GPU takes that long",
    )


def failed(gpu: str, step: str, error: Exception) -> WorldError:
    """The error for a call of the CUDA driver that failed on this rank."""
    return WorldError(
        f"{gpu} failed: {step}",
        where=gpu,
        wanted="no error of the CUDA driver",
        got=f"{type(error).__name__}: {error}",
        fix="look for an earlier CUDA error of this process, or a stream that was "
        "destroyed; then end all ranks and start again",
    )
