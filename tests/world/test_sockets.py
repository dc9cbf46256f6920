from concurrent.futures import ThreadPoolExecutor

import pytest

from etc_dist.world import sockets
from etc_dist.world.sockets import connect_all, listen


def test_ranks_connect_by_names():
    listeners = [listen(3) for _ in range(3)]
    names = [name for _, name in listeners]
    with ThreadPoolExecutor() as pool:
        ranks = [
            pool.submit(connect_all, rank, names, listener, 10.0)
            for rank, (listener, _) in enumerate(listeners)
        ]
        meshes = [connection.result() for connection in ranks]
    assert [sorted(connection) for connection in meshes] == [[1, 2], [0, 2], [0, 1]]
    for connection in (
        *(c for peers in meshes for c in peers.values()),
        *(x for x, _ in listeners),
    ):
        connection.close()


def test_process_of_another_user_is_refused(monkeypatch):
    listener, name = listen(2)
    monkeypatch.setattr(sockets.os, "geteuid", lambda: -1)
    with (
        listener,
        pytest.raises(PermissionError, match="rank 0 is a process of another user"),
    ):
        connect_all(1, [name, "own"], listener, 1.0)
