from dataclasses import replace
from pathlib import Path

import pytest

from etc_dist.errors import ArgumentError, WorldError
from etc_dist.settings import Settings
from etc_dist.world.choice import Gpus, RankReport, choose

TWO = Gpus(("0000:0A:00.0", "0000:0B:00.0"))


def report(
    local_rank: int, gpus: Gpus, backend: str = "cuda", node: int = 0
) -> RankReport:
    return RankReport(f"host{node}", node, local_rank, Settings(backend=backend), gpus)


def test_cuda_without_a_driver_says_what_is_missing_and_where():
    gpus = Gpus(missing="no CUDA driver or GPU (cudaErrorInsufficientDriver)")
    with pytest.raises(WorldError) as caught:
        choose([report(0, gpus), report(1, gpus)])
    assert caught.value.what == 'the backend "cuda" cannot be used'
    assert caught.value.got == f"ranks 0, 1: {gpus.missing}"
    assert "ETC_DIST_BACKEND=cpu" in caught.value.fix


def test_cuda_with_more_ranks_than_gpus_counts_both():
    with pytest.raises(WorldError) as caught:
        choose([report(rank, TWO) for rank in range(3)])
    assert caught.value.got.startswith("rank 2: 3 ranks on host0 and 2 visible GPUs")
    assert "ETC_DIST_SHARE_GPU=1" in caught.value.fix


@pytest.mark.parametrize(
    "change",
    [
        {"share_gpu": True},
        {"symmetric_size": "2G"},
        {"wait_limit": 8.0},
        {"verify": False},
        {"cpu_workers": 2},
    ],
)
def test_settings_that_differ_between_ranks_are_named(change):
    first, second = report(0, TWO), report(1, TWO)
    second = replace(second, settings=replace(second.settings, **change))
    ((name, value),) = change.items()
    with pytest.raises(ArgumentError, match=f"different settings of {name}") as caught:
        choose([first, second, first])
    assert f"\n          rank 1: {name} = {value!r}" in str(caught.value)
    assert f"set ETC_DIST_{name.upper()} to" in caught.value.fix


def test_the_cache_may_differ_between_ranks():
    first, second = report(0, TWO, "cpu"), report(1, TWO, "cpu")
    second = replace(second, settings=replace(second.settings, cache=Path("/tmp/b")))
    assert choose([first, second]).backend == "cpu"


def test_unknown_backend_is_named():
    with pytest.raises(ArgumentError, match="'metal'"):
        choose([report(0, TWO, "metal")])
