"""Source -> cubin, by NVRTC and without a GPU; compiled once, cached by content."""

from __future__ import annotations

import ctypes
import hashlib
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from etc_dist.cache import Cache, Entry
from etc_dist.codegen import Source, generate, title_of
from etc_dist.codegen.cuda import ENTRY, QUIET
from etc_dist.errors import ArgumentError, BuildError
from etc_dist.messages import show_message
from etc_dist.runtime import far_link
from etc_dist.runtime.build_advice import advice, errors_of
from etc_dist.runtime.bundle import FACTS, Bundle, is_program
from etc_dist.runtime.includes import headers
from etc_dist.schedule import Plan
from etc_dist.settings import Settings

ARCH = "sm_90a"
OPTIONS = (
    "--std=c++20",
    "-default-device",
    "--ptxas-options=-v",
    "--no-source-include",  # headers are given by name
)
SLOW_SECONDS = 1.0
"""A longer compilation is reported on stderr."""


@dataclass(frozen=True)
class Cubin:
    """A compiled program, with the compiler's report on it."""

    code: bytes
    registers: int
    spill_bytes: int
    stack_bytes: int
    remarks: tuple[str, ...]
    seconds: float
    cached: bool


def expect_arch(arch: object, where: str) -> None:
    """ArgumentError unless `arch` is the name of a GPU architecture."""
    if not isinstance(arch, str) or not re.fullmatch(r"sm_\d{2,3}[af]?", arch):
        raise ArgumentError(
            "argument target is not a GPU architecture",
            where=where,
            wanted=f"a name such as {ARCH!r}",
            got=f"target = {arch!r}",
            fix=f"use {ARCH!r}, which H100 and H200 run",
        )


def kernels_folder() -> Path:
    """The device code: in the installed package, or next to it in a checkout. Raises
    BuildError if there is none."""
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


def build(
    source: Source, settings: Settings, arch: str = ARCH, bundle: Bundle | None = None
) -> Cubin:
    """The cubin of `source`, compiled once for each content of source, headers, options
    and compiler. If several ranks build it, one of them compiles. With a bundle, that
    of the bundle: nothing is compiled, and no compiler is loaded."""
    kernels = kernels_folder()
    refuse_missing(source, kernels)
    start = time.perf_counter()
    header_texts = headers(source, kernels)
    if bundle is not None:
        key = _key(source, header_texts, arch, bundle.compiler)
        entry, is_cached = bundle.program(key, source.title), True
    else:
        entry, is_cached = Cache(settings.cache).fetch(
            "programs",
            _key(source, header_texts, arch, compiler_version()),
            lambda: _compile(source, header_texts, arch, settings),
            fits=is_program,
            limit=settings.world_limit / 2,  # before other ranks time out
        )
    facts = {name: entry.facts[name] for name in FACTS}
    facts["remarks"] = tuple(facts["remarks"])
    seconds = time.perf_counter() - start
    return Cubin(entry.files["cubin"], seconds=seconds, cached=is_cached, **facts)


def for_bundle(source: Source, settings: Settings, arch: str) -> tuple[str, Entry]:
    """The key and the content of a bundle's program, compiled if need be."""
    cubin = build(source, settings, arch)
    key = _key(source, headers(source, kernels_folder()), arch, compiler_version())
    facts = {"title": source.title, **{name: getattr(cubin, name) for name in FACTS}}
    return key, Entry(facts, {"cubin": cubin.code})


def refuse_missing(source: Source, kernels: Path) -> None:
    """Raise BuildError if the file of a device function does not exist."""
    names = re.findall(r'^#include "([^"]+)"$', source.text, re.MULTILINE)
    missing = [name for name in names if not (kernels / name).is_file()]
    if missing:
        raise BuildError(
            "the source of a device function does not exist",
            where=source.title,
            wanted="source=: an absolute path of a .cuh file, or the name of a file in "
            f"{kernels}",
            got=f"no file {', '.join(missing)}",
            fix="write the CUDA body there; for a file next to the Python file that "
            "names it, source=Path(__file__).with_name(...)",
            source=source.text,
        )


def _key(
    source: Source, header_texts: Mapping[str, str], arch: str, compiler: str
) -> str:
    field_names = [field.name for field in fields(Cubin)]
    if source.has_far:
        compiler += far_link.versions(kernels_folder())
    parts = (source.text, arch, OPTIONS, compiler, field_names, sorted(header_texts))
    digest = hashlib.sha256(repr(parts).encode(errors="surrogateescape"))
    for _, text in sorted(header_texts.items()):
        digest.update(hashlib.sha256(_encoded(text)).digest())
    return digest.hexdigest()[:32]


def _compile(
    source: Source, header_texts: Mapping[str, str], arch: str, settings: Settings
) -> Entry:
    start = time.perf_counter()
    if source.has_far:
        cubin, log = _compile_far(source, header_texts, arch, settings)
    else:
        cubin, log = compile_cubin(source.text, header_texts, arch)
    seconds = time.perf_counter() - start
    if seconds > SLOW_SECONDS:
        show_message(f"etc_dist: compiled {source.title} in {seconds:.1f} s\n")
    files = {"cu": source.text.encode(), "cubin": cubin, "log": log.encode()}
    return Entry(_facts(log), files)


def _facts(log: str) -> dict[str, object]:
    def total(pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, log))

    remarks = [
        line.strip()
        for line in log.splitlines()
        if re.search(r"C75\d\d|warning|setmaxnreg", line)
        and "-diag-suppress" not in line  # NVRTC's hint after any warnings
    ]
    calls = set(re.findall(r"Function properties for (\S+)", log)) - {ENTRY, QUIET}
    remarks += [f"not inlined: {name}" for name in sorted(calls)]
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", log)), default=0),
        "spill_bytes": total(r"(\d+) bytes spill"),
        "stack_bytes": total(r"(\d+) bytes stack frame"),
        "remarks": remarks,
    }


@cache
def _nvrtc() -> ctypes.CDLL:
    extra = "[cu13]' (or [cu12], or [compile] without a GPU)"
    library = far_link.load_library("nvrtc", extra)
    library.nvrtcGetErrorString.restype = c_char_p
    return library


@cache
def nvrtc_version() -> tuple[int, int]:
    """The compiler's version, for example (13, 0)."""
    major, minor = c_int(), c_int()
    _nvrtc().nvrtcVersion(byref(major), byref(minor))
    return major.value, minor.value


@cache
def compiler_version() -> str:
    """The compiler's release, patch and build, as it writes them into its output."""
    text, _ = _run("", {}, [f"--gpu-architecture={ARCH}"], "PTX")
    lines = text.decode(errors="replace").splitlines()
    return "\n".join(line for line in lines if line.startswith("//"))


def compile_cubin(
    text: str, header_texts: Mapping[str, str], arch: str = ARCH
) -> tuple[bytes, str]:
    """Compile `text`, which includes these headers by name, to (cubin, log). Raises
    BuildError with the numbered source."""
    return _run(text, header_texts, [f"--gpu-architecture={arch}", *OPTIONS], "CUBIN")


def _compile_far(
    source: Source, header_texts: Mapping[str, str], arch: str, settings: Settings
) -> tuple[bytes, str]:
    """As `compile_cubin`, with the transport to far ranks."""
    virtual = f"--gpu-architecture={arch.replace('sm', 'compute')}"

    def compile(text: str, texts: Mapping[str, str], options: Sequence[str]) -> bytes:
        return _run(text, texts, [virtual, *far_link.OPTIONS, *options], "LTOIR")[0]

    store, kernels = Cache(settings.cache), kernels_folder()
    version = compiler_version()
    bridge = far_link.compile_bridge(compile, kernels, version, arch, store)
    own_options = [o for o in OPTIONS if o.startswith(("--std", "--no-source"))]
    program = compile(source.text, header_texts, own_options)
    return far_link.link({"program": program, "nvshmem": bridge}, arch, source.title)


def _run(
    text: str, header_texts: Mapping[str, str], options: Sequence[str], output: str
) -> tuple[bytes, str]:
    library = _nvrtc()
    handle = c_void_p()
    names, texts = _strings(header_texts), _strings(header_texts.values())
    library.nvrtcCreateProgram(
        byref(handle), _encoded(text), b"program.cu", len(header_texts), texts, names
    )
    try:
        code = library.nvrtcCompileProgram(handle, len(options), _strings(options))
        log = _read(library, handle, "ProgramLog").decode(errors="replace")
        if code:
            fault = library.nvrtcGetErrorString(code).decode()
            raise BuildError(
                "the generated source did not compile",
                where=title_of(text) or "an empty program",
                wanted=f"a cubin for {options[0].rpartition('=')[2]}",
                got=f"{fault}\n{errors_of(text, log)}",
                fix=advice(text, log),
                source=text,
            )
        return _read(library, handle, output), log
    finally:
        library.nvrtcDestroyProgram(byref(handle))


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _strings(texts: Iterable[str]) -> ctypes.Array[c_char_p]:
    values = [_encoded(text) for text in texts]
    return (c_char_p * len(values))(*values)


def _read(library: ctypes.CDLL, handle: c_void_p, what: str) -> bytes:
    size = c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(handle, byref(size))
    buffer = ctypes.create_string_buffer(size.value or 1)
    getattr(library, f"nvrtcGet{what}")(handle, buffer)
    return buffer.raw.rstrip(b"\0") if what == "ProgramLog" else buffer.raw


def report(name: str, plan: Plan, arch: str = ARCH) -> dict[str, object]:
    """Compile one plan without the cache; returns times, size and registers."""
    start = time.perf_counter()
    source = generate(plan)
    generated = time.perf_counter() - start
    header_texts = headers(source, kernels_folder())
    cubin, log = compile_cubin(source.text, header_texts, arch)
    return {
        "program": name,
        "generate_s": round(generated, 3),
        "compile_s": round(time.perf_counter() - start - generated, 3),
        "cubin_bytes": len(cubin),
        **_facts(log),
    }
