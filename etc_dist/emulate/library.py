"""Generated source -> shared library for the CPU, by clang of the ziglang package."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from platform import machine
from tempfile import TemporaryDirectory

from etc_dist.cache import sha256
from etc_dist.codegen import Source
from etc_dist.errors import BuildError
from etc_dist.runtime.build import refuse_missing
from etc_dist.runtime.build_advice import advice, errors_of

INCLUDE = Path(__file__).parent / "include"
FLAGS = (
    *("-x", "c++", "-std=c++20", "-w", "-fPIC", "-g0"),
    *("-fno-exceptions", "-fno-rtti", "-fno-strict-aliasing", "-fno-sanitize=all"),
    "-fstack-clash-protection",  # each page of a stack is touched, so also its guard
    "-mcpu=baseline",  # kept libraries are loaded on other machines, too
)
PROGRAM_FLAGS = (
    *FLAGS,
    *("-O1", "-Xclang", "-O1"),  # zig takes -O1 for -O2
    # Accesses of vectorized loops, and of loops turned into memset, are not checked.
    *("-fno-vectorize", "-fno-slp-vectorize"),
    *("-fno-builtin-memcpy", "-fno-builtin-memmove", "-fno-builtin-memset"),
    # Less is inlined, and instructions are selected faster: a large program compiles
    # in two thirds of the time, and runs as fast.
    *("-mllvm", "-inline-threshold=50", "-mllvm", "-inlinehint-threshold=50"),
    *("-mllvm", "-fast-isel"),
    # Calls a function before each load and store.
    *("-Xclang", "-fsanitize-coverage-type=1"),
    *("-Xclang", "-fsanitize-coverage-trace-loads"),
    *("-Xclang", "-fsanitize-coverage-trace-stores"),
)


def compile_library(source: Source, kernels: Path, folder: Path | None) -> ctypes.CDLL:
    """The program as a library. With `folder`, a library of the same text, flags and
    compiler that is already there is loaded, and a new one is kept there."""
    _require_compiler()
    refuse_missing(source, kernels)
    with TemporaryDirectory(dir=folder) as temporary:
        text, library = Path(temporary, "program.cpp"), Path(temporary, "program.so")
        text.write_text(f'#include "cuda.h"\n{source.text}\n#include "entry.h"\n')
        # NOTE: INCLUDE comes first: its ptx/ replaces that of the kernels.
        users = sorted({path.parent for path in source.sources})
        includes = [f"-I{path}" for path in (INCLUDE, kernels, *users)]
        command = [*PROGRAM_FLAGS, *includes, str(text)]
        if folder is None:
            _compile(command, library, source)
            return ctypes.CDLL(str(library))
        kept = folder / f"{_digest(_run([*command, '-E', '-P'], source))}.so"
        if not _is_whole(kept):
            _compile(command, library, source)
            _keep(library, kept)
    return ctypes.CDLL(str(kept))


def _keep(library: Path, kept: Path) -> None:
    """Move a library to its place, at once: other processes may build the same."""
    with library.open("rb") as file:
        os.fsync(file.fileno())
    kept.with_suffix(".sha256").write_text(sha256(library.read_bytes()))
    library.replace(kept)


def _is_whole(kept: Path) -> bool:
    """Whether a library is there, of this user, as it was kept: one that a power loss
    cut off would end the process."""
    try:
        expected = kept.with_suffix(".sha256").read_text()
        is_own = kept.stat().st_uid == os.geteuid()
        return is_own and sha256(kept.read_bytes()) == expected
    except FileNotFoundError:
        return False


def _compile(command: list[str], library: Path, source: Source) -> None:
    # By a command that is the same for all programs: zig keeps its result.
    run = str(library.with_name("run.o"))
    _run([*FLAGS, "-O2", "-c", str(INCLUDE / "run.cpp"), "-o", run], source)
    # `-x none`: the flags have the language of all files after it.
    _run([*command, "-x", "none", run, "-shared", "-o", str(library)], source)


def _digest(text: bytes) -> str:
    """A hash of all that a library depends on. `text` is the program with all files it
    includes; those of run.cpp are in the same folder."""
    build = "\n".join((*PROGRAM_FLAGS, machine(), version("ziglang")))
    files = [path.read_bytes() for path in sorted(INCLUDE.glob("*.*"))]
    return hashlib.sha256(b"\n".join([build.encode(), text, *files])).hexdigest()[:24]


def _run(arguments: list[str], source: Source) -> bytes:
    command = [sys.executable, "-m", "ziglang", "cc", *arguments]
    done = subprocess.run(command, capture_output=True)
    if done.returncode != 0:
        log = done.stderr.decode(errors="replace")
        raise BuildError(
            "the source did not compile for the emulator",
            where=source.title,
            wanted=f"C++20 with the CUDA functions of {INCLUDE}",
            got=errors_of(source.text, log)[:4000] or f"exit code {done.returncode}",
            fix=advice(source.text, log),
            source=source.text,
        )
    return done.stdout


def _require_compiler() -> None:
    if find_spec("ziglang") is None:
        raise BuildError(
            "the emulator needs a C++ compiler, which is not installed",
            where="etc_dist.emulate",
            wanted="the package ziglang, version 0.13 or later",
            got=f"none in {sys.prefix}",
            fix="pip install 'ziglang>=0.13', or install etc_dist with the extra "
            "[emulate]; in a checkout: pip install -e '.[emulate]'",
        )
