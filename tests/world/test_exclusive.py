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
def own():
    """A separate world, which a test may break; its limit never ends a call here."""
    own = start(Settings(backend="cpu", world_limit=600.0))
    yield own
    if not own.broken:
        own.close()


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
def test_call_while_another_thread_is_inside_one_is_refused_by_name(own):
    def step():
        with pytest.raises(WorldError) as caught:
            in_thread(own.barrier)
        return caught.value.got

    main = threading.current_thread().name
    text = f"thread 'other_0' called while thread {main!r} was inside a call"
    assert own.agree(step) == [text] * own.size
    own.barrier()


@pytest.mark.mpi(ranks=[1])
def test_threads_that_start_at_once_start_one_world(own, monkeypatch):
    def second(*_):
        with pytest.raises(WorldError, match="thread 'MainThread' was inside a call"):
            in_thread(lambda: start(own.settings))
        raise WorldError("none", where="", wanted="", got="", fix="")

    monkeypatch.setattr("etc_dist.world.startup._connect", second)
    for _ in range(2):
        with pytest.raises(WorldError, match="none"):
            start(own.settings)


LOCK_CODES = [
    start.__code__,
    processes.Exclusive.__enter__.__code__,
    processes.Exclusive.__exit__.__code__,
]


@pytest.mark.mpi(ranks=[1])
def test_a_start_that_is_interrupted_at_any_line_can_be_made_again(own, monkeypatch):
    monkeypatch.setattr("etc_dist.world.startup._start_alone", lambda *_: own)
    line = 1
    while interrupted(start, LOCK_CODES, line):
        assert start() is own
        line += 1
    assert line > 10


@pytest.mark.mpi
def test_calls_in_turn_from_different_threads_work(own):
    for _ in range(3):
        assert in_thread(lambda: own.gather(own.rank)) == list(range(own.size))
        own.barrier()


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


def interrupt_end(own):
    """As when a signal handler raises before `__exit__` has begun."""
    own.exclusive.__enter__()
    raise KeyboardInterrupt


def interrupt_start(own):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "get_ident", interrupt)
        own.barrier()


def interrupt(*_):
    raise KeyboardInterrupt


INTERRUPTS = {
    "start": interrupt_start,
    "inside": lambda own: own.agree(interrupt),
    "end": interrupt_end,
}


@pytest.mark.mpi(ranks=[1])
@pytest.mark.parametrize("place", INTERRUPTS)
@pytest.mark.parametrize("run", [in_thread, lambda call: call()])
def test_interrupted_call_of_one_rank_leaves_its_world_usable(place, run, own):
    recovered = []
    monkeypatch = pytest.MonkeyPatch()
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(own.exclusive, "_recover", lambda: recovered.append(place))
            with pytest.raises(KeyboardInterrupt):
                run(lambda: INTERRUPTS[place](own))
            own.barrier()
            own.barrier()
    assert recovered == [place] * 2


@pytest.mark.mpi(ranks=[1])
def test_interrupted_recovery_is_made_again(monkeypatch):
    from mpi4py import MPI

    own = start(Settings(backend="cpu"), MPI.COMM_SELF)
    with pytest.raises(KeyboardInterrupt):
        own.agree(interrupt)
    with monkeypatch.context() as patch:
        patch.setattr(own.exclusive, "_recover", interrupt)
        with pytest.raises(KeyboardInterrupt):
            own.barrier()
    recovered = []
    monkeypatch.setattr(own.exclusive, "_recover", lambda: recovered.append(1))
    own.barrier()
    assert recovered == [1]
    own.close()


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("run", [in_thread, lambda call: call()])
def test_call_whose_end_is_interrupted_breaks_the_world(run, own):
    with pytest.raises(KeyboardInterrupt):
        run(lambda: interrupt_end(own))
    for _ in range(2):
        with pytest.raises(WorldError, match="cannot be used: a call was interrupted"):
            own.barrier()
    own.close()


CALLS = {
    "match_call": lambda own: own.match_call(1, str),
    "agree": lambda own: own.agree(int),
    "gather": lambda own: own.gather(1),
    "barrier": lambda own: own.barrier(),
    "refuse": lambda own: own.refuse(
        ArgumentError("x is bad", where="x", wanted="1", got="2", fix="pass 1")
    ),
}


@pytest.mark.mpi(ranks=[2])
def test_call_whose_start_is_interrupted_breaks_the_world(own):
    with pytest.raises(KeyboardInterrupt):
        interrupt_start(own)
    with pytest.raises(WorldError, match="cannot be used: a call was interrupted"):
        own.barrier()


@pytest.mark.mpi(ranks=[2])
def test_error_of_another_world_that_leaves_a_call_breaks_the_world(own, alarm):
    closed = start(own.settings)
    closed.close()
    if own.rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: closed.barrier())
        alarm(0.1)
        with pytest.raises(WorldError, match="cannot be used: it was closed"):
            own.barrier()
        assert own.broken
    else:
        time.sleep(0.3)
        with pytest.raises(WorldError, match="rank 0: left the world"):
            own.barrier()


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("name", CALLS)
def test_interrupted_call_breaks_the_world_by_name_on_all_ranks(name, own, alarm):
    if own.rank == 0:
        alarm(0.1)
        with pytest.raises(KeyboardInterrupt):
            CALLS[name](own)
    else:
        time.sleep(0.3)
        with pytest.raises(
            WorldError, match="rank 0: left the world: a call there was inter"
        ):
            CALLS[name](own)
            own.barrier()
    with pytest.raises(WorldError, match="cannot be used"):
        own.barrier()


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("name", ["match_call", "agree", "barrier"])
def test_peers_that_wait_already_raise_for_an_interrupted_call(name, own):
    def interrupt():
        time.sleep(0.3)
        raise KeyboardInterrupt

    if own.rank == 0:
        with pytest.raises(KeyboardInterrupt):
            own.agree(interrupt)
    else:
        with pytest.raises(
            WorldError, match="rank 0: left the world: a call there was inter"
        ):
            CALLS[name](own)


@pytest.mark.mpi(ranks=[2])
def test_gather_does_not_wait_for_a_rank_that_left(own):
    if own.rank == 0:
        with pytest.raises(KeyboardInterrupt), own.exclusive:
            time.sleep(0.3)
            raise KeyboardInterrupt
    else:
        assert own.gather(own.rank) == [None, *range(1, own.size)]
        assert own.broken


def test_step_of_a_finalizer_does_not_run_within_a_call():
    exclusive, steps = processes.Exclusive(pytest.fail, None), []
    with exclusive:
        exclusive.run_if_free(lambda: steps.append(1))
        in_thread(lambda: exclusive.run_if_free(lambda: steps.append(2)))
    exclusive.run_if_free(lambda: steps.append(3))
    assert steps == [3]


@pytest.mark.mpi(ranks=[1])
def test_call_waits_for_the_finalizer_of_another_thread(own):
    begun, ended = threading.Event(), []

    def step():
        begun.set()
        time.sleep(0.1)
        ended.append(1)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(own.exclusive.run_if_free, step)
        begun.wait()
        own.barrier()
        assert ended == [1]


@pytest.mark.mpi
def test_error_that_all_ranks_raise_does_not_break_the_world(own):
    with pytest.raises(ArgumentError, match="x is bad"):
        CALLS["refuse"](own)
    own.barrier()


@pytest.mark.mpi
def test_call_of_user_code_inside_another_call_is_refused(own):
    def step():
        with pytest.raises(WorldError, match="made inside another call"):
            own.barrier()

    own.agree(step)
    own.barrier()


@pytest.mark.mpi(ranks=[2])
def test_nested_call_that_a_signal_handler_does_not_catch_breaks_the_world(own):
    if own.rank == 0:
        before = signal.signal(signal.SIGALRM, lambda *_: own.barrier())
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(WorldError, match="made inside another call"):
            own.barrier()
        signal.signal(signal.SIGALRM, before)
        assert own.broken
    else:
        time.sleep(0.3)
        with pytest.raises(WorldError, match="rank 0: left the world"):
            own.barrier()
