"""Source -> cubin, by NVRTC and without a GPU; compiled once, cached by content."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from etc_dist.codegen import Source, generate
from etc_dist.errors import BuildError
from etc_dist.runtime.build_advice import advice
from etc_dist.schedule import Plan
from etc_dist.settings import Settings

ARCH = "sm_90a"
OPTIONS = ("--std=c++20", "-default-device", "--ptxas-options=-v")
SLOW_SECONDS = 1.0
"""A build that takes longer says so."""


@dataclass(frozen=True)
class Cubin:
    """A compiled program in the cache, with what the compiler said of it."""

    path: Path
    registers: int
    spill_bytes: int
    stack_bytes: int
    remarks: tuple[str, ...]
    seconds: float
    cached: bool


def kernels_folder() -> Path:
    """The device code: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / "worker" / "worker.cuh").exists():
            return folder
    raise BuildError(
        "the device code is missing",
        where=str(package),
        wanted="a folder kernels/ with worker/worker.cuh in it",
        got="none",
        fix="reinstall etc_dist",
    )


def build(source: Source, settings: Settings, arch: str = ARCH) -> Cubin:
    """The cubin of `source`, compiled at most once for each content of source, device
    code, options and compiler. Safe when many ranks build the same thing at once."""
    _refuse_missing(source)
    includes = (kernels_folder(), *sorted({p.parent for p in source.sources}))
    folder = settings.cache / "programs" / _key(source, includes, arch)
    started = time.perf_counter()
    if not (folder / "program.json").exists():
        _compile_into(folder, source, includes, arch)
        cached = False
    else:
        cached = True
    facts = json.loads((folder / "program.json").read_text())
    facts["remarks"] = tuple(facts["remarks"])
    seconds = time.perf_counter() - started
    return Cubin(path=folder / "program.cubin", seconds=seconds, cached=cached, **facts)


def _refuse_missing(source: Source) -> None:
    missing = [str(path) for path in source.sources if not path.is_file()]
    if missing:
        raise BuildError(
            "the source of a device function does not exist",
            where=source.text.splitlines()[0],
            wanted="a .cuh file at each absolute path that is given as source=",
            got=f"no file {', '.join(missing)}",
            fix="write the CUDA body there, or correct source=",
            source=source.text,
        )


def _key(source: Source, includes: Sequence[Path], arch: str) -> str:
    digest = hashlib.sha256()
    digest.update(repr((source.text, arch, OPTIONS, nvrtc_version())).encode())
    kernels, *users = includes
    files = [(kernels, p) for p in sorted(kernels.rglob("*.cuh"))]
    # A user's file can include its neighbours, not whatever lies below them.
    files += [(u, p) for u in users for p in sorted(u.glob("*.cuh"))]
    for folder, file in files:
        digest.update(str(file.relative_to(folder)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:24]


def _compile_into(
    folder: Path, source: Source, includes: Sequence[Path], arch: str
) -> None:
    started = time.perf_counter()
    cubin, log = compile_cubin(source.text, includes, arch)
    seconds = time.perf_counter() - started
    if seconds > SLOW_SECONDS:
        name = source.text.splitlines()[0].removeprefix("// ")
        print(f"etc_dist: compiled {name} in {seconds:.1f} s", file=sys.stderr)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Whole folders appear at once: a rank sees all of a program or nothing of it.
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix="building-"))
    (aside / "program.cu").write_text(source.text)
    (aside / "program.cubin").write_bytes(cubin)
    (aside / "program.log").write_text(log)
    (aside / "program.json").write_text(json.dumps(_facts(log)))
    try:
        os.rename(aside, folder)
    except OSError:
        if not (folder / "program.json").exists():
            raise
        for file in aside.iterdir():
            file.unlink()
        aside.rmdir()


def _facts(log: str) -> dict[str, object]:
    def total(pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, log))

    remarks = [
        line.strip()
        for line in log.splitlines()
        if re.search(r"C75\d\d|warning|setmaxnreg", line)
    ]
    return {
        "registers": total(r"Used (\d+) registers"),
        "spill_bytes": total(r"(\d+) bytes spill"),
        "stack_bytes": total(r"(\d+) bytes stack frame"),
        "remarks": remarks,
    }


@cache
def _nvrtc() -> ctypes.CDLL:
    try:
        from cuda import pathfinder

        found = pathfinder.load_nvidia_dynamic_lib("nvrtc")
        library = ctypes.CDLL(found.abs_path)
    except Exception as error:
        raise BuildError(
            "the compiler NVRTC cannot be loaded",
            where="etc_dist.runtime.build",
            wanted="libnvrtc from the nvidia-cuda-nvrtc package",
            got=str(error).splitlines()[0] if str(error) else repr(error),
            fix="in the checkout of etc_dist: pip install -e '.[cu13]' (or [cu12], or "
            "[compile] without a GPU)",
        ) from error
    library.nvrtcGetErrorString.restype = c_char_p
    return library


@cache
def nvrtc_version() -> tuple[int, int]:
    """The compiler's version, for example (13, 0)."""
    major, minor = c_int(), c_int()
    _nvrtc().nvrtcVersion(byref(major), byref(minor))
    return major.value, minor.value


def compile_cubin(
    text: str, includes: Sequence[Path], arch: str = ARCH
) -> tuple[bytes, str]:
    """Compile `text` to (cubin, log). Raises BuildError with the numbered source."""
    library = _nvrtc()
    handle = c_void_p()
    library.nvrtcCreateProgram(
        byref(handle), text.encode(), b"program.cu", 0, None, None
    )
    options = [f"--gpu-architecture={arch}", *OPTIONS, *(f"-I{p}" for p in includes)]
    values = (c_char_p * len(options))(*[o.encode() for o in options])
    try:
        code = library.nvrtcCompileProgram(handle, len(options), values)
        log = _read(library, handle, "ProgramLog").decode(errors="replace")
        if code:
            raise BuildError(
                "the generated source did not compile",
                where=text.splitlines()[0],
                wanted=f"a cubin for {arch}",
                got=f"{library.nvrtcGetErrorString(code).decode()}\n{log}",
                fix=advice(text, log),
                source=text,
            )
        return _read(library, handle, "CUBIN"), log
    finally:
        library.nvrtcDestroyProgram(byref(handle))


def _read(library: ctypes.CDLL, handle: c_void_p, what: str) -> bytes:
    size = c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(handle, byref(size))
    buffer = ctypes.create_string_buffer(size.value or 1)
    getattr(library, f"nvrtcGet{what}")(handle, buffer)
    return buffer.raw.rstrip(b"\0") if what == "ProgramLog" else buffer.raw


def report(name: str, plan: Plan, arch: str = ARCH) -> dict[str, object]:
    """Compile one plan afresh and say what the compiler made of it."""
    started = time.perf_counter()
    source = generate(plan)
    generated = time.perf_counter() - started
    includes = (kernels_folder(), *sorted({p.parent for p in source.sources}))
    cubin, log = compile_cubin(source.text, includes, arch)
    return {
        "program": name,
        "generate_s": round(generated, 3),
        "compile_s": round(time.perf_counter() - started - generated, 3),
        "cubin_bytes": len(cubin),
        **_facts(log),
    }
