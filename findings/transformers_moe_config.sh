#!/usr/bin/env bash
# Saving a Qwen3-MoE configuration renames its number of experts and moves the base of
# the rotary embedding. A loader that reads the names of the released folders finds
# neither.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON' 2>/dev/null
import json
import sys
from pathlib import Path

import transformers
from transformers import Qwen3MoeConfig

print("transformers", transformers.__version__)
released = {
    "model_type": "qwen3_moe", "num_experts": 8, "rope_theta": 1e6, "rope_scaling": None
}
folder = Path(sys.argv[1])
(folder / "config.json").write_text(json.dumps(released))
Qwen3MoeConfig.from_pretrained(folder).save_pretrained(folder / "saved")
saved = json.loads((folder / "saved" / "config.json").read_text())
names = "num_experts", "num_local_experts", "rope_theta", "rope_scaling"
names += ("rope_parameters",)
seen = {name: saved[name] for name in names if name in saved}
print("expected: the fields that were read:", released)
print("seen:    ", seen)
sys.exit({*seen} != {"num_local_experts", "rope_parameters"})
PYTHON
