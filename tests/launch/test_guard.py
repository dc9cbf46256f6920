"""The guard of a rank, with a test in place of its job."""

import os
import socket
import subprocess
import sys

from launch import guard


def test_an_order_may_come_before_the_input(tmp_path):
    # A signal comes after rank 0's guard has connected, and before its HELLO is read.
    command = [sys.executable, guard.__file__, str(tmp_path / "socket"), "9", "free"]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        process = subprocess.Popen(
            [*command, sys.executable, "-c", "import time; time.sleep(60)"],
            env=os.environ | {"PMI_RANK": "0"},
        )
        job, _ = listener.accept()
    with job:
        job.settimeout(30)
        job.sendall(guard.TERMINATE)
        socket.send_fds(job, [guard.INPUT], [])
        output = b""
        while b"143" not in output:
            data = job.recv(1 << 16)
            assert data
            output += data
        job.sendall(guard.RELEASE)
        assert process.wait(timeout=30) == 143
