#!/usr/bin/env bash
# NumPy's sum of bfloat16 numbers is kept in bfloat16: it stops growing at 256, where
# adding 1 no longer changes it. The matrix product of the same numbers is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.4.6 ml_dtypes==0.6.0
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import ml_dtypes
import numpy as np

print("numpy", np.__version__, "ml_dtypes", ml_dtypes.__version__)
ones = np.ones(4096, ml_dtypes.bfloat16)
found = float(ones.sum()), float(ones @ ones), float(ones.sum(dtype=np.float32))
half = float(np.ones(4096, np.float16).sum())
print("expected: 4096 from sum, from @ and from sum in float32, as float16 gives:", half)
print("seen:    ", found)
sys.exit(found != (256.0, 4096.0, 4096.0) or half != 4096.0)
PYTHON
