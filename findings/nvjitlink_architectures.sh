#!/usr/bin/env bash
# compute_90a is architecture-specific: its code runs on sm_90 devices alone, and PTX of
# it is refused for other targets. nvJitLink links its LTO-IR for sm_90 and even for
# sm_100a, without a warning. No GPU is needed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet \
    nvidia-cuda-nvrtc==13.5.37 nvidia-nvjitlink==13.5.37
"$folder/venv/bin/python" - "$folder/venv" <<'PYTHON'
import ctypes
import glob
import sys

def library(name):
    [path] = glob.glob(f"{sys.argv[1]}/lib/python*/site-packages/nvidia/**/{name}",
                       recursive=True)
    return ctypes.CDLL(path)

nvrtc, linker = library("libnvrtc.so.13"), library("libnvJitLink.so.13")
SOURCE = b'extern "C" __global__ void f(int *y) { *y = threadIdx.x; }'

def compiled(option, kind):
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), SOURCE, b"f.cu", 0, None, None)
    options = [b"--gpu-architecture=compute_90a", *option]
    texts = (ctypes.c_char_p * len(options))(*options)
    assert nvrtc.nvrtcCompileProgram(program, len(options), texts) == 0
    assert getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)) == 0
    code = ctypes.create_string_buffer(size.value)
    assert getattr(nvrtc, f"nvrtcGet{kind}")(program, code) == 0
    return code.raw

def link(code, kind, target, lto):
    handle, size = ctypes.c_void_p(), ctypes.c_size_t()
    options = [f"-arch={target}".encode()] + [b"-lto"] * lto
    texts = (ctypes.c_char_p * len(options))(*options)
    create = linker.nvJitLinkCreate if hasattr(linker, "nvJitLinkCreate") else None
    create = create or getattr(linker, "__nvJitLinkCreate_13_0")
    if create(ctypes.byref(handle), len(options), texts):
        return "refused"
    def call(name, *arguments):
        found = getattr(linker, f"nvJitLink{name}", None)
        return (found or getattr(linker, f"__nvJitLink{name}_13_0"))(handle, *arguments)
    failed = call("AddData", kind, code, ctypes.c_size_t(len(code)), b"f")
    failed = failed or call("Complete")
    call("GetErrorLogSize", ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value + 1)
    call("GetErrorLog", log)
    text = log.value.decode().strip()
    return "refused" if failed else f"linked, {text or 'nothing said'}"

LTOIR, PTX = 3, 2
targets = "sm_90a", "sm_90", "sm_100a"
lto = [link(compiled([b"-dlto"], "LTOIR"), LTOIR, t, True) for t in targets]
ptx = [link(compiled([], "PTX"), PTX, t, False) for t in targets]
print("nvrtc and nvJitLink 13.5.37, compute_90a for", *targets)
print("expected: LTO-IR as PTX:", ptx)
print("seen:     LTO-IR:       ", lto)
sys.exit(lto != ["linked, nothing said"] * 3 or ptx[0] != lto[0] or "refused" not in ptx)
PYTHON
