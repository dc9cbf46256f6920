"""One thread at a time, and calls that an exception interrupts."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from etc_dist.errors import ArgumentError, WorldError
from etc_dist.settings import Settings
from etc_dist.world import processes, start
from tests.interrupts import interrupted


@pytest.fixture
def cpu_world():
    """A separate world, which a test may break; its limit never ends a call here."""
    cpu_world = start(Settings(backend="cpu", world_limit=600.0))
    yield cpu_world
    if not cpu_world.broken:
        cpu_world.close()


def in_thread(call, name="other"):
    """The result or exception of `call` in a thread of this name."""
    with ThreadPoolExecutor(1, thread_name_prefix=name) as pool:
        return pool.submit(call).result()


@pytest.fixture
def alarm():
    """Raises KeyboardInterrupt after some seconds, as a signal handler."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.mpi
def test_call_while_another_thread_is_inside_one_is_refused_by_name(cpu_world):
    def step():
        with pytest.raises(WorldError) as caught:
            in_thread(cpu_world.barrier)
        return caught.value.got

    main = threading.current_thread().name
    text = f"thread 'other_0' called while thread {main!r} was inside a call"
    assert cpu_world.agree(step) == [text] * cpu_world.size
    cpu_world.barrier()


@pytest.mark.mpi(ranks=[1])
def test_threads_that_start_at_once_start_one_world(cpu_world, monkeypatch):
    def second(*_):
        with pytest.raises(WorldError, match="thread 'MainThread' was inside a call"):
            in_thread(lambda: start(cpu_world.settings))
        raise WorldError("none", where="", wanted="", got="", fix="")

    monkeypatch.setattr("etc_dist.world.startup._connect", second)
    for _ in range(2):
        with pytest.raises(WorldError, match="none"):
            start(cpu_world.settings)


LOCK_CODES = [
    start.__code__,
    processes.Exclusive.__enter__.__code__,
    processes.Exclusive.__exit__.__code__,
]


@pytest.mark.mpi(ranks=[1])
def test_a_start_that_is_interrupted_at_any_line_can_be_made_again(
    cpu_world, monkeypatch
):
    monkeypatch.setattr("etc_dist.world.startup._start_alone", lambda *_: cpu_world)
    line = 1
    while interrupted(start, LOCK_CODES, line):
        assert start() is cpu_world
        line += 1
    assert line > 10


@pytest.mark.mpi
def test_calls_in_turn_from_different_threads_work(cpu_world):
    for _ in range(3):
        assert in_thread(lambda: cpu_world.gather(cpu_world.rank)) == list(
            range(cpu_world.size)
        )
        cpu_world.barrier()


class Gpus:
    """A backend on GPU 1, in a thread whose current GPU is 0."""

    def __init__(self):
        self.current = 0

    def enter(self):
        before, self.current = self.current, 1
        return before if before != 1 else None

    def restore(self, device):
        self.current = device


def test_the_gpu_of_the_world_is_current_during_a_call():
    gpus = Gpus()
    exclusive = processes.Exclusive(pytest.fail, gpus)
    for before in (0, 1):
        gpus.current = before
        with exclusive:
            assert gpus.current == 1
        assert gpus.current == before


def interrupt_end(cpu_world):
    """As when a signal handler raises before `__exit__` has begun."""
    cpu_world.exclusive.__enter__()
    raise KeyboardInterrupt


def interrupt_start(cpu_world):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "get_ident", interrupt)
        cpu_world.barrier()


def interrupt(*_):
    raise KeyboardInterrupt


INTERRUPTS = {
    "start": interrupt_start,
    "inside": lambda cpu_world: cpu_world.agree(interrupt),
    "end": interrupt_end,
}


@pytest.mark.mpi(ranks=[1])
@pytest.mark.parametrize("place", INTERRUPTS)
@pytest.mark.parametrize("run", [in_thread, lambda call: call()])
def test_interrupted_call_of_one_rank_leaves_its_world_usable(place, run, cpu_world):
    recovered = []
    monkeypatch = pytest.MonkeyPatch()
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(
                cpu_world.exclusive, "_recover", lambda: recovered.append(place)
            )
            with pytest.raises(KeyboardInterrupt):
                run(lambda: INTERRUPTS[place](cpu_world))
            cpu_world.barrier()
            cpu_world.barrier()
    assert recovered == [place] * 2


@pytest.mark.mpi(ranks=[1])
def test_interrupted_recovery_is_made_again(monkeypatch):
    from mpi4py import MPI

    cpu_world = start(Settings(backend="cpu"), MPI.COMM_SELF)
    with pytest.raises(KeyboardInterrupt):
        cpu_world.agree(interrupt)
    with monkeypatch.context() as patch:
        patch.setattr(cpu_world.exclusive, "_recover", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cpu_world.barrier()
    recovered = []
    monkeypatch.setattr(cpu_world.exclusive, "_recover", lambda: recovered.append(1))
    cpu_world.barrier()
    assert recovered == [1]
    cpu_world.close()


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("run", [in_thread, lambda call: call()])
def test_call_whose_end_is_interrupted_breaks_the_world(run, cpu_world):
    with pytest.raises(KeyboardInterrupt):
        run(lambda: interrupt_end(cpu_world))
    for _ in range(2):
        with pytest.raises(WorldError, match="cannot be used: a call was interrupted"):
            cpu_world.barrier()
    cpu_world.close()


CALLS = {
    "match_call": lambda cpu_world: cpu_world.match_call(1, str),
    "agree": lambda cpu_world: cpu_world.agree(int),
    "gather": lambda cpu_world: cpu_world.gather(1),
    "barrier": lambda cpu_world: cpu_world.barrier(),
    "refuse": lambda cpu_world: cpu_world.refuse(
        ArgumentError("x is bad", where="x", wanted="1", got="2", fix="pass 1")
    ),
}


@pytest.mark.mpi(ranks=[2])
def test_call_whose_start_is_interrupted_breaks_the_world(cpu_world):
    with pytest.raises(KeyboardInterrupt):
        interrupt_start(cpu_world)
    with pytest.raises(WorldError, match="cannot be used: a call was interrupted"):
        cpu_world.barrier()


@pytest.mark.mpi(ranks=[2])
def test_error_of_another_world_that_leaves_a_call_breaks_the_world(cpu_world, alarm):
    closed = start(cpu_world.settings)
    closed.close()
    if cpu_world.rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: closed.barrier())
        alarm(0.1)
        with pytest.raises(WorldError, match="cannot be used: it was closed"):
            cpu_world.barrier()
        assert cpu_world.broken
    else:
        time.sleep(0.3)
        with pytest.raises(WorldError, match="rank 0: left the world"):
            cpu_world.barrier()


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("name", CALLS)
def test_interrupted_call_breaks_the_world_by_name_on_all_ranks(name, cpu_world, alarm):
    if cpu_world.rank == 0:
        alarm(0.1)
        with pytest.raises(KeyboardInterrupt):
            CALLS[name](cpu_world)
    else:
        time.sleep(0.3)
        with pytest.raises(
            WorldError, match="rank 0: left the world: a call there was inter"
        ):
            CALLS[name](cpu_world)
            cpu_world.barrier()
    with pytest.raises(WorldError, match="cannot be used"):
        cpu_world.barrier()


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("name", ["match_call", "agree", "barrier"])
def test_peers_that_wait_already_raise_for_an_interrupted_call(name, cpu_world):
    def interrupt():
        time.sleep(0.3)
        raise KeyboardInterrupt

    if cpu_world.rank == 0:
        with pytest.raises(KeyboardInterrupt):
            cpu_world.agree(interrupt)
    else:
        with pytest.raises(
            WorldError, match="rank 0: left the world: a call there was inter"
        ):
            CALLS[name](cpu_world)


@pytest.mark.mpi(ranks=[2])
def test_gather_does_not_wait_for_a_rank_that_left(cpu_world):
    if cpu_world.rank == 0:
        with pytest.raises(KeyboardInterrupt), cpu_world.exclusive:
            time.sleep(0.3)
            raise KeyboardInterrupt
    else:
        assert cpu_world.gather(cpu_world.rank) == [None, *range(1, cpu_world.size)]
        assert cpu_world.broken


def test_step_of_a_finalizer_does_not_run_within_a_call():
    exclusive, steps = processes.Exclusive(pytest.fail, None), []
    with exclusive:
        exclusive.run_if_free(lambda: steps.append(1))
        in_thread(lambda: exclusive.run_if_free(lambda: steps.append(2)))
    exclusive.run_if_free(lambda: steps.append(3))
    assert steps == [3]


@pytest.mark.mpi(ranks=[1])
def test_call_waits_for_the_finalizer_of_another_thread(cpu_world):
    begin, results = threading.Event(), []

    def step():
        begin.set()
        time.sleep(0.1)
        results.append(1)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(cpu_world.exclusive.run_if_free, step)
        begin.wait()
        cpu_world.barrier()
        assert results == [1]


@pytest.mark.mpi
def test_error_that_all_ranks_raise_does_not_break_the_world(cpu_world):
    with pytest.raises(ArgumentError, match="x is bad"):
        CALLS["refuse"](cpu_world)
    cpu_world.barrier()


@pytest.mark.mpi
def test_call_of_user_code_inside_another_call_is_refused(cpu_world):
    def step():
        with pytest.raises(WorldError, match="made inside another call"):
            cpu_world.barrier()

    cpu_world.agree(step)
    cpu_world.barrier()


@pytest.mark.mpi(ranks=[2])
def test_nested_call_that_a_signal_handler_does_not_catch_breaks_the_world(cpu_world):
    if cpu_world.rank == 0:
        before = signal.signal(signal.SIGALRM, lambda *_: cpu_world.barrier())
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(WorldError, match="made inside another call"):
            cpu_world.barrier()
        signal.signal(signal.SIGALRM, before)
        assert cpu_world.broken
    else:
        time.sleep(0.3)
        with pytest.raises(WorldError, match="rank 0: left the world"):
            cpu_world.barrier()
