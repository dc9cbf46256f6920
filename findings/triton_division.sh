#!/usr/bin/env bash
# In Triton, -7 // 2 is -4 where -7 is a tl.constexpr, and -3 where it is a variable: the
# first is divided by Python, the second as in C. So an annotation changes results of the
# same line. No GPU is needed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet triton==3.9.0
cat > "$folder/division.py" <<'PYTHON'
import re
import sys
import warnings

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

warnings.simplefilter("ignore")

@triton.jit
def variable(y):
    n = -7
    tl.store(y, n // 2)

@triton.jit
def constant(y):
    n: tl.constexpr = -7
    tl.store(y, n // 2)

def stored(kernel):
    """The number that the code for sm_90 stores."""
    source = ASTSource(kernel, signature={"y": "*i32"})
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    [number] = re.findall(r"mov\.b32\s+%r\d+, (-?\d+);", code)
    return int(number)

seen = stored(variable), stored(constant)
print("triton", triton.__version__)
print("expected: one value of n // 2 with n = -7 and with n: tl.constexpr = -7")
print("seen:    ", *seen)
sys.exit(seen != (-3, -4))
PYTHON
TRITON_CACHE_DIR="$folder/cache" "$folder/venv/bin/python" "$folder/division.py"
