#!/usr/bin/env bash
# Triton's tl.sum adds bfloat16 numbers in bfloat16, so that a sum of many small numbers
# is rounded at each addition. tl.sum of int8 widens to int32, and tl.max of bfloat16 to
# float32, where it is not needed. No GPU is needed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet triton==3.9.0
cat > "$folder/reductions.py" <<'PYTHON'
import re
import sys
import warnings

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

warnings.simplefilter("ignore")

@triton.jit
def add(x, y):
    tl.store(y, tl.sum(tl.load(x + tl.arange(0, 512))))

@triton.jit
def add_in_float32(x, y):
    tl.store(y, tl.sum(tl.load(x + tl.arange(0, 512)), dtype=tl.float32))

@triton.jit
def largest(x, y):
    tl.store(y, tl.max(tl.load(x + tl.arange(0, 512))))

def dtype(kernel, given):
    """That of the reduction in the code for sm_90."""
    source = ASTSource(kernel, signature={"x": f"*{given}", "y": "*fp32"})
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]
    body = code[code.index('"tt.reduce"') : code.index("tt.reduce.return")]
    return re.search(r"arith\.\w+ %\w+, %\w+ : (\w+)", body).group(1)

seen = {
    "sum of int8": dtype(add, "i8"),
    "max of bfloat16": dtype(largest, "bf16"),
    "sum of bfloat16": dtype(add, "bf16"),
    "sum of bfloat16, dtype=tl.float32": dtype(add_in_float32, "bf16"),
}
print("triton", triton.__version__)
print("expected: wider types in each of them, i32 or f32")
for name, found in seen.items():
    print(f"seen:     {name} in {found}")
sys.exit([*seen.values()] != ["i32", "f32", "bf16", "f32"])
PYTHON
TRITON_CACHE_DIR="$folder/cache" "$folder/venv/bin/python" "$folder/reductions.py"
