"""Weights in MXFP4."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.errors import ArgumentError
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models.config import parse_config
from etc_dist.models.mxfp4 import widen
from etc_dist.models.part import WHOLE, Part
from etc_dist.models.weight_places import WeightPlaces
from etc_dist.models.weights import load_weights, weight_shapes
from tests.models.references import save

NUMBERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
NUMBERS += [-number for number in NUMBERS]
GIVEN = {
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "vocab_size": 16,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["a"]},
}
LAYER = "model.layers.0.mlp.experts"


@pytest.fixture
def model(tmp_path, rng):
    """The configuration, and tensors, of which those of experts are in MXFP4."""
    config = parse_config(GIVEN, tmp_path)
    places, tensors = WeightPlaces(config, WHOLE), {}
    shapes = weight_shapes(config)
    for name in places:
        if ".experts." not in name:
            target, index = places.find(name)
            shape = np.broadcast_to(0, shapes[target])[index].shape
            tensors[name] = rng.standard_normal(shape)
    for name, rows, columns in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
        shape = 3, rows, columns // 32
        tensors[f"{LAYER}.{name}_blocks"] = rng.integers(256, size=(*shape, 16))
        tensors[f"{LAYER}.{name}_scales"] = rng.integers(120, 130, shape)
        tensors[f"{LAYER}.{name}_bias"] = rng.standard_normal((3, rows))
    return config, {
        n: a.astype(np.uint8) if n.endswith(("_blocks", "_scales")) else a
        for n, a in tensors.items()
    }


def test_all_numbers_and_scales_are_exact_in_bfloat16():
    codes = np.arange(16)
    pair = (codes | codes[::-1] << 4).astype(np.uint8)
    scales = np.arange(253).astype(np.uint8)  # the others are tested below
    numbers = widen(np.tile(pair, (253, 1, 1)), scales[:, None])
    of_codes = np.stack([NUMBERS, NUMBERS[::-1]], axis=1).ravel()
    expected = of_codes * 2.0 ** (scales.astype(int)[:, None] - 127)
    np.testing.assert_array_equal(numbers, expected)
    rounded = numbers.astype(numpy_dtype("bfloat16")).astype(np.float64)
    np.testing.assert_array_equal(rounded, expected)


def test_products_that_are_too_large_are_not_finite():
    byte = np.full((1, 1, 16), 0x39, np.uint8)  # -0.5 and 1.5
    [numbers] = widen(byte, np.array([[254]], np.uint8))
    assert numbers.tolist() == [-(2.0**126), 1.5 * 2.0**127] * 16
    assert np.isinf(widen(byte + 0x10, np.array([[254]], np.uint8))[0, 1::2]).all()
    assert np.isnan(widen(byte * 0, np.array([[255]], np.uint8))).all()


@pytest.mark.torch
def test_numbers_are_those_of_transformers(rng):
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = rng.integers(256, size=(2, 6, 3, 16)).astype(np.uint8)
    scales = rng.integers(90, 160, (2, 6, 3)).astype(np.uint8)
    theirs = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
    ours = [widen(*pair).T for pair in zip(blocks, scales, strict=True)]
    np.testing.assert_array_equal(ours, theirs.float().numpy())


@pytest.mark.parametrize("part", [Part(0, 1), Part(0, 2), Part(1, 2)], ids=str)
def test_folders_are_widened(model, tmp_path, part):
    config, packed = model
    names = sorted(packed, reverse=True)  # scales and blocks in several files
    for file_idx, some in enumerate((names[::2], names[1::2])):
        save(tmp_path / f"model-{file_idx}.safetensors", {n: packed[n] for n in some})
    weights = load_weights(tmp_path, config, "bfloat16", part)
    plain = {n: a for n, a in packed.items() if a.dtype != np.uint8}
    for name in ("gate_up_proj", "down_proj"):
        of = (packed[f"{LAYER}.{name}_{end}"] for end in ("blocks", "scales"))
        matrices = [widen(*expert).T for expert in zip(*of, strict=True)]
        plain[f"{LAYER}.{name}"] = np.array(matrices)
    (tmp_path / "plain").mkdir()
    save(tmp_path / "plain" / "model.safetensors", plain)
    expected = load_weights(tmp_path / "plain", config, "bfloat16", part)
    for name, array in expected.items():
        np.testing.assert_array_equal(weights[name], array, name)
    blocks, scales = (packed[f"{LAYER}.gate_up_proj_{n}"] for n in ("blocks", "scales"))
    rows = slice(part.rank * 96 // part.count, (part.rank + 1) * 96 // part.count)
    up = widen(blocks[2], scales[2])[1::2][rows]
    np.testing.assert_array_equal(weights["w_up"][0, 2], up)
    bias = packed[f"{LAYER}.gate_up_proj_bias"].astype(weights["w_up"].dtype)
    np.testing.assert_array_equal(weights["up_bias"][0], bias[:, 1::2][:, rows])
    bias = packed[f"{LAYER}.down_proj_bias"].astype(weights["w_up"].dtype)
    own_bias = bias * (part.rank == 0)
    np.testing.assert_array_equal(weights["down_bias"][0], own_bias)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("down_proj_scales", lambda a: None, "down_proj_blocks: U8"),
        ("down_proj_blocks", lambda a: None, "down_proj_scales: U8"),
        ("down_proj_scales", lambda a: a[:, :5], r"\[3, 64, 3, 16\] for scales \[3, 5"),
        ("down_proj_scales", lambda a: a | 255, "down_proj.weight: .* not finite"),
        ("down_proj_bias", lambda a: a.astype(np.uint8), "down_proj_bias: U8"),
    ],
)
def test_bytes_that_do_not_fit_are_named(model, tmp_path, name, change, text):
    config, tensors = model
    tensor = change(tensors.pop(f"{LAYER}.{name}"))
    if tensor is not None:
        tensors[f"{LAYER}.{name}"] = tensor
    save(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ArgumentError, match=text):
        load_weights(tmp_path, config, "bfloat16")
