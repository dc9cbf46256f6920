import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from etc_dist.world import sockets
from etc_dist.world.sockets import SocketTransport, connect_all, listen
from etc_dist.world.transport import CALL, RUN, Exchange


@pytest.fixture
def pair():
    one, other = socket.socketpair()
    made = SocketTransport(0, {1: one}), SocketTransport(1, {0: other})
    yield made
    for transport in made:
        transport.close()


@pytest.fixture
def exchanges(pair):
    return [Exchange(transport, CALL, range(2)) for transport in pair]


@pytest.mark.parametrize("nbytes", [1, 5 << 20])
def test_values_of_any_size_come_in_order(exchanges, nbytes):
    def gather(exchange: Exchange) -> list[dict[int, object]]:
        return [exchange.gather(bytes([i]) * nbytes, 10.0) for i in range(3)]

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(gather, exchanges))
    wanted = [dict.fromkeys((0, 1), bytes([i]) * nbytes) for i in range(3)]
    assert found == [wanted, wanted]


def test_message_sent_before_the_end_arrives(exchanges, pair):
    assert exchanges[0].gather("last", 0.1) == {0: "last"}
    pair[0].close()
    assert exchanges[1].gather("none", 10.0) == {0: "last", 1: "none"}
    assert exchanges[1].gather("none", 10.0) == {1: "none"}


def test_messages_of_one_kind_do_not_wait_for_those_of_another(pair):
    for kind, data in (CALL, b"first"), (RUN, b"second"), (CALL, b"third"):
        pair[0].send(1, kind, data)
    assert pair[1].receive(RUN) == (0, b"second")
    assert [pair[1].receive(CALL) for _ in range(2)] == [(0, b"first"), (0, b"third")]
    assert pair[1].receive(CALL) is None


def test_exchange_with_a_silent_peer_ends(exchanges):
    assert exchanges[0].gather("x", 0.1, need_all=True) == {0: "x"}


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
