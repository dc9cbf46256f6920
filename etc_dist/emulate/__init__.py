"""The emulator: a graph's CUDA bodies run on the CPU, for tests without a GPU.

A C++ compiler compiles the generated source, the bodies and `kernels/` for the CPU.
Only the files of `kernels/ptx` are replaced. All threads of all ranks run as fibers of
one host thread, in an order that a seed decides. Every access to memory is checked: it
must be in bounds, aligned, and ordered with all conflicting accesses.

    emulator = Emulator(graph)
    outputs = emulator.run([{"x": x, "w": w}], {"rows": 64, "n": 32, "k": 16})

    emulator.py        Emulator: compiles a graph, runs it on arrays of all ranks
    rank_memory.py     the memory of all ranks, and their argument blocks
    shared_library.py  the C++ compiler: source to shared library
    reports.py         reports of the emulator as EmulationError
    places.py          addresses in them, as elements of tensors
    include/           CUDA C++ and PTX for the host compiler, and the checks:
                  fibers.h, scheduler.h    threads, and which of them runs next
                  async_copies.h           bulk copies, stores and mbarriers
                  tensor_cores.h           the multiplications of wgmma
                  memory.h                 arrays, and every access to them
                  happens_before.h         vector clocks: which accesses are ordered
                  cuda.h, cuda_math.h      built-in variables and functions
                  ptx/                     PTX instructions
                  entry.h, run.cpp         the entry points of program and library"""

from etc_dist.emulate.emulator import Emulator

__all__ = ["Emulator"]
