"""A rank's workers are its share of the SMs, and all of them must be resident."""

import pytest

from etc_dist.errors import WorldError
from etc_dist.runtime.occupancy import resident_workers


@pytest.mark.parametrize(
    ("ranks", "cluster", "workers"),
    [(1, 1, 132), (1, 2, 132), (2, 2, 66), (4, 2, 32), (8, 2, 16), (8, 1, 16)],
)
def test_share_is_whole_clusters(ranks, cluster, workers):
    found = resident_workers(
        "graph", multiprocessors=132, cluster=cluster, ranks=ranks, resident=132
    )
    assert found == workers


def test_workers_that_do_not_fit_are_refused_with_the_numbers():
    with pytest.raises(WorldError) as caught:
        resident_workers("graph", multiprocessors=132, cluster=2, ranks=2, resident=120)
    assert caught.value.wanted == "66 workers for each rank, 132 in total"
    assert caught.value.got == "room for 120 workers on 132 SMs"


def test_more_ranks_than_clusters_are_refused():
    with pytest.raises(WorldError, match="10 ranks per GPU"):
        resident_workers("graph", multiprocessors=16, cluster=2, ranks=10, resident=16)
