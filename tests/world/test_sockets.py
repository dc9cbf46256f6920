import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from etc_dist.world import sockets
from etc_dist.world.sockets import SocketGather, connect_all, listen


@pytest.fixture
def pair():
    one, other = socket.socketpair()
    made = SocketGather(0, {1: one}), SocketGather(1, {0: other})
    yield made
    for gather in made:
        gather.close()


@pytest.mark.parametrize("nbytes", [1, 5 << 20])
def test_values_of_any_size_come_in_order(pair, nbytes):
    def exchange(gather: SocketGather) -> list[dict[int, object]]:
        return [gather.gather(bytes([i]) * nbytes, 10.0) for i in range(3)]

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(exchange, pair))
    wanted = [dict.fromkeys((0, 1), bytes([i]) * nbytes) for i in range(3)]
    assert found == [wanted, wanted]


def test_message_sent_before_the_end_arrives(pair):
    assert pair[0].gather("last", 0.1) == {0: "last"}
    pair[0].close()
    assert pair[1].gather("none", 10.0) == {0: "last", 1: "none"}
    assert pair[1].gather("none", 10.0) == {1: "none"}


def test_barrier_of_a_silent_peer_ends(pair):
    assert pair[0].barrier(0.1) is False


def test_ranks_connect_by_names():
    made = [listen(3) for _ in range(3)]
    names = [name for _, name in made]
    with ThreadPoolExecutor() as pool:
        ranks = [
            pool.submit(connect_all, rank, names, listener, 10.0)
            for rank, (listener, _) in enumerate(made)
        ]
        found = [one.result() for one in ranks]
    assert [sorted(one) for one in found] == [[1, 2], [0, 2], [0, 1]]
    for one in (*(c for peers in found for c in peers.values()), *(x for x, _ in made)):
        one.close()


def test_process_of_another_user_is_refused(monkeypatch):
    listener, name = listen(2)
    monkeypatch.setattr(sockets.os, "geteuid", lambda: -1)
    with (
        listener,
        pytest.raises(PermissionError, match="rank 0 is a process of another user"),
    ):
        connect_all(1, [name, "own"], listener, 1.0)
