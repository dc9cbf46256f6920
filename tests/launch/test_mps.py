"""launch/mpirun --mps: a server for the job alone, which never outlives it."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

MPIRUN = Path(__file__).parents[2] / "launch" / "mpirun"

# As nvidia-cuda-mps-control: accepts commands, or starts itself as a server.
CONTROL = """#!{python}
import os, pathlib, signal, socket, subprocess, sys, time
pipes = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
if sys.argv[1:] == ["-d"]:
    if {broken}:
        sys.exit("no permission")
    assert pipes.stat().st_mode & 0o777 == 0o700
    subprocess.Popen([__file__, "serve"], start_new_session=True)
    while not (pipes / "control").exists():
        time.sleep(0.01)
elif sys.argv[1:] == ["serve"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (pipes / "pid").write_text(str(os.getpid()))
    socket.socket(socket.AF_UNIX).bind(str(pipes / "control_privileged"))
    (pipes / "control").touch()
    while not ((pipes / "quit").exists() and {polite}):
        time.sleep(0.01)
else:
    if not (pipes / "control").exists():
        sys.exit(1)
    (pipes / sys.stdin.read().strip()).touch()
"""


@pytest.fixture
def control(tmp_path, monkeypatch):
    """Puts the program into PATH."""

    def install(*, broken: bool = False, polite: bool = True) -> None:
        path = tmp_path / "nvidia-cuda-mps-control"
        settings = {"python": sys.executable, "broken": broken, "polite": polite}
        path.write_text(CONTROL.format(**settings))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return install


def start(source: str, *options: str) -> subprocess.Popen:
    show = (
        "import os, pathlib, time; p = os.environ['CUDA_MPS_PIPE_DIRECTORY'];"
        "pid = pathlib.Path(p, 'pid').read_text();"
        "print('server', pid, os.environ['ETC_DIST_SHARE_GPU'], p);"
    )
    command = [sys.executable, str(MPIRUN), "-n", "2", "--mps", *options]
    return subprocess.Popen(
        [*command, "python", "-c", show + source],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def server_in(output: str) -> tuple[int, Path]:
    pid, folder = re.search(r"server (\d+) 1 (\S+)", output).groups()
    return int(pid), Path(folder)


def is_alive(pid: int) -> bool:
    """Whether it runs; one that has ended may stay listed for a moment."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


def assert_gone(output: str, within: float = 0.0) -> None:
    pid, folder = server_in(output)
    until = time.monotonic() + within
    while folder.parent.exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert not is_alive(pid)
    assert not folder.parent.exists()


@pytest.mark.parametrize("polite", [True, False])
def test_ranks_share_a_server_that_ends_with_the_job(control, polite):
    control(polite=polite)
    job = start("")
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 0
    assert output.count("server") == 2
    assert_gone(output)


def test_server_ends_when_a_signal_ends_the_job(control):
    control()
    job = start("time.sleep(60)")
    line = job.stdout.readline()
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGTERM
    assert_gone(line)


def test_server_ends_after_the_time_limit(control):
    control()
    job = start("time.sleep(60)", "--time-limit", "1")
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 124
    assert_gone(output)


def test_server_ends_when_the_launcher_is_killed(control):
    control()
    job = start("time.sleep(60)")
    line = job.stdout.readline()
    job.kill()
    job.communicate(timeout=60)
    assert_gone(line, within=10)


def test_servers_of_others_are_left_alone(control):
    control()
    server = start("time.sleep(60)")
    line = server.stdout.readline()
    start("").communicate(timeout=60)
    assert server.poll() is None
    assert is_alive(server_in(line)[0])
    server.terminate()
    server.communicate(timeout=60)
    assert_gone(line)


def test_missing_mps_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    job = start("")
    assert "no nvidia-cuda-mps-control in PATH" in job.communicate(timeout=60)[0]
    assert job.returncode == 1


def test_server_that_does_not_start_is_named_with_its_log(control):
    control(broken=True)
    job = start("")
    output = job.communicate(timeout=60)[0]
    assert "the MPS server did not start\n  got:   no permission\n" in output
    assert job.returncode == 1
