#!/usr/bin/env bash
# A cast of NaN to float4_e2m1fn or float6 of ml_dtypes gives -0, without a warning: these
# formats have no NaN, and the largest number, which infinity becomes, is not taken. A
# check for NaN after quantising finds nothing. float8 keeps NaN.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.4.6 ml_dtypes==0.6.0
"$folder/venv/bin/python" -W error - <<'PYTHON'
import sys

import ml_dtypes
import numpy as np

print("numpy", np.__version__, "ml_dtypes", ml_dtypes.__version__)
given = np.array([np.nan, np.inf, 1.0], np.float32)
print("expected of NaN, infinity and 1: an error, a warning, or the largest number")
seen = {}
for name in ("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3fn"):
    found = given.astype(getattr(ml_dtypes, name)).astype(np.float32)
    seen[name] = [str(number) for number in found]
    print(f"seen:     {name} {', '.join(seen[name])}")
largest = {"float4_e2m1fn": "6.0", "float6_e2m3fn": "7.5", "float6_e3m2fn": "28.0"}
wanted = {name: ["-0.0", most, "1.0"] for name, most in largest.items()}
sys.exit(seen != wanted | {"float8_e4m3fn": ["nan", "nan", "1.0"]})
PYTHON
