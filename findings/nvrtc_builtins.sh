#!/usr/bin/env bash
# NVRTC loads a second library, libnvrtc-builtins, which its wheel has in the same
# folder. NVRTC 13.0 does not search this folder. So an NVRTC that is loaded by its path
# compiles nothing with that wheel alone. NVRTC 13.5 finds it. No GPU is needed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/compile.py" <<'PYTHON'
import ctypes
import sys

nvrtc, program = ctypes.CDLL(sys.argv[1]), ctypes.c_void_p()
source = b"__global__ void f(float *y) { *y = __sinf(*y); }"
nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"f.cu", 0, None, None)
nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
code = nvrtc.nvrtcCompileProgram(program, 0, None)
print(nvrtc.nvrtcGetErrorString(code).decode())
PYTHON
unset LD_LIBRARY_PATH
seen=()
for version in 13.0.88 13.5.37; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet "nvidia-cuda-nvrtc==$version"
    library=$(find "$folder/$version" -name 'libnvrtc.so.13')
    builtins=$(find "$(dirname "$library")" -name 'libnvrtc-builtins.so.*' | wc -l)
    text=$("$folder/$version/bin/python" "$folder/compile.py" "$library")
    echo "NVRTC $version, $builtins builtins in its folder: $text"
    seen+=("$text")
done
echo "expected: NVRTC_SUCCESS from both"
[[ ${seen[0]} == NVRTC_ERROR_BUILTIN_OPERATION_FAILURE && ${seen[1]} == NVRTC_SUCCESS ]]
