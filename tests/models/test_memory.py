"""The memory of a process that loads a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from etc_dist.functions.scaled_weights import E4M3
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models.config import read_config
from etc_dist.models.safetensors_file import read_tensors, release
from etc_dist.models.weights import weight_bytes
from tests.models.references import QWEN, save
from tests.models.test_float8 import RELEASED

SETTINGS = QWEN | {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}
SETTINGS |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 504}
SOURCE = """
import sys
import etc_dist
from etc_dist.models import load
from etc_dist.settings import Settings

def in_status(name):
    status = open("/proc/self/status").read()
    return int(status.split(name + ":")[1].split()[0]) << 10

with etc_dist.start(Settings(backend="cpu")) as world:
    for folder in sys.argv[1:]:  # a small model first, which loads modules
        before = in_status("VmRSS")
        with load(folder, batch=1, positions=64, world=world) as model:
            cache = model._arrays["cache"].nbytes
    print(in_status("VmHWM") - before - cache)
"""


def write_folder(folder: Path, num_layers: int) -> int:
    """A model in float8, with a file for each layer. Returns the bytes of its
    weights."""
    folder.mkdir()
    config = SETTINGS | {"quantization_config": RELEASED}
    config |= {"num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    hidden, inner = SETTINGS["hidden_size"], SETTINGS["intermediate_size"]
    shapes = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    shapes |= {"self_attn.q_norm": (128,), "self_attn.k_norm": (128,)}
    matrices = {"self_attn.q_proj": (1024, hidden), "self_attn.o_proj": (hidden, 1024)}
    matrices |= {f"self_attn.{name}_proj": (512, hidden) for name in "kv"}
    matrices |= {f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
    matrices |= {"mlp.down_proj": (hidden, inner)}
    for layer in range(num_layers):
        stem = f"model.layers.{layer}"
        tensors = {f"{stem}.{n}.weight": np.ones(s) for n, s in shapes.items()}
        for name, (rows, columns) in matrices.items():
            codes = np.ones((rows, columns), numpy_dtype(E4M3))
            tensors[f"{stem}.{name}.weight"] = codes
            blocks = rows // 128, columns // 128
            tensors[f"{stem}.{name}.weight_scale_inv"] = np.ones(blocks)
        save(
            folder / f"model-{layer + 1:05}-of-{num_layers + 1:05}.safetensors", tensors
        )
    rows = np.ones((504, hidden))
    tensors = {"model.embed_tokens.weight": rows, "lm_head.weight": rows}
    tensors |= {"model.norm.weight": np.ones(hidden)}
    last = f"{num_layers + 1:05}"
    save(folder / f"model-{last}-of-{last}.safetensors", tensors)
    return sum(weight_bytes(read_config(folder)).values())


def test_load_takes_the_bytes_of_the_weights(tmp_path):
    """And at most 5 % more beside the cache; 250 MB, of which a matrix has 3."""
    folders = [tmp_path / "small", tmp_path / "large"]
    _, num_bytes = map(write_folder, folders, (1, 20))
    command = [sys.executable, "-c", SOURCE, *map(str, folders)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert process.returncode == 0, process.stderr
    assert 0.9 < int(process.stdout) / num_bytes < 1.05


def resident_bytes() -> int:
    """Of mapped files."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssFile:")[1].split()[0]) << 10


def test_pages_of_a_tensor_are_given_back(tmp_path):
    file, size = tmp_path / "model.safetensors", 1 << 26
    save(file, {"some": np.ones(size, np.uint8)})
    [(_, tensor)] = read_tensors(file, may_be_packed=True)
    before = resident_bytes()
    assert tensor.sum() == size
    assert resident_bytes() - before > size // 2
    release(tensor[3:])
    assert resident_bytes() - before < size // 8
    assert tensor[-1] == 1
