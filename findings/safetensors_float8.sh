#!/usr/bin/env bash
# safetensors writes float8_e4m3fn arrays of NumPy without a warning. Its own function
# then fails to read the file into NumPy, although the bytes are correct.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.4.6 ml_dtypes==0.6.0 safetensors==0.8.0
"$folder/venv/bin/python" - "$folder/a.safetensors" <<'PYTHON'
import json
import sys

import ml_dtypes
import numpy as np
import safetensors
from safetensors import numpy as io

print("safetensors", safetensors.__version__, "ml_dtypes", ml_dtypes.__version__)
path, codes = sys.argv[1], np.arange(8, dtype=np.uint8)
io.save_file({"w": codes.view(ml_dtypes.float8_e4m3fn)}, path)
data = open(path, "rb").read()
length = int.from_bytes(data[:8], "little")
header = json.loads(data[8 : 8 + length])
print("written: ", header["w"], data[8 + length :] == codes.tobytes())
try:
    seen = str(io.load_file(path)["w"].dtype)
except Exception as error:
    seen = f"{type(error).__name__}: {error}"
print("expected: load_file returns what save_file has written")
print("seen:    ", seen)
sys.exit(header["w"]["dtype"] != "F8_E4M3" or not seen.startswith("AttributeError"))
PYTHON
