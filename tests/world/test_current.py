import gc
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


def test_closed_world_is_freed_with_what_functions_kept_for_it():
    own = start(CPU)
    x = np.ones((8 * own.size, 8), np.float32).astype(ml_dtypes.bfloat16)
    etc_dist.matmul_reduce_scatter(x, x[:8])
    alive = weakref.ref(own)
    own.close()
    del own
    start(CPU).close()
    gc.collect()
    assert alive() is None
