"""Messages between ranks, and the exchange of objects above them."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from etc_dist.world.mpi import MpiTransport
from etc_dist.world.sockets import SocketTransport
from etc_dist.world.transport import CALL, RUN, Exchange

NEVER = 600.0
"""A time limit that no test reaches."""


@pytest.fixture
def pair():
    first, second = socket.socketpair()
    transports = SocketTransport(0, {1: first}), SocketTransport(1, {0: second})
    yield transports
    for transport in transports:
        transport.close()


@pytest.fixture
def exchanges(pair):
    return [Exchange(transport, CALL, range(2)) for transport in pair]


@pytest.mark.parametrize("nbytes", [1, 5 << 20])
def test_values_of_any_size_come_in_order(exchanges, nbytes):
    def gather(exchange: Exchange) -> list[dict[int, object]]:
        return [exchange.gather(bytes([i]) * nbytes, 10.0) for i in range(3)]

    with ThreadPoolExecutor() as pool:
        results = list(pool.map(gather, exchanges))
    values = [dict.fromkeys((0, 1), bytes([i]) * nbytes) for i in range(3)]
    assert results == [values, values]


def test_message_sent_before_the_end_arrives(exchanges, pair):
    assert exchanges[0].gather("last", 0.1) == {0: "last"}
    pair[0].close()
    assert exchanges[1].gather("none", NEVER) == {0: "last", 1: "none"}
    assert exchanges[1].gather("none", NEVER) == {1: "none"}


MESSAGES = (CALL, b"first"), (RUN, b"second"), (CALL, bytes(1 << 20)), (CALL, b"")


def expect_order(receiver):
    """Expect `MESSAGES` of rank 0: those of a kind in order, without others."""
    for kind, data in (MESSAGES[1], MESSAGES[0], *MESSAGES[2:]):
        while (message := receiver.receive(kind)) is None:
            assert receiver.find_unsent(kind) == set()
        assert message == (0, data)
    assert receiver.receive(CALL) is None


def test_messages_arrive_in_order_for_each_kind(pair):
    def send() -> None:
        for message in MESSAGES:
            pair[0].send(1, *message)
        while pair[0].find_unsent(CALL):
            pass

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        expect_order(pair[1])
        sending.result()


@pytest.mark.mpi(ranks=[2])
def test_messages_of_mpi_arrive_in_order_for_each_kind():
    from mpi4py import MPI

    transport = MpiTransport(MPI, MPI.COMM_WORLD.Dup(), None)
    if transport.rank == 0:
        for message in MESSAGES:
            transport.send(1, *message)
        while transport.find_unsent(CALL) | transport.find_unsent(RUN):
            pass
    elif transport.rank == 1:
        expect_order(transport)
    transport.close()


def test_exchange_with_a_silent_peer_ends(exchanges):
    assert exchanges[0].gather("x", 0.1, need_all=True) == {0: "x"}
