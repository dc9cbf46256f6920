"""A rank's workers are its share of the SMs, and all of them must be resident."""

import pytest

from etc_dist.errors import WorldError
from etc_dist.runtime.occupancy import resident_workers


@pytest.mark.parametrize(("ranks", "workers"), [(1, 132), (2, 66), (4, 33), (8, 16)])
def test_ranks_share_the_gpu(ranks, workers):
    num_workers = resident_workers(
        "graph", multiprocessors=132, ranks=ranks, resident=132
    )
    assert num_workers == workers


def test_workers_that_do_not_fit_are_refused_with_the_numbers():
    with pytest.raises(WorldError) as caught:
        resident_workers("graph", multiprocessors=132, ranks=2, resident=120)
    assert caught.value.wanted == "66 workers for each rank, 132 in total"
    assert caught.value.got == "room for 120 workers on 132 SMs"


def test_more_ranks_than_workers_are_refused():
    with pytest.raises(WorldError, match="10 ranks per GPU"):
        resident_workers("graph", multiprocessors=8, ranks=10, resident=16)
