"""Two ranks of the transport in one process: what arrives, and when.

two_ranks.py TRANSPORT DRIVER DELAY_US GBS: prints the microseconds until a put of 1 MB
with a signal has arrived, until 16 more signals have, and until all are
acknowledged."""

import ctypes
import sys
import threading
import time
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_int, c_uint64, c_void_p

BYTES, SIGNALS = 1 << 20, 16
PUT, ADD, SIZE = 1, 4, 8


class Bootstrap(Structure):
    pass


GATHER = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, POINTER(Bootstrap))
Bootstrap._fields_ = [(f"n{n}", c_int) for n in range(5)] + [("allgather", GATHER)]


class Verb(Structure):
    _fields_ = [("op", c_int), ("a", c_int), ("b", c_int), ("stream", c_void_p)]


class Memory(Structure):
    _fields_ = [("pointer", c_void_p), ("offset", c_uint64), ("handle", c_void_p)]


class Elements(Structure):
    _fields_ = [("count", c_uint64), ("size", c_int), ("a", c_uint64), ("b", c_uint64)]


class AtomicVerb(Structure):
    _fields_ = [("op", c_int), ("a", c_int), ("b", c_int), ("c", c_int)]


class Atomic(Structure):
    _fields_ = [("memory", Memory), ("flag", c_uint64)]
    _fields_ += [(n, c_void_p) for n in ("returned", "at_value", "at_compare")]
    _fields_ += [("value", c_uint64), ("compare", c_uint64), ("handle", c_void_p)]


class AtomicElements(Structure):
    _fields_ = [("type", c_int), ("size", c_int)]


class Transport(Structure):
    _fields_ = [("api", c_int), ("type", c_int), ("capabilities", c_void_p)]
    _fields_ += [("ops", c_void_p * 14), ("bootstrap", POINTER(Bootstrap))]
    _fields_ += [(n, c_void_p) for n in ("state", "shared", "cache", "devices")]
    _fields_ += [("attributes", c_int), ("count", c_int), ("flags", ctypes.c_bool * 3)]
    _fields_ += [("heap", c_void_p), ("log2", c_uint64), ("largest", c_uint64)]
    _fields_ += [("endian", c_int), ("index", c_int), ("rank", c_int), ("ranks", c_int)]


CONNECT, PROGRESS, TRANSFER, ATOMIC, QUIET = 1, 6, 7, 8, 10


def main(path: str, driver: str, delay: float, gbs: float) -> None:
    ctypes.CDLL(driver, mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(path)
    places, times = [b"", b""], {}

    def note_time() -> None:
        times["begun"] = time.monotonic()

    meet = threading.Barrier(2, note_time)
    source = ctypes.create_string_buffer(bytes(range(256)) * (BYTES // 256), BYTES)
    target, words = ctypes.create_string_buffer(BYTES), (c_uint64 * 2)()

    def rank_of(rank: int) -> None:
        handle = POINTER(Transport)()
        library.nvshmemt_init(byref(handle), None, 0)
        transport = handle.contents

        def gather(address: int, all: int, size: int, _: object) -> int:
            places[rank] = ctypes.string_at(address, size)
            meet.wait()
            ctypes.memmove(all, b"".join(places), 2 * size)
            return 0

        def op(number: int, *types: object) -> object:
            return CFUNCTYPE(c_int, POINTER(Transport), *types)(transport.ops[number])

        callback = GATHER(gather)
        bootstrap = Bootstrap(0, 0, 0, 0, 0, callback)
        transport.bootstrap = ctypes.pointer(bootstrap)
        transport.rank, transport.ranks = rank, 2
        assert op(CONNECT, c_void_p, c_int)(handle, None, 0) == 0
        progress, quiet = op(PROGRESS), op(QUIET, c_int, c_int)
        library.far_transport_set(*map(ctypes.c_double, (delay, gbs, 0.0)))
        meet.wait()
        begin = times["begun"]
        if rank == 0:
            until = [1, 1 + SIGNALS]
            while until:
                progress(handle)
                if words[0] >= until[0]:
                    times[f"{until.pop(0)} signals"] = time.monotonic() - begin
            quiet(handle, 1, 0)
        else:
            transfer = op(
                TRANSFER, c_int, Verb, POINTER(Memory), POINTER(Memory), Elements, c_int
            )
            atomic = op(
                ATOMIC,
                *(c_int, c_void_p, AtomicVerb, POINTER(Atomic), AtomicElements, c_int),
            )
            here, there = (
                Memory(ctypes.addressof(buffer), 0, None) for buffer in (source, target)
            )
            size = Elements(BYTES, 1, 1, 1)
            transfer(
                handle, 0, Verb(PUT, 1, 0, None), byref(there), byref(here), size, 0
            )
            word = Memory(ctypes.addressof(words), 0, None)
            add = Atomic(memory=word, value=1)
            for _ in range(1 + SIGNALS):
                verb, kind = AtomicVerb(ADD, 0, 1, 0), AtomicElements(0, SIZE)
                atomic(handle, 0, None, verb, byref(add), kind, 0)
            quiet(handle, 0, 0)
            times["quiet"] = time.monotonic() - begin

        meet.wait()

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.raw == source.raw and words[0] == 1 + SIGNALS
    print(
        *(
            f"{times[n] * 1e6:.0f}"
            for n in ("1 signals", f"{1 + SIGNALS} signals", "quiet")
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(float, sys.argv[3:]))
