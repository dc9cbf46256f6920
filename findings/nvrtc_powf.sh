#!/usr/bin/env bash
# NVRTC computes powf(x, 2.0f) by the general function, with about a hundred instructions,
# although the exponent is a constant. Compilers for CPUs make x * x of it, also without
# fast math, since the result is the same. No GPU is needed.
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
SOURCE = 'extern "C" __global__ void f(float *y) { float x = *y; *y = CALL; }'

def instructions(call):
    """Their number in PTX, beside those that load and store the operand."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = SOURCE.replace("CALL", call).encode()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"f.cu", 0, None, None)
    options = (ctypes.c_char_p * 1)(b"--gpu-architecture=compute_90")
    code = nvrtc.nvrtcCompileProgram(program, 1, options)
    assert code == 0, code
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, ptx)
    lines = re.findall(r"^\t+(?:@!?%p\d+ *\t?)?[a-z][\w.]*", ptx.value.decode(), re.M)
    return sum(not re.search(r"ld\.|cvta|st\.|ret", line) for line in lines)

print("NVRTC 13.5.37; expected: x * x and powf(x, 2.0f) are one instruction each")
seen = {call: instructions(call) for call in ("x * x", "powf(x, 2.0f)", "pow(x, 2)")}
for call, number in seen.items():
    print(f"seen:     {call}: {number}")
one, power, whole = seen.values()
sys.exit(one != 1 or power < 50 or whole < 5)
PYTHON
