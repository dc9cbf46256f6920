from etc_dist.world.choice import Choice, Report, choose, find_obstacles
from etc_dist.world.gpus import Gpus


def report(local_rank: int, gpus: Gpus, backend: str = "auto", node: int = 0) -> Report:
    return Report(f"host{node}", node, local_rank, backend, "8G", gpus)


TWO = Gpus(("0000:0A:00.0", "0000:0B:00.0"))
NO_CUPY = Gpus(missing="CuPy cannot be imported (No module named 'cupy')")


def test_auto_is_cuda_where_each_rank_can_have_a_gpu():
    assert choose([report(0, TWO), report(1, TWO)]) == Choice("cuda")


def test_auto_is_cpu_with_the_reason_where_one_rank_has_none():
    choice = choose([report(0, TWO), report(1, NO_CUPY)])
    assert choice.backend == "cpu"
    assert choice.reason.startswith("CuPy cannot be imported")


def test_cpu_asked_for_is_taken_although_there_are_gpus():
    ranks = [report(0, TWO, "cpu"), report(1, TWO, "cpu")]
    assert choose(ranks) == Choice("cpu", "asked for")


def test_single_visible_gpu_is_the_launchers_choice():
    first, second = Gpus(TWO.pci_ids[:1]), Gpus(TWO.pci_ids[1:])
    ranks = [report(0, first), report(1, second)]
    assert choose(ranks) == Choice("cuda")
    assert [rank.device for rank in ranks] == [0, 0]


def test_two_ranks_with_one_visible_gpu_between_them_are_named():
    one = Gpus(TWO.pci_ids[:1])
    text = "its only GPU on host0 (PCI 0000:0A:00.0) is another rank's too"
    assert find_obstacles([report(0, one), report(1, one)]) == {0: text, 1: text}
