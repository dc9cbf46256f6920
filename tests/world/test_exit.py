"""What ranks print and return when they do not end alike."""

from tests.world.jobs import run_job

START = """
import sys, time
from etc_dist.settings import Settings
from etc_dist.world import start

world = start(Settings(backend="cpu"))
world.barrier()
"""
SOON = 10.0
"""Seconds; less than what the launcher gives ranks after a failure."""


def test_a_call_that_one_rank_makes_alone_ends_all_with_its_error():
    source = """
if world.rank == 1:
    try:
        world.match_call(3, lambda: "one more")
    except ValueError:
        print("caught", flush=True)
"""
    code, output, seconds = run_job(START + source)
    assert code == 1 and seconds < SOON
    assert "[rank 1] caught" in output
    assert "[rank 0] etc_dist.errors.ArgumentError: the ranks do not make" in output


def test_rank_that_fails_ends_those_that_are_at_their_exit():
    source = """
if world.rank == 1:
    time.sleep(1)
    raise ValueError("late")
"""
    code, output, seconds = run_job(START + source)
    assert code == 1 and seconds < SOON
    assert "[rank 1] ValueError: late" in output


def test_failure_after_a_world_was_closed_ends_soon():
    source = """
world.close()
if world.rank == 1:
    time.sleep(1)
    raise ValueError("late")
"""
    code, output, seconds = run_job(START + source)
    assert code == 1 and seconds < SOON
    assert "[rank 1] ValueError: late" in output


def test_other_exit_handlers_run_although_the_world_cannot_be_closed():
    source = """
import atexit
atexit.register(lambda: print("handler", flush=True))
atexit.unregister(world._close_at_exit)
atexit.register(world._close_at_exit)
if world.rank == 1:
    world.match_call(3, lambda: "one more")
"""
    code, output, seconds = run_job(START + source)
    assert code == 1 and seconds < SOON
    assert "[rank 0] handler" in output
