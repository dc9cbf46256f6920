"""Folders with weights in float8 and their scales."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import etc_dist
from etc_dist.errors import ArgumentError
from etc_dist.functions.scaled_weights import E4M3
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models import load
from etc_dist.models.config import read_config
from etc_dist.models.float8 import widen
from etc_dist.models.part import Part
from etc_dist.models.safetensors_file import read_tensors
from etc_dist.models.weights import load_weights
from tests.graphs.scaled import expanded
from tests.models.references import QWEN, QWEN_MOE, draw_folder, save

RELEASED = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head"],
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
SMALL = {"num_hidden_layers": 1, "tie_word_embeddings": True}
DENSE, MIXTURE = QWEN | SMALL, QWEN_MOE | SMALL | {"num_experts": 4}
ENDS = ("_proj.weight",)
FILES = [f"model-{n:05}-of-00002.safetensors" for n in (1, 2)]


def release(
    folder: Path, rng: Any, given: Mapping[str, Any], scale_dtype: str = "float32"
) -> tuple[Path, Path]:
    """Two folders with the same weights: those of projections in float8, with scales in
    another file; and all as numbers of fp32."""
    plain, released = folder / "plain", folder / "released"
    plain.mkdir(), released.mkdir()
    draw_folder(plain, rng, given)
    (released / "config.json").write_text(
        json.dumps({**given, "quantization_config": RELEASED})
    )
    tensors, scales, widened = {}, {}, {}
    for name, array in read_tensors(plain / "model.safetensors"):
        tensors[name] = widened[name] = np.array(array)
        if name.endswith(ENDS):
            codes, scale = etc_dist.quantize(tensors[name])
            scale = scale.astype(numpy_dtype(scale_dtype))
            tensors[name], scales[f"{name}_scale_inv"] = codes, scale
            wide = codes.astype(np.float64) * expanded(scale, *codes.shape)
            widened[name] = wide.astype(np.float32)
    assert len(scales) > 6
    save(plain / "model.safetensors", widened, "F32")
    save(released / FILES[0], tensors)
    stored = "F32" if scale_dtype == "float32" else "BF16"
    save(released / FILES[1], scales, stored)
    return plain, released


def test_all_codes_are_multiplied_by_the_scale_of_their_block():
    bits = np.arange(300 * 264).astype(np.uint8).reshape(300, 264)
    codes = bits.view(numpy_dtype(E4M3))
    scales = np.exp2(np.arange(9) - 4).astype(np.float32).reshape(3, 3)
    scales[1, 2] = 0
    wanted = codes.astype(np.float64) * expanded(scales, 300, 264)
    np.testing.assert_array_equal(widen(codes, scales), wanted)


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("part", [Part(0, 1), Part(1, 2)], ids=str)
@pytest.mark.parametrize("given", [DENSE, MIXTURE], ids=["dense", "moe"])
def test_folders_are_widened(given, part, scale_dtype, tmp_path, rng):
    plain, released = release(tmp_path, rng, given, scale_dtype)
    config = read_config(released)
    wanted = load_weights(plain, config, "bfloat16", part)
    found = load_weights(released, config, "bfloat16", part)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, name)


@pytest.mark.mpi(ranks=[1])
def test_a_released_folder_generates_what_its_numbers_do(tmp_path, rng, one_rank):
    ids = []
    for folder in release(tmp_path, rng, DENSE):
        with load(folder, positions=64, page_size=16, world=one_rank) as model:
            ids.append(model.generate([[3, 1, 4]], max_new_tokens=8))
    assert ids[0] == ids[1]


NAME = "model.layers.0.self_attn.q_proj.weight"


def not_a_number(a):
    a = a.copy()
    a.view(np.uint8)[3, 5] = 0x7F
    return a


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("_scale_inv", lambda a: None, f"{NAME}: {E4M3} without scales"),
        ("", lambda a: None, f"{NAME}_scale_inv alone"),
        ("_scale_inv", lambda a: a[:1], r"scales \[1, 2\] float32"),
        ("_scale_inv", lambda a: a.astype(np.uint8), "U8"),
        ("_scale_inv", lambda a: a * np.inf, f"{NAME}: numbers that are not finite"),
        ("", not_a_number, f"{NAME}: numbers that are not finite"),
        ("", lambda a: a[None], r"q_proj.weight \[1, 256, 256\], scales"),
    ],
)
def test_tensors_that_do_not_fit_are_named(name, change, text, tmp_path, rng):
    _, released = release(tmp_path, rng, DENSE)
    for file in FILES:
        tensors = {n: np.array(a) for n, a in read_tensors(released / file)}
        if NAME + name in tensors:
            changed = change(tensors.pop(NAME + name))
            if changed is not None:
                tensors[NAME + name] = changed
            save(released / file, tensors, "F32" if name else "BF16")
    with pytest.raises(ArgumentError, match=text):
        load_weights(released, read_config(released), "bfloat16")


def test_scales_of_e8m0_are_refused(tmp_path, rng):
    _, released = release(tmp_path, rng, DENSE)
    file = released / FILES[0]
    file.write_bytes(file.read_bytes().replace(b'"F8_E4M3"', b'"F8_E8M0"'))
    with pytest.raises(ArgumentError, match="proj.weight: F8_E8M0"):
        load_weights(released, read_config(released), "bfloat16")
