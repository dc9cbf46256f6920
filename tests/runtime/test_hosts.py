"""Programs over two pretended hosts of two ranks each."""

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.errors import ArgumentError, GraphError, RaceError
from etc_dist.functions.push_rows import push_rows
from etc_dist.runtime.argument_block import far_senders
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_dynamic, schedule_static
from etc_dist.verify.verify import verify
from tests.graphs.exchange_hosts import exchange_hosts, rows_of
from tests.graphs.sent_far import sent_far
from tests.world.jobs import run_on_hosts
from tests.world.test_hosts import START

DIMS = {"rows": 5, "n": 4}
PROGRAM = (
    START
    + """
import numpy as np
from dataclasses import replace
import etc_dist
from tests.graphs.exchange_hosts import exchange_hosts, rows_of

expected = np.concatenate([rows_of(rank) for rank in range(4)])
def compiled(schedule="static", **options):
    return etc_dist.compile(
        exchange_hosts(4, local_size=2, **options), world, schedule=schedule)
"""
)


@pytest.mark.parametrize(("hosts", "near"), [(2, 2), (5, 1)])
def test_kernels_of_the_exchange_send_to_far_ranks(hosts, near):
    graph = exchange_hosts(hosts * near, local_size=near)
    program = Emulator(graph, workers=2, has_far=True)
    inputs = [{"x": rows_of(rank)} for rank in range(hosts * near)]
    expected = np.concatenate([arrays["x"] for arrays in inputs])
    for outputs in program.run(inputs, runs=3):
        np.testing.assert_array_equal(outputs["y"], expected)


def test_far_ranks_that_send_are_found_from_the_graph():
    plan = schedule_static(exchange_hosts(6, local_size=2))
    assert far_senders(plan, 1) == [1, 2]


def test_a_run_may_send_to_other_hosts_than_the_last_one():
    """Each rank counts the epochs of all partners that send to it at any dims."""

    def hops(g):
        return (g.rank + g.dims("hops")) % g.world_size

    program = Emulator(sent_far(3, local_size=1, to=hops), workers=2, has_far=True)
    inputs = [{"x": rows_of(rank)[0]} for rank in range(3)]
    program.run(inputs, {"n": 4, "hops": 1})
    (memory,) = program._memory.values()
    for block in memory._arguments:
        block["dim_hops"] = 2
    outputs = program.run(inputs, {"n": 4, "hops": 1})
    assert all((outputs[r]["y"] == rows_of((r - 2) % 3)[0]).all() for r in range(3))


@pytest.mark.parametrize("local_size", [1, 2, 4])
def test_exchange_is_proved_and_gives_all_rows(local_size):
    graph = exchange_hosts(4, local_size=local_size)
    for plan in (schedule_static(graph), schedule_dynamic(graph)):
        verify(plan, DIMS, 4)
        inputs = [{"x": rows_of(rank)} for rank in range(4)]
        outputs = simulate(plan, inputs, DIMS, epochs=2, seed=local_size).outputs
        expected = np.concatenate([rows_of(rank) for rank in range(4)])
        assert all((arrays["y"] == expected).all() for arrays in outputs)


def test_direct_access_to_another_host_is_refused():
    plan = schedule_static(exchange_hosts(4, local_size=2, direct=True))
    with pytest.raises(GraphError) as caught:
        verify(plan, DIMS, 4)
    assert "writes staged.on(" in caught.value.got
    assert "notifies far.on(" in caught.value.got
    assert "on rank 2: a rank of another host, with 2 ranks on each" in caught.value.got
    assert "push_far" in caught.value.fix
    verify(schedule_static(exchange_hosts(4, direct=True)), DIMS, 4)


def test_sending_to_other_ranks_than_partners_is_refused():
    plan = schedule_static(exchange_hosts(4, local_size=2, astray=1))
    with pytest.raises(GraphError) as caught:
        verify(plan, DIMS, 4)
    assert "send_1[i=0] on rank 0 writes staged.on(" in caught.value.got
    assert "where its partner has another number" in caught.value.got
    inputs = [{"x": rows_of(rank)} for rank in range(4)]
    with pytest.raises(GraphError) as caught:
        simulate(plan, inputs, DIMS, check=False)
    assert "or a partner" in caught.value.wanted


@pytest.mark.parametrize(
    ("far", "step", "is_right"),
    [(True, 2, True), (True, 3, False), (False, 2, False)],
    ids=["partner", "other", "without a far function"],
)
def test_data_chooses_only_partners_of_other_hosts(far, step, is_right):
    def named(g):
        return g.input("to", (4,), "int32").load(0)

    send, options = None if far else push_rows(), {"workers": 2, "has_far": True}
    graph = sent_far(4, local_size=2, to=named, send=send)
    program = Emulator(graph, **options)
    inputs = [
        {"x": rows_of(rank)[0], "to": np.full(4, (rank + step) % 4, np.int32)}
        for rank in range(4)
    ]
    if is_right:
        outputs = program.run(inputs, runs=2)
        assert all(
            (outputs[r]["y"] == rows_of((r + step) % 4)[0]).all() for r in range(4)
        )
    else:
        with pytest.raises(ArgumentError, match="data of a run does not fit") as caught:
            program.run(inputs)
        assert "ranks" in caught.value.wanted


def test_memory_that_was_sent_is_not_written_in_the_same_run():
    plan = schedule_static(sent_far(2, local_size=1, overwrites=True))
    with pytest.raises(RaceError) as caught:
        verify(plan, {"n": 4}, 1)
    assert "which send[i=0] on rank 0 sends to another host" in caught.value.got


def test_data_cannot_choose_a_rank_of_another_host():
    plan = schedule_static(exchange_hosts(4, local_size=2, direct=True))
    inputs = [{"x": rows_of(rank)} for rank in range(4)]
    with pytest.raises(
        GraphError, match="an index of call .* is out of range"
    ) as caught:
        simulate(plan, inputs, DIMS, check=False)
    assert "a rank of this host, " in caught.value.wanted


def test_hosts_of_a_graph_are_equal():
    with pytest.raises(GraphError, match="different numbers of ranks"):
        exchange_hosts(4, local_size=3)


@pytest.fixture(scope="module")
def job():
    """What the ranks of one job print: an exchange under each schedule, refusals, and
    an error of a task."""
    source = """
for schedule in ("static", "dynamic"):
    with compiled(schedule) as program:
        for turn in range(3):
            y = program.run(x=rows_of(world.rank) + turn)["y"]
            assert (y == expected + np.float32(turn)).all()
        y = program.run(x=rows_of(world.rank, 9))["y"]
        longer = np.concatenate([rows_of(r, 9) for r in range(4)])
        show(schedule, bool((y == longer).all()))

refused(lambda: etc_dist.compile(exchange_hosts(4), world))
refused(lambda: compiled(direct=True).run(x=rows_of(world.rank)))

program = compiled()
def fails(*_):
    raise KeyError("x")
from etc_dist.runtime.cpu import workers
if world.rank == 3:
    run_body, workers.run_body = workers.run_body, fails
try:
    program.run(x=rows_of(world.rank))
except (EtcDistError, KeyError) as error:
    show(type(error).__name__, getattr(error, "what", ""))
if world.rank == 3:
    workers.run_body = run_body
equal = (program.run(x=rows_of(world.rank))["y"] == expected).all()
show("after the error", bool(equal))
world.close()
"""
    code, output = run_on_hosts(PROGRAM + source)
    assert code == 0, output
    return output


def test_rows_are_exchanged_between_hosts(job):
    assert job.count("static True") == job.count("dynamic True") == 4


def test_graphs_for_one_host_are_refused_on_all_ranks(job):
    assert job.count("uses the memory of ranks on other hosts") == 4
    assert job.count("got: 2 hosts of 2 ranks to do: start all ranks on one") == 4
    assert job.count("GraphError: graph exchange_hosts is not correct") == 4


def test_error_of_a_task_ends_the_run_on_all_hosts_and_the_next_one_is_right(job):
    assert job.count("WorldError a task failed on rank 3") == 3
    assert job.count("KeyError") == 1
    assert job.count("after the error True") == 4


@pytest.mark.parametrize(
    "dead", ["[2, 3]", pytest.param("[2]", marks=pytest.mark.exhaustive)]
)
def test_run_in_which_ranks_are_killed_ends_on_the_other_host(dead):
    source = """
program = compiled()
program.run(x=rows_of(world.rank))
if world.rank in DEAD:
    program._executor._drive = lambda workers: os.kill(os.getpid(), 9)
refused(lambda: program.run(x=rows_of(world.rank)))
os._exit(0)
"""
    limits = {"ETC_DIST_WAIT_LIMIT": "1", "ETC_DIST_WORLD_LIMIT": "2"}
    _, output = run_on_hosts(PROGRAM + source.replace("DEAD", dead), **limits)
    alive = 3 - ("3" in dead)
    assert output.count("WaitTimeoutError: a run of") == alive
    assert output.count("rank 2: its process has ended") == (3 if alive == 3 else 0)
    assert output.count("rank 2: it did not answer") == (2 if alive == 2 else 0)
