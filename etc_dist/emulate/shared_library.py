"""Generated source -> shared library for the CPU, by clang of the ziglang package."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from platform import machine
from tempfile import NamedTemporaryFile, TemporaryDirectory

from etc_dist.cache import Cache, Entry, sha256
from etc_dist.codegen import Source
from etc_dist.errors import BuildError
from etc_dist.runtime.build import refuse_missing
from etc_dist.runtime.build_advice import advice, errors_of
from etc_dist.runtime.includes import headers
from etc_dist.settings import MAX_SECONDS

INCLUDE = Path(__file__).parent / "include"
FLAGS = (
    *("-x", "c++", "-std=c++20", "-w", "-fPIC", "-g0"),
    *("-fno-exceptions", "-fno-rtti", "-fno-strict-aliasing", "-fno-sanitize=all"),
    "-fstack-clash-protection",  # each page of a stack is touched, so also its guard
    "-mcpu=baseline",  # kept libraries are loaded on other machines, too
)
LEFT_OUT = (
    *("lsr", "cgp", "machine-cse", "machine-sink", "peephole", "copyprop"),
    "block-placement",
)
"""Passes of the code generator, which come after the calls for accesses."""
NOT_OPTIMIZED = (
    *("ipsccp", "sccp", "called-value-propagation", "globalopt", "bdce", "adce"),
    *("reassociate", "licm", "memcpyopt", "vector-combine", "float2int"),
    *("loop-load-elim", "tailcallelim", "rpo-function-attrs"),
)
"""Passes before the calls for accesses. None of them adds an access or splits a copy of
a structure, so without them no fewer accesses are checked."""
PROGRAM_FLAGS = (
    *FLAGS,
    *("-O1", "-Xclang", "-O1"),  # zig takes -O1 for -O2
    # Accesses of vectorized loops, and of loops turned into memset, are not checked.
    *("-fno-vectorize", "-fno-slp-vectorize"),
    *("-fno-builtin-memcpy", "-fno-builtin-memmove", "-fno-builtin-memset"),
    # Less is inlined, instructions are selected faster, and some passes after that are
    # left out: a large program compiles in two thirds of the time, and runs as fast.
    *("-mllvm", "-inline-threshold=50", "-mllvm", "-inlinehint-threshold=50"),
    *("-mllvm", "-fast-isel"),
    *(part for name in LEFT_OUT for part in ("-mllvm", f"-disable-{name}")),
    *("-mllvm", f"-opt-disable={','.join(NOT_OPTIMIZED)}"),
    # No exception unwinds a stack.
    *("-fno-asynchronous-unwind-tables", "-fno-unwind-tables"),
    # Calls a function before each load and store.
    *("-Xclang", "-fsanitize-coverage-type=1"),
    *("-Xclang", "-fsanitize-coverage-trace-loads"),
    *("-Xclang", "-fsanitize-coverage-trace-stores"),
)

# Without the C library, its start files and the compiler's own library, which zig would
# build first, in 25 s: the process that loads a program has what it needs of them.
LIBRARIES = ("-nostdlib",)


def compile_library(source: Source, kernels: Path, store: Cache) -> ctypes.CDLL:
    """The program as a library, compiled once for each content of source, headers,
    flags and compiler, and loaded once a process."""
    _compiler()
    refuse_missing(source, kernels)
    key = _key(source, kernels)
    if key not in _libraries:
        entry, _ = store.fetch(
            "libraries",
            key,
            lambda: _compile(source, kernels),
            fits=lambda entry: "library" in entry.files,
            limit=MAX_SECONDS,
        )
        # The program's functions of numbers are those of this library.
        ctypes.CDLL("libm.so.6", ctypes.RTLD_GLOBAL)
        with NamedTemporaryFile(suffix=".so") as file:
            file.write(entry.files["library"])
            file.flush()
            _libraries[key] = ctypes.CDLL(file.name)
    return _libraries[key]


_libraries: dict[str, ctypes.CDLL] = {}
"""The libraries of this process, which are never unloaded."""


def _key(source: Source, kernels: Path) -> str:
    """A hash of all that a library depends on."""
    files = sorted(INCLUDE.rglob("*.*"))
    own_texts = {str(path.relative_to(INCLUDE)): path.read_text() for path in files}
    # The headers that INCLUDE replaces do not count.
    texts = headers(source, kernels) | own_texts
    flags = (*PROGRAM_FLAGS, *LIBRARIES)
    parts = (source.text, flags, machine(), version("ziglang"), [*texts])
    digests = [sha256(t.encode(errors="surrogateescape")) for t in texts.values()]
    return sha256(repr((parts, digests)).encode(errors="surrogateescape"))[:32]


def _compile(source: Source, kernels: Path) -> Entry:
    with TemporaryDirectory() as folder:
        text, prelude, run, library = _files(folder)
        common = _compile_common(source, kernels)
        for path, content in zip((prelude, run), common, strict=True):
            path.write_bytes(content)
        text.write_text(f'#include "cuda.h"\n{source.text}\n#include "entry.h"\n')
        includes = _includes(kernels)
        includes += sorted({f"-I{path.parent}" for path in source.sources})
        # `-x none`: the flags have the language of all files after it.
        objects = ["-x", "none", str(run), "-shared", *LIBRARIES, "-o", str(library)]
        inputs = ["-include-pch", str(prelude), str(text)]
        _run([*PROGRAM_FLAGS, *includes, *inputs, *objects], source)
        return Entry({}, {"library": library.read_bytes()})


_common: dict[str, tuple[bytes, bytes]] = {}
"""What `_compile_common` has compiled in this process."""


def _compile_common(source: Source, kernels: Path) -> tuple[bytes, bytes]:
    """prelude.h and run.cpp, which all programs have in common, compiled once for each
    content. zig keeps them, too, but takes a tenth of a program's time to find them."""
    prelude = replace(source, text='#include "worker/worker.cuh"', sources=())
    key = _key(prelude, kernels) + str(kernels)  # a .pch has the paths of its headers
    if key not in _common:
        with TemporaryDirectory() as folder:
            _, pch, run, _ = _files(folder)
            header = ["-x", "c++-header", "-Xclang", "-fno-pch-timestamp"]
            header += [str(INCLUDE / "prelude.h"), "-o", str(pch)]
            _run([*PROGRAM_FLAGS, *_includes(kernels), *header], source)
            code = ["-O2", "-c", str(INCLUDE / "run.cpp"), "-o", str(run)]
            _run([*FLAGS, *code], source)
            _common[key] = pch.read_bytes(), run.read_bytes()
    return _common[key]


def _files(folder: str) -> Iterator[Path]:
    names = "a.cpp", "prelude.pch", "run.o", "a.so"
    return (Path(folder, name) for name in names)


def _includes(kernels: Path) -> list[str]:
    # NOTE: INCLUDE comes first: its ptx/ replaces that of the kernels.
    return [f"-I{INCLUDE}", f"-I{kernels}"]


def _run(arguments: list[str], source: Source) -> None:
    process = subprocess.run([_compiler(), "cc", *arguments], capture_output=True)
    if process.returncode != 0:
        log = process.stderr.decode(errors="replace")
        raise BuildError(
            "the source did not compile for the emulator",
            where=source.title,
            wanted=f"C++20 with the CUDA functions of {INCLUDE}",
            got=errors_of(source.text, log)[:4000] or f"exit code {process.returncode}",
            fix=advice(source.text, log),
            source=source.text,
        )


def _compiler() -> Path:
    """The program, which starts in half the time of `python -m ziglang`."""
    package = find_spec("ziglang")
    if package is None or package.origin is None:
        raise BuildError(
            "the emulator needs a C++ compiler, which is not installed",
            where="etc_dist.emulate",
            wanted="the package ziglang, version 0.17 or later",
            got=f"none in {sys.prefix}",
            fix="pip install 'ziglang>=0.17', or install etc_dist with the extra "
            "[emulate]; in a checkout: pip install -e '.[emulate]'",
        )
    return Path(package.origin).with_name("zig")
