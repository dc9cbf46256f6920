"""An MPS server for one job: processes that share a GPU run on it at the same time.

Without MPS, the driver gives the GPU to one process after another. The server has
private folders, so no other server of the machine is used, changed or stopped.

Run as a program, this is the server's keeper. It starts the server, and stops it as
soon as its input is closed, also if launch/mpirun is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from folders import private_folder

CONTROL = "nvidia-cuda-mps-control"
PROCESS_NAME = CONTROL[:15]  # as /proc shows it, also for nvidia-cuda-mps-server
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
START_SECONDS = 20.0
QUIT_SECONDS = 5.0  # for its command quit
SIGNAL_SECONDS = 2.0  # from SIGTERM to SIGKILL


@contextlib.contextmanager
def server() -> Iterator[dict[str, str]]:
    """Variables for processes that use a new server, which ends with the block."""
    keeper = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a signal from the terminal ends the job, then this
    )
    assert keeper.stdin is not None and keeper.stdout is not None
    try:
        reply = json.loads(keeper.stdout.readline() or '{"fault": "its keeper ended"}')
        if "fault" in reply:
            sys.exit(f"launch/mpirun: the MPS server did not start\n{reply['fault']}")
        yield reply
    finally:
        keeper.stdin.close()
        keeper.wait()


def main() -> int:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        # Not SIG_IGN, which the server would inherit.
        signal.signal(number, lambda *_: None)
    # The longest name of a socket that the server makes.
    with private_folder("mps-", "pipes/control_privileged") as folder:
        variables = {PIPES: f"{folder}/pipes", LOGS: f"{folder}/logs"}
        for path in variables.values():
            os.mkdir(path, 0o700)
        try:
            fault = start(variables)
            print(json.dumps({"fault": fault} if fault else variables), flush=True)
            sys.stdin.read()
        finally:
            stop(variables)
    return 0


def start(variables: dict[str, str]) -> str:
    """Start the server; returns why it does not run, or nothing."""
    if shutil.which(CONTROL) is None:
        return (
            f"  got:   no {CONTROL} in PATH; it comes with NVIDIA's driver\n"
            "  to do: leave out --mps: ranks then use the GPU in turn"
        )
    output = Path(variables[LOGS], "start.log")
    code = 1
    with output.open("wb") as file, contextlib.suppress(subprocess.TimeoutExpired):
        code = subprocess.run(
            [CONTROL, "-d"],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=os.environ | variables,
            timeout=START_SECONDS,
            check=False,
        ).returncode
    until = time.monotonic() + START_SECONDS
    while code == 0 and time.monotonic() < until:
        if command("get_server_list", variables):
            return ""
        time.sleep(0.1)
    logs = sorted(Path(variables[LOGS]).iterdir())
    lines = "".join(path.read_text(errors="replace") for path in logs).splitlines()
    got = "; ".join(lines[-5:]) or "nothing in its logs"
    return (
        f"  got:   {got}\n"
        "  to do: see whether this user may start it (in a container often not), or "
        "leave out --mps"
    )


def stop(variables: dict[str, str]) -> None:
    """End the server: by its own command, then by signals."""
    command("quit", variables)
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        for pid in processes(variables):
            if number is not None:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
        until = time.monotonic() + SIGNAL_SECONDS
        while processes(variables) and time.monotonic() < until:
            time.sleep(0.05)


def command(text: str, variables: dict[str, str]) -> bool:
    """Send one command to the server; returns whether it was accepted."""
    try:
        process = subprocess.run(
            [CONTROL],
            input=f"{text}\n".encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | variables,
            timeout=QUIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return process.returncode == 0


def processes(variables: dict[str, str]) -> list[int]:
    """The server's processes: those of its program with its folder in their variables.

    The folder's name is new for each server, so these are never another server's.
    """
    mark = os.fsencode(f"\0{PIPES}={variables[PIPES]}\0")
    numbers = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "comm").read_text().strip() == PROCESS_NAME:
                environment = b"\0" + (path / "environ").read_bytes()
                numbers += [int(path.name)] if mark in environment else []
    return numbers


if __name__ == "__main__":
    sys.exit(main())
