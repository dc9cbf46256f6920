"""The guard of a rank: runs the rank's command between mpirun and launch/mpirun.

It copies the output. After a failure it stays alive while the other ranks report:
mpirun, which would end them at once, sees the failure only after that.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import resource
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, NamedTuple

HEADER = struct.Struct(">cI")  # kind and length of a message to launch/mpirun
HELLO, OUT, ERR, EXIT = b"h", b"o", b"e", b"x"  # kinds of message
SHARED, LEFT = b"s", b"l"  # a file of MPICH's; the rank left without MPI_Finalize
INTERRUPT, DUMP, KILL, RELEASE = b"I", b"D", b"K", b"R"  # orders from launch/mpirun
TERMINATE = b"T"  # such an order, too
INPUT = b"i"  # the answer to rank 0's HELLO, with the standard input as a file

SHARED_PREFIX = "/dev/shm/mpich_shm_"
SEARCH_SECONDS = 0.02  # between two searches for MPICH's file
SETTLE_SECONDS = 1.0  # an MPI_Finalize of all ranks has removed that file by then


def main() -> int:
    address, grace, bind, *command = sys.argv[1:]
    return Guard(address, float(grace), bind == "bind").run(command)


class Guard:
    """Runs the command of one rank and reports to the job.

    On another host the job cannot be reached: then lines go to the guard's own
    output, tagged, and a failed rank's guard sleeps for the grace.
    """

    def __init__(self, address: str, grace: float, bind: bool) -> None:
        self.address = address
        self.rank = variable("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
        self.grace = grace
        self.bind = bind
        self.shared: set[SharedFile] = set()
        self.alone = False  # launch/mpirun has ended
        self.early_orders = b""  # that came before the rank began
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
                # mpirun gives rank 0 an input; that of the others may never end.
                stdin=subprocess.DEVNULL if self.rank else self.receive_input(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                close_fds=False,  # MPICH's ranks use an open file to reach mpirun
                preexec_fn=die_with_guard,
            )
        except OSError as error:
            self.send(ERR, f"cannot start {command[0]}: {error.strerror}".encode())
            return self.finish(127)
        if self.early_orders:
            self.obey(child, self.early_orders)
        self.copy(child)
        return self.finish(child.wait())

    def copy(self, child: subprocess.Popen[bytes]) -> None:
        """Send the child's lines and obey the job's orders until the child ends."""
        selector = selectors.DefaultSelector()
        parts: dict[IO[bytes], list[bytes]] = {}  # of the lines that have not ended
        for stream, kind in ((child.stdout, OUT), (child.stderr, ERR)):
            assert stream is not None
            parts[stream] = []
            selector.register(stream, selectors.EVENT_READ, kind)
        if self.socket is not None:
            selector.register(self.socket, selectors.EVENT_READ)
        searched = 0.0
        while parts:
            is_mpich = "PMI_RANK" in os.environ and not self.shared
            ready = selector.select(timeout=SEARCH_SECONDS if is_mpich else 0.5)
            if is_mpich and time.monotonic() > searched + SEARCH_SECONDS:
                self.find_shared(child.pid)
                searched = time.monotonic()
            for key, _ in ready:
                if key.fileobj is self.socket:
                    if not self.obey(child, self.receive()):
                        selector.unregister(key.fileobj)
                    continue
                stream = key.fileobj
                data = os.read(key.fd, 1 << 16)
                *ends, remainder = data.split(b"\n")
                for end in ends:
                    self.send(key.data, b"".join([*parts[stream], end]))
                    parts[stream].clear()
                if remainder:
                    parts[stream].append(remainder)
                if not data:
                    if parts[stream]:
                        self.send(key.data, b"".join(parts[stream]))
                    selector.unregister(stream)
                    del parts[stream]
            if not ready and child.poll() is not None:
                return  # a grandchild still holds the output open

    def find_shared(self, pid: int) -> None:
        """Report MPICH's file that the rank has mapped to the job.

        The mapping proves that it is this job's; a killed rank cannot remove it.
        """
        for file in shared_files(pid):
            self.shared.add(file)
            self.send(SHARED, f"{file.inode} {file.path}".encode())

    def obey(self, child: subprocess.Popen[bytes], orders: bytes) -> bool:
        if INTERRUPT in orders:
            child.send_signal(signal.SIGINT)
        if TERMINATE in orders:
            child.send_signal(signal.SIGTERM)
        if DUMP in orders:
            child.send_signal(signal.SIGABRT)  # Python's fault handler shows the stack
        if KILL in orders or not orders:  # no orders: launch/mpirun has ended
            child.kill()
        return bool(orders)

    def receive_input(self) -> int | None:
        """The standard input of launch/mpirun, or None for that of this process. Keeps
        the orders that come before it."""
        files: list[int] = []
        message = None
        with contextlib.suppress(OSError):
            while self.socket is not None and message not in (INPUT, b""):
                message, files, *_ = socket.recv_fds(self.socket, len(INPUT), 1)
                self.early_orders += message.removesuffix(INPUT)
        return files[0] if files else None

    def receive(self) -> bytes:
        assert self.socket is not None
        try:
            orders = self.socket.recv(16)
        except OSError:
            orders = b""
        self.alone = not orders
        return orders

    def finish(self, code: int) -> int:
        code = 128 - code if code < 0 else code
        self.send(EXIT, str(code).encode())
        has_processes = not code and self.has_left()
        if has_processes:
            self.send(LEFT, b"")
        if code and self.socket is None:
            time.sleep(self.grace)
        elif (code or has_processes) and self.socket is not None:
            # mpirun does not end the other ranks while this guard lives.
            while (orders := self.receive()) and RELEASE not in orders:
                pass
        if self.alone or self.socket is None:
            remove(self.shared)
        if self.alone:
            shutil.rmtree(os.path.dirname(self.address), ignore_errors=True)
        return code

    def has_left(self) -> bool:
        """Whether the rank ended without MPI_Finalize, which removes MPICH's file."""
        until = time.monotonic() + SETTLE_SECONDS
        while any(file.is_there() for file in self.shared):
            if time.monotonic() > until:
                return True
            time.sleep(0.02)
        return False

    def send(self, kind: bytes, payload: bytes) -> None:
        if self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.sendall(HEADER.pack(kind, len(payload)) + payload)
        elif kind in (OUT, ERR):
            show(self.rank, kind, payload)


def show(rank: int | None, kind: bytes, line: bytes) -> None:
    """Write a line of a rank as it is: it may have another encoding than ours."""
    stream = sys.stdout if kind == OUT else sys.stderr
    tag = f"[rank {rank}] ".encode()
    if stream is not None:
        # Lines of an abort are tagged already.
        stream.buffer.write(tag + line.removeprefix(tag) + b"\n")
        stream.buffer.flush()


class SharedFile(NamedTuple):
    """A file that MPICH's ranks of one host share until MPI_Finalize removes it."""

    inode: int
    path: str

    def is_there(self) -> bool:
        try:
            return os.stat(self.path).st_ino == self.inode
        except OSError:
            return False


def shared_files(pid: int) -> set[SharedFile]:
    """The files of MPICH that a process has mapped."""
    if not glob.glob(f"{SHARED_PREFIX}*"):
        return set()  # faster than reading the maps
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return set()
    rows = (line.split(maxsplit=5) for line in maps.splitlines())
    return {
        SharedFile(int(row[4]), row[5])
        for row in rows
        if row[-1].startswith(SHARED_PREFIX) and not row[-1].endswith(" (deleted)")
    }


def remove(files: set[SharedFile]) -> None:
    for file in files:
        if file.is_there():
            with contextlib.suppress(OSError):
                os.unlink(file.path)


def take_cores() -> None:
    """Bind to this rank's share of the host's cores, if all can have one."""
    rank = variable("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK")
    size = variable("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")
    cores = sorted(os.sched_getaffinity(0))
    if rank is not None and size is not None and 1 < size <= len(cores):
        share = len(cores) // size
        os.sched_setaffinity(0, cores[rank * share : (rank + 1) * share])


def die_with_guard() -> None:
    """In the child: end when the guard ends, and write no core file."""
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
