"""Worlds over several hosts: MPICH starts ranks on two pretended hosts."""

import _ctypes
import shutil
from pathlib import Path

import pytest

from etc_dist.errors import WorldError
from etc_dist.world.hosts import Hosts, arrange
from tests.world.jobs import run_job, run_on_hosts

START = "world = start(Settings.load())\n"


def test_near_ranks_are_those_of_the_host():
    hosts = arrange(5, [0, 0, 0, 3, 3, 3, 6, 6, 6], ["a"] * 9)
    assert (list(hosts.near), hosts.own, hosts.local_rank) == ([3, 4, 5], 1, 2)
    assert hosts.partners == (2, 8)
    assert not hosts.is_near(2)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([0, 0, 2], "different numbers of ranks"),
        ([0, 1, 0, 1], "do not follow each other"),
        ([n - n % 8 for n in range(1032)], "too many ranks"),
    ],
)
def test_hosts_that_do_not_fit_are_refused(nodes, message):
    with pytest.raises(WorldError, match=message) as caught:
        arrange(0, nodes, [f"host{node}" for node in nodes])
    assert caught.value.fix


def test_one_host_of_many_ranks():
    assert arrange(3, [0] * 4096, ["a"] * 4096) == Hosts(3, 1, 4096)


AGREE = """
show(world.show())
show(world.agree(lambda: world.rank))
near = world.allocate(8)
world.barrier()
for rank in world.hosts.near:
    near.peers[rank][world.local_rank] = 1
world.barrier()
show(near.local.tolist(), [peer is None for peer in near.peers])
refused(lambda: world.match_call(5 + (world.rank == 3), lambda: f"call {world.rank}"))
refused(lambda: world.agree(lambda: 1 // (world.rank - 2)))

# Rank 0 reads the answer of rank 1 only after this has left.
from unittest.mock import patch
from etc_dist.world.board import Backoff

def sleep(backoff):
    time.sleep(0.6)
    return True

if world.rank == 0:
    with patch.object(Backoff, "pause", sleep):
        world.barrier()
else:
    time.sleep(0.2)
    world.barrier()
try:
    with world:
        if world.rank == 1:
            raise KeyError
        world.barrier()
except EtcDistError as error:
    show(error.got)
except KeyError:
    pass

world, tag = start(Settings(backend="cpu", world_limit=1.0)), "silent: "
if world.rank == 3:
    time.sleep(2)
refused(world.barrier)

world, tag = start(CPU), "killed: "
"""
END = """
if world.rank in DEAD:
    os.kill(os.getpid(), 9)
refused(world.barrier)
refused(world.barrier)
os._exit(0)
"""


def expect_dead(output: str, ranks: str, alive: int) -> None:
    assert output.count(f"got: {ranks} did not take part") == alive
    assert output.count("WorldError: the world cannot be used") == alive
    assert output.count("WorldError: not all ranks made the same call") == alive


def test_ranks_on_two_hosts_agree_until_one_leaves_is_silent_or_dies():
    _, output = run_on_hosts(START + AGREE + END.replace("DEAD", "[2]"))
    assert "rank 3 of 4, backend cpu" in output
    assert output.count("host host-1 (2 of 2 hosts of 2 ranks, connected by MPI)") == 2
    assert output.count("[0, 1, 2, 3]") == 4
    assert output.count("[1, 1, 0, 0, 0, 0, 0, 0]") == 4
    assert output.count("[True, True, False, False]") == 2
    assert output.count("rank 2: call 2 rank 3: call 3 to do:") == 4
    assert output.count("rank 2: world.agree") == 4
    assert output.count("rank 1: left the world: an exception left its with block") == 3

    assert output.count("silent: WorldError: not all ranks made the same call") == 3
    assert output.count("got: rank 3 did not take part") == 3
    killed = [line for line in output.splitlines() if "killed: " in line]
    expect_dead("\n".join(killed), "rank 2", 3)


@pytest.mark.exhaustive
def test_two_ranks_that_are_killed_are_named_on_the_other_host():
    source = START + END.replace("DEAD", "[2, 3]")
    _, output = run_on_hosts(source, ETC_DIST_WORLD_LIMIT="2")
    expect_dead(output, "ranks 2, 3", 2)


def test_an_uncaught_exception_ends_all_hosts():
    source = """
from etc_dist.world import far_transport
far_transport.announce(world.rank, "a", "ibrc")  # as with NVSHMEM
if world.rank == 1:
    raise KeyError("x")
world.barrier()
"""
    code, output = run_on_hosts(START + source, 2, ETC_DIST_WORLD_LIMIT="1")
    assert code not in (0, 124)
    assert "KeyError: 'x'" in output
    assert "rank 1, host a" not in output


def test_unequal_hosts_are_refused_on_all_ranks():
    _, output = run_on_hosts("refused(lambda: start(Settings.load()))", ranks=3)
    assert output.count("the hosts have different numbers of ranks") == 3
    assert output.count("ranks 0, 1: host-0 rank 2: host-1 to do:") == 3


BAD_INPUT = """
from unittest.mock import patch
from etc_dist.world import far_transport, gpu_memory
from tests.world.test_gpu_memory import FakeCupy, FakeLibrary

host = os.environ["ETC_DIST_HOST"]
is_other = host == "host-1"
with patch.dict(os.environ, {"ETC_DIST_SYMMETRIC_SIZE": "2M" if is_other else "1M"}):
    refused(lambda: start(Settings.load()))
with patch("etc_dist.world.hosts.MOST_RANKS", 1):
    refused(lambda: start(Settings.load()))

world = start(Settings.load())
sys.modules["cupy"] = FakeCupy()
gpu_memory.socket.gethostname = lambda: host
gpu_memory.load_library = lambda: "FOLDER/libnvshmem_host.so.3"

def start_nvshmem(transport, version):
    class Library(FakeLibrary):
        def version(self):
            return version
    variables = {far_transport.VARIABLE: transport}
    with patch.object(gpu_memory, "NvshmemLibrary", Library):
        with patch.dict(os.environ, variables):
            gpu_memory.GpuMemory(world, world.hosts, 0, 1 << 20)

refused(lambda: start_nvshmem("ibrc", "3.8.0" if is_other else "3.4.5"))
refused(lambda: start_nvshmem("none" if is_other else "ibrc", "3.4.5"))
refused(lambda: start_nvshmem("ucx", "3.4.5"))
world.close()
"""


def test_bad_input_on_several_hosts_is_named_on_all_ranks(tmp_path):
    # NVSHMEM's transports may have another number than its library.
    shutil.copy(_ctypes.__file__, tmp_path / "nvshmem_transport_ibrc.so.7")
    source = BAD_INPUT.replace("FOLDER", str(tmp_path))
    code, output = run_on_hosts(source, 2)
    assert code == 0, output
    for text in (
        "ArgumentError: the ranks have different settings of symmetric_size",
        "WorldError: the world has too many ranks",
        "WorldError: the ranks have different versions of NVSHMEM",
        "got: none, as the variable says",
        "where: rank 1: host",
        "nvshmem_transport_ucx.so",
    ):
        assert output.count(text) == 2, output


def test_a_host_that_never_starts_is_an_error_on_the_others(tmp_path):
    (tmp_path / "hosts").write_text("host-0:2\nhost-1:2\n")
    agent = tmp_path / "agent"
    agent.write_text(
        f"""#!/bin/sh
case "$*" in *host-1*) exec sleep 60;; esac
exec {Path(__file__).parents[2]}/launch/pretended_host "$@"
"""
    )
    agent.chmod(0o755)
    source = "Settings.world_limit = 0.5\nstart(Settings.load())"
    launcher = {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(agent)}
    hosts = "--hostfile", str(tmp_path / "hosts"), "--grace", "1"
    code, output = run_job(source, 4, *hosts, **launcher)
    assert code not in (0, 124)
    for rank in (0, 1):
        assert f"[rank {rank}]   where:  start of the world, rank {rank} of 4" in output
