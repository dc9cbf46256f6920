import gc
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest

import etc_dist
from etc_dist.settings import Settings
from etc_dist.world import current, start, startup

pytestmark = pytest.mark.mpi
CPU = Settings(backend="cpu")


@pytest.fixture(autouse=True)
def no_worlds(monkeypatch):
    monkeypatch.setattr(startup, "_worlds", [])


def test_current_is_the_open_world_that_was_started_first():
    first, second = start(CPU), start(CPU)
    assert current() is first
    first.close()
    assert current() is second
    second.close()


@pytest.mark.mpi(ranks=[1, 2])
def test_closed_world_is_freed_with_what_functions_kept_for_it():
    world = start(CPU)
    x = np.ones((8 * world.size, 8), np.float32).astype(ml_dtypes.bfloat16)
    etc_dist.matmul_reduce_scatter(x, x[:8])
    alive = weakref.ref(world)
    world.close()
    del world
    start(CPU).close()
    gc.collect()
    assert alive() is None


def test_with_block_closes_the_world():
    hook = sys.excepthook
    with start(CPU) as world:
        world.barrier()
    assert world.closed and sys.excepthook is hook


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize("requested", [False, True])
def test_excepthook_is_replaced_on_request_or_under_the_launcher(
    requested, launched, monkeypatch
):
    monkeypatch.delenv("LAUNCH_RANKS", raising=False)
    if launched:
        monkeypatch.setenv("LAUNCH_RANKS", "2")
    before = sys.excepthook
    with start(CPU, abort_on_uncaught=requested):
        assert (sys.excepthook is not before) is (requested or launched)
    assert sys.excepthook is before
