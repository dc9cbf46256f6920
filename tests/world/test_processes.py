"""A rank whose process has ended is named, without waiting for the time limit."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from etc_dist.world.processes import AbortOnUncaught, Process, ProcessMonitor
from tests.world.jobs import run_job

# Rank 1 ends while rank 0 waits for it; each call has a separate world, which a lost
# rank breaks.
WAITS = """
import json
from mpi4py import MPI
from etc_dist.world.agreement import Agreement
from etc_dist.world.mpi import MpiTransport

CALLS = {
    "match_call": lambda world: world.match_call(1, str),
    "gather": lambda world: world.gather(bytes(10_000_000)),
    "barrier": lambda world: world.barrier(),
    "agree": lambda world: world.agree(int),
}
worlds = {call: start(CPU) for call in CALLS}
# Its calls are compared by messages; the limit is longer than the job may take.
worlds["start"] = Agreement(MpiTransport(MPI, MPI.COMM_WORLD.Dup(), None), 60.0)
CALLS["start"] = CALLS["match_call"]
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 1:
    time.sleep(0.3)
    os._exit(1)
found = {}
for name, call in CALLS.items():
    try:
        call(worlds[name])
        call(worlds[name])
    except WorldError as error:
        found[name] = str(error)
show(json.dumps(found))
os._exit(0)
"""


def test_ended_peer_is_named_wherever_a_rank_waits_for_it():
    job = run_job(WAITS)
    tag = "[rank 0] {"
    lines = [line for line in job.output.splitlines() if line.startswith(tag)]
    assert lines, job.output
    errors = json.loads(lines[0].removeprefix("[rank 0] "))
    assert errors.keys() == {"match_call", "gather", "barrier", "agree", "start"}
    text = "rank 1 did not take part: its process has ended"
    assert all(text in error for error in errors.values())


@pytest.fixture
def child():
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def seen(child: subprocess.Popen[bytes]) -> Process:
    """The child, as it would describe itself."""
    stat = Path(f"/proc/{child.pid}/stat").read_text()
    return Process(child.pid, Process.own().realm, stat.split()[21])


def test_own_and_unknown_processes_have_not_ended():
    process = Process.own()
    elsewhere = replace(process, pid=2**22 + 1, realm="another host's")
    monitor = ProcessMonitor([process, None, elsewhere])
    assert monitor.find_ended() == frozenset()


def test_child_has_ended_as_a_zombie_and_once_reaped(child):
    monitor = ProcessMonitor([Process.own(), seen(child)])
    assert not monitor.ended(1)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert monitor.ended(1)
    child.wait()
    assert not Path(f"/proc/{child.pid}").exists()
    assert monitor.find_ended() == {1}


def test_stopped_child_has_not_ended(child):
    monitor = ProcessMonitor([seen(child)])
    child.send_signal(signal.SIGSTOP)
    time.sleep(0.05)
    assert monitor.stopped(0) and not monitor.ended(0)


def test_later_process_with_the_same_number_is_another(child):
    assert not seen(child).ended()
    assert replace(seen(child), begin="1").ended()


def test_uncaught_exception_is_tagged_and_ends_all_ranks(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(sys, "excepthook", lambda *what: calls.append(what[0]))
    hook = AbortOnUncaught(3, lambda: calls.append("aborted"))
    hook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert calls == [KeyboardInterrupt, "aborted"]
    assert capsys.readouterr().err.startswith("[rank 3] uncaught KeyboardInterrupt")
