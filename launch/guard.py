"""One rank's guard: runs the rank's command between mpirun and launch/mpirun.

It copies the output, and it stays alive for a failed rank while the others report:
mpirun, which would end them at once, does not see the failure until then.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import IO

HEADER = struct.Struct(">cI")  # kind and length of a message to launch/mpirun
HELLO, OUT, ERR, EXIT = b"h", b"o", b"e", b"x"  # kinds of message
DUMP, KILL, RELEASE = b"D", b"K", b"R"  # orders from launch/mpirun


def main() -> int:
    address, grace, bind, *command = sys.argv[1:]
    return Guard(address, float(grace), bind == "bind").run(command)


class Guard:
    """Runs the command of one rank and reports to the job.

    On another host the job cannot be reached: then lines go to the guard's own
    output, tagged, and a failed rank's guard sleeps for the grace.
    """

    def __init__(self, address: str, grace: float, bind: bool) -> None:
        self.rank = variable("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
        self.grace = grace
        self.bind = bind
        self.socket: socket.socket | None = socket.socket(socket.AF_UNIX)
        try:
            self.socket.connect(address)
        except OSError:
            self.socket = None
        self.send(HELLO, str(self.rank).encode())

    def run(self, command: list[str]) -> int:
        if self.bind:
            take_cores()
        try:
            child = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                close_fds=False,  # MPICH's ranks speak to mpirun through an open file
                preexec_fn=die_with_guard,
            )
        except OSError as error:
            self.send(ERR, f"cannot start {command[0]}: {error.strerror}".encode())
            return self.finish(127)
        self.copy(child)
        return self.finish(child.wait())

    def copy(self, child: subprocess.Popen[bytes]) -> None:
        """Send the child's lines, obey the job's orders, until the child is done."""
        selector = selectors.DefaultSelector()
        parts: dict[IO[bytes], bytes] = {}
        for stream, kind in ((child.stdout, OUT), (child.stderr, ERR)):
            assert stream is not None
            parts[stream] = b""
            selector.register(stream, selectors.EVENT_READ, kind)
        if self.socket is not None:
            selector.register(self.socket, selectors.EVENT_READ)
        while parts:
            ready = selector.select(timeout=0.5)
            for key, _ in ready:
                if key.fileobj is self.socket:
                    if not self.obey(child):
                        selector.unregister(key.fileobj)
                    continue
                stream = key.fileobj
                data = os.read(key.fd, 1 << 16)
                *lines, parts[stream] = (parts[stream] + data).split(b"\n")
                if not data:
                    lines = [parts[stream]] if parts[stream] else []
                    selector.unregister(stream)
                    del parts[stream]
                for line in lines:
                    self.send(key.data, line)
            if not ready and child.poll() is not None:
                return  # a grandchild still holds the output open

    def obey(self, child: subprocess.Popen[bytes]) -> bool:
        assert self.socket is not None
        try:
            orders = self.socket.recv(16)
        except OSError:
            orders = b""
        if DUMP in orders:
            child.send_signal(signal.SIGABRT)  # Python's fault handler shows the stack
        if KILL in orders or not orders:  # no orders: the job itself is gone
            child.kill()
        return bool(orders)

    def finish(self, code: int) -> int:
        code = 128 - code if code < 0 else code
        self.send(EXIT, str(code).encode())
        if code and self.socket is None:
            time.sleep(self.grace)
        elif code and self.socket is not None:
            # As long as this guard lives, mpirun leaves the other ranks alone.
            with contextlib.suppress(OSError):
                while (orders := self.socket.recv(16)) and RELEASE not in orders:
                    pass
        return code

    def send(self, kind: bytes, payload: bytes) -> None:
        if self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.sendall(HEADER.pack(kind, len(payload)) + payload)
        elif kind in (OUT, ERR):
            stream = sys.stdout if kind == OUT else sys.stderr
            text = payload.decode(errors="replace")
            print(f"[rank {self.rank}] {text}", file=stream, flush=True)


def take_cores() -> None:
    """Bind to this rank's share of the host's cores, if all can have one."""
    rank = variable("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK")
    size = variable("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")
    cores = sorted(os.sched_getaffinity(0))
    if rank is not None and size is not None and 1 < size <= len(cores):
        share = len(cores) // size
        os.sched_setaffinity(0, cores[rank * share : (rank + 1) * share])


def die_with_guard() -> None:
    """In the child: end when the guard ends, and leave no core file behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def variable(*names: str) -> int | None:
    for name in names:
        if name in os.environ:
            return int(os.environ[name])
    return None


if __name__ == "__main__":
    sys.exit(main())
