"""Worlds over process groups of torch.distributed, under torchrun."""

import sys

import pytest

from etc_dist.errors import WorldError
from etc_dist.settings import Settings
from etc_dist.world import start
from tests.world.jobs import run_torch_job

pytestmark = pytest.mark.torch


REFUSED = """
from dataclasses import replace
from etc_dist.world import process_group
key = process_group.host_key
refused(lambda: start(CPU, process_group="tp" if rank else dist.group.WORLD))
refused(lambda: start(CPU, "x" if rank else None, process_group=dist.group.WORLD))
refused(lambda: start(replace(CPU, cpu_workers=3 + rank)))
member = dist.new_group([0])
refused(lambda: start(CPU, process_group=member) if rank else None)
if rank:
    process_group.host_key = lambda: "another"
refused(lambda: start(CPU))
process_group.host_key = key
Settings.world_limit = 1.0
refused(lambda: start(CPU) if rank == 0 else None)
dist.barrier()
Settings.world_limit = 60.0
"""
STARTED = """
import numpy as np, ml_dtypes, etc_dist
own = [dist.new_group([r]) for r in range(2)][rank]
with start(CPU, process_group=dist.group.WORLD) as world, start(
    CPU, process_group=own
) as alone:
    show(world.gather(rank), world.show(), alone.size)
    x = np.full((4 * world.size, 8), rank + 1, np.float32).astype(ml_dtypes.bfloat16)
    show(etc_dist.matmul_reduce_scatter(x, x[:8]).astype(np.float32)[0, 0])
with start(CPU) as again:  # the default group
    show([len(one) for one in again.gather(bytes(3 << 20 if rank else 3))])
dist.destroy_process_group()
show("mpi4py" in sys.modules)
"""


@pytest.fixture(scope="module")
def output():
    """Of one job, since starting torch takes seconds."""
    code, output = run_torch_job(REFUSED + STARTED)
    assert code == 0, output
    return output


def test_ranks_of_a_process_group_are_a_world_without_mpi(output):
    for rank in range(2):
        assert f"rank {rank}: [0, 1] world: rank {rank} of 2, backend cpu" in output
        assert f"rank {rank}: 40.0" in output
        assert f"rank {rank}: [3, 3145728]" in output
        assert f"rank {rank}: False" in output
    assert output.count("torch.distributed 2") == 2


def test_errors_of_start_come_on_all_ranks_and_it_can_be_repeated(output):
    counts = {
        "process_group expects a ProcessGroup, got str": 2,
        "comm expects a None, got str; pass either comm or process_group": 2,
        "different settings of cpu_workers": 2,
        "process_group = GroupMember.NON_GROUP_MEMBER": 1,
        "process groups on several hosts are not supported": 2,
        "not all ranks called start": 1,
    }
    assert {text: output.count(text) for text in counts} == counts


def test_killed_rank_is_named_and_its_peers_fail():
    """One of them is on its host, two are on another."""
    source = """
from dataclasses import replace
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, once it sees the end
world = start(replace(CPU, host=f"host-{rank // 2}"))
world.barrier()
if rank == 1:
    os.kill(os.getpid(), 9)
refused(lambda: world.agree(lambda: rank) if rank else world.barrier())
"""
    code, output = run_torch_job(source, ranks=4)
    assert code != 0
    for rank in (0, 2, 3):
        assert f"rank {rank}: WorldError" in output
    cause = "got: rank 1 did not take part: its process has ended"
    assert output.count(cause) == 3


def test_torchrun_without_a_process_group_is_refused(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(WorldError, match="torch.distributed is not initialised"):
        start(Settings(backend="cpu"))


def test_missing_torch_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(WorldError, match="torch cannot be imported"):
        start(Settings(backend="cpu"), process_group="any")
