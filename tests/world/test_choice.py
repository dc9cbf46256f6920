from dataclasses import replace

from etc_dist.settings import Settings
from etc_dist.world.choice import (
    BackendChoice,
    Gpus,
    RankReport,
    choose,
    find_obstacles,
)


def report(
    local_rank: int, gpus: Gpus, backend: str = "auto", node: int = 0
) -> RankReport:
    return RankReport(f"host{node}", node, local_rank, Settings(backend=backend), gpus)


TWO = Gpus(("0000:0A:00.0", "0000:0B:00.0"))
NO_CUPY = Gpus(missing="CuPy cannot be imported (No module named 'cupy')")


def test_auto_is_cuda_where_each_rank_can_have_a_gpu():
    assert choose([report(0, TWO), report(1, TWO)]) == BackendChoice("cuda")


def test_auto_is_cpu_with_the_reason_where_one_rank_has_none():
    choice = choose([report(0, TWO), report(1, NO_CUPY)])
    assert choice.backend == "cpu"
    assert choice.reason.startswith("CuPy cannot be imported")


def test_requested_cpu_is_used_although_there_are_gpus():
    ranks = [report(0, TWO, "cpu"), report(1, TWO, "cpu")]
    assert choose(ranks) == BackendChoice("cpu", "requested")


def test_single_visible_gpu_is_the_launchers_choice():
    first, second = Gpus(TWO.pci_ids[:1]), Gpus(TWO.pci_ids[1:])
    ranks = [report(0, first), report(1, second)]
    assert choose(ranks) == BackendChoice("cuda")
    assert [rank.device for rank in ranks] == [0, 0]


def test_two_ranks_with_the_same_only_gpu_are_named():
    gpus = Gpus(TWO.pci_ids[:1])
    text = "its only GPU on host0 (PCI 0000:0A:00.0) is another rank's too; "
    text += "ETC_DIST_SHARE_GPU=1 lets ranks share a GPU"
    assert find_obstacles([report(0, gpus), report(1, gpus)]) == {0: text, 1: text}


def sharing(local_rank: int, gpus: Gpus) -> RankReport:
    machine = report(local_rank, gpus)
    return replace(machine, settings=replace(machine.settings, share_gpu=True))


def test_ranks_share_one_visible_gpu_where_the_setting_allows_it():
    gpus = Gpus(TWO.pci_ids[:1])
    choice = choose([sharing(rank, gpus) for rank in range(4)])
    assert choice == BackendChoice("cuda", ranks_per_gpu=4)


def test_ranks_take_several_shared_gpus_in_turn():
    ranks = [sharing(rank, TWO) for rank in range(3)]
    assert [rank.device for rank in ranks] == [0, 1, 0]
    assert choose(ranks) == BackendChoice("cuda", ranks_per_gpu=2)


def test_sharing_does_not_hide_what_a_rank_lacks():
    choice = choose([sharing(0, TWO), sharing(1, NO_CUPY)])
    assert choice.backend == "cpu"
