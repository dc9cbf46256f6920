#!/usr/bin/env bash
# setmaxnreg moves registers between the warpgroups of a kernel. A single call through a
# function pointer makes the compiler ignore every setmaxnreg of the kernel, with a
# remark and no error. Calls of functions that are not inlined do not. No GPU is needed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet nvidia-cuda-nvrtc==13.5.37
library=$(find "$folder/venv" -name 'libnvrtc.so.13')
"$folder/venv/bin/python" - "$library" <<'PYTHON'
import ctypes
import re
import sys

nvrtc = ctypes.CDLL(sys.argv[1])
SOURCE = """
__device__ __noinline__ int one(int x) { return 3 * x; }
__device__ __noinline__ int two(int x) { return x + 5; }
extern "C" __global__ void __launch_bounds__(384, 1) f(int *y, int n) {
  if (threadIdx.x < 128) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
  else asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  CALL
}
"""
CALLS = {
    "no call": "y[threadIdx.x] = n;",
    "a function that is not inlined": "y[threadIdx.x] = one(n);",
    "a function pointer": "int (*g)(int) = n > 7 ? one : two; y[threadIdx.x] = g(n);",
}

def compiled(call):
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = SOURCE.replace("CALL", call).encode()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"f.cu", 0, None, None)
    options = [b"--gpu-architecture=sm_90a", b"--ptxas-options=-v"]
    texts = (ctypes.c_char_p * len(options))(*options)
    code = nvrtc.nvrtcCompileProgram(program, len(options), texts)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    lines = [x for x in log.value.decode().splitlines() if "setmaxnreg" in x]
    return code, "; ".join(re.sub(r"\s+", " ", x).strip() for x in lines) or "kept"

print("NVRTC 13.5.37; expected: kept, or an error")
seen = {name: compiled(call) for name, call in CALLS.items()}
for name, (code, text) in seen.items():
    print(f"seen with {name}: code {code}, setmaxnreg {text}")
codes, texts = zip(*seen.values())
sys.exit(any(codes) or texts[:2] != ("kept", "kept") or "ignored" not in texts[2])
PYTHON
