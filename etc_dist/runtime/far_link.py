"""Links programs over several hosts with NVSHMEM's device code, by nvJitLink.

The code of the transport, `kernels/far/nvshmem.cu`, takes seconds to compile: once
for each version of NVSHMEM and of the compiler, to LTO-IR, which the cache keeps. The
link optimizes it and the program as a whole."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

from etc_dist.cache import Cache, Entry, sha256
from etc_dist.errors import BuildError

OPTIONS = ("-default-device", "-dlto", "-rdc=true")
"""Of NVRTC, for LTO-IR."""
BRIDGE = Path("far", "nvshmem.cu")
_LTO_IR = 3
"""nvJitLink's number of this kind of input."""
_loading = Lock()

Compile = Callable[[str, Mapping[str, str], Sequence[str]], bytes]
"""(text, headers, options) -> LTO-IR."""


def versions(kernels: Path) -> str:
    """All that the linked code depends on, other than the compiler and the program."""
    text = (kernels / BRIDGE).read_bytes()
    numbers = ".".join(map(str, _linker_version()))
    return f"NVSHMEM {nvshmem_version()}, nvJitLink {numbers}, {sha256(text)}"


def compile_bridge(
    compile: Compile, kernels: Path, compiler: str, arch: str, store: Cache
) -> bytes:
    """The LTO-IR of NVSHMEM's device code."""
    text = (kernels / BRIDGE).read_text()

    def make() -> Entry:
        folders = [f"-I{folder}" for folder in include_folders()]
        code = compile(text, {}, ["--std=c++17", *folders])
        return Entry({}, {"ltoir": code})

    parts = f"{versions(kernels)} {compiler} {arch} {OPTIONS}"
    key = sha256(parts.encode())[:32]
    entry, _ = store.fetch("programs", key, make, _has_code, limit=120)
    return entry.files["ltoir"]


def _has_code(entry: Entry) -> bool:
    return "ltoir" in entry.files


def nvshmem_version() -> str:
    """The version of NVSHMEM's headers, for example 3.4.5."""
    path = _folder("nvshmem") / "non_abi" / "nvshmem_version.h"
    try:
        text = path.read_text()
    except OSError as error:
        raise _missing("the headers of NVSHMEM", str(error)) from error
    parts = ("MAJOR", "MINOR", "PATCH")
    matches = [re.search(rf"NVSHMEM_VENDOR_{p}_VERSION\s+(\d+)", text) for p in parts]
    return ".".join(part[1] for part in matches if part is not None)


def include_folders() -> list[Path]:
    """The headers of NVSHMEM, of the CUDA runtime and of libcu++."""
    return [_folder("nvshmem"), _folder("cudart"), _folder("cccl")]


def _folder(library: str) -> Path:
    from cuda import pathfinder

    folder, fault = None, "not found"
    try:
        folder = pathfinder.find_nvidia_header_directory(library)
    except Exception as error:
        fault = str(error)
    if not folder and library == "cccl":
        cupy = find_spec("cupy")  # found, not imported
        inside = "_core/include/cupy/_cccl/libcudacxx"
        if cupy is not None and cupy.origin is not None:
            folder = str(Path(cupy.origin).parent / inside)
    if not folder or not Path(folder).is_dir():
        raise _missing(f"the headers of {library}", fault)
    return Path(folder)


def link(codes: Mapping[str, bytes], arch: str, where: str) -> tuple[bytes, str]:
    """LTO-IR by name -> (cubin, log). BuildError where it does not link."""
    library = _nvjitlink()
    options = (c_char_p * 3)(f"-arch={arch}".encode(), b"-lto", b"-verbose")
    handle = c_void_p()

    def check(name: str, *arguments: Any) -> None:
        if code := getattr(library, name)(*arguments):
            raise BuildError(
                "a program over several hosts did not link",
                where=where,
                wanted=f"return code 0 of {name}",
                got=f"return code {code}\n{_log(handle)}",
                fix="install nvidia-nvjitlink of the compiler's version or newer, and "
                "run `etc-dist doctor`",
            )

    check("nvJitLinkCreate", byref(handle), len(options), options)
    try:
        for name, code in codes.items():
            check(
                "nvJitLinkAddData",
                handle,
                _LTO_IR,
                code,
                c_size_t(len(code)),
                name.encode(),
            )
        check("nvJitLinkComplete", handle)
        size = c_size_t()
        check("nvJitLinkGetLinkedCubinSize", handle, byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        check("nvJitLinkGetLinkedCubin", handle, cubin)
        return cubin.raw, _log(handle)
    finally:
        library.nvJitLinkDestroy(byref(handle))


def _log(handle: c_void_p) -> str:
    library, texts = _nvjitlink(), []
    for kind in ("Error", "Info"):
        size = c_size_t()
        getattr(library, f"nvJitLinkGet{kind}LogSize")(handle, byref(size))
        text = ctypes.create_string_buffer(size.value + 1)
        getattr(library, f"nvJitLinkGet{kind}Log")(handle, text)
        texts.append(text.value.decode(errors="replace"))
    return "".join(texts)


def _linker_version() -> tuple[int, int]:
    major, minor = c_int(), c_int()
    _nvjitlink().nvJitLinkVersion(byref(major), byref(minor))
    return major.value, minor.value


@cache
def _nvjitlink() -> ctypes.CDLL:
    return load_library("nvJitLink", "[cu13]' (or [cu12])")


def load_library(name: str, extra: str) -> ctypes.CDLL:
    """A library of NVIDIA's package. BuildError where it cannot be loaded; `extra`: of
    pip, which brings it.

    NOTE: one thread at a time. NVRTC that several threads load at once does not find
    the library of its built-in functions later."""
    try:
        with _loading:
            from cuda import pathfinder

            return ctypes.CDLL(pathfinder.load_nvidia_dynamic_lib(name).abs_path)
    except Exception as error:
        raise _missing(f"the library {name}", str(error), extra) from error


def _missing(what: str, got: str, extra: str = "[cu13]' (or [cu12])") -> BuildError:
    return BuildError(
        f"{what} cannot be loaded, which the compilation of this program needs",
        where="etc_dist/runtime",
        wanted="NVRTC; over several hosts also nvJitLink, and the headers of NVSHMEM "
        "and of CUDA",
        got=got.splitlines()[0] if got else "nothing",
        fix=f"in the checkout of etc_dist: pip install -e '.{extra}",
    )
