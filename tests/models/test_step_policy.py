"""The numbers of steps: few choices, made once."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from benchmarks.decoder_models import MODELS
from etc_dist.functions.router import Router
from etc_dist.models import step_policy
from etc_dist.models.config import read_config
from etc_dist.models.experts import DecoderMixture
from etc_dist.models.step_policy import (
    DIVIDED,
    ROWS,
    SCALED,
    StepPolicy,
    num_outputs,
)
from tests.models.small import make_model


def test_float8_weights_of_dense_models_are_widened_once_for_many_rows():
    config = MODELS["qwen3-32b"]
    scaled = replace(config, float8=config.sizes(16).matmuls[:-1])
    policy = StepPolicy(scaled, 132)
    for rows, height in ((64, 64), (96, 128), (128, 128)):
        number = policy.dims(rows, 512)["gate_up_shape"]
        assert policy.shapes_of("gate_up")[number].rows == height
    assert not any(shape.scaled for shape in policy.shapes_of("head"))
    assert SCALED not in StepPolicy(config, 132).shapes_of("gate_up")


def test_each_choice_is_listed_and_made_once(tmp_path, rng, monkeypatch):
    config = read_config(make_model(tmp_path, rng))
    policy = StepPolicy(config, 132)
    all_dims = policy.every(500)
    monkeypatch.setattr(step_policy, "work_of", None)
    for rows in ROWS:
        for num_wanted, longest in product((1, 500), (1, 127, 128, 255, 384, 499, 500)):
            outputs = num_outputs(rows, num_wanted)
            dims = {"rows": rows, "outputs": outputs}
            assert dims | policy.dims(rows, longest, outputs) in all_dims
    policy.dims(1, 1).clear()
    assert policy.dims(1, 1)


@pytest.mark.parametrize("workers", [None, 132])
@pytest.mark.parametrize("mixture", [None, DecoderMixture(8, Router(2), "plain")])
@pytest.mark.parametrize("is_float8", [False, True])
def test_the_sums_of_a_row_may_depend_on_its_own_length_alone(
    tmp_path, rng, mixture, workers, is_float8
):
    config = read_config(make_model(tmp_path, rng))
    shared_inner = 0 if mixture is None else 64
    config = replace(config, mixture=mixture, shared_inner=shared_inner)
    if is_float8:
        config = replace(config, float8=config.sizes(16).matmuls[:-1])
    policy = StepPolicy(config, workers, in_order=True)
    for dims in policy.every(4096):
        shapes = [
            policy.shapes_of(name.removesuffix("_shape"))[number]
            for name, number in dims.items()
            if name.endswith("_shape")
        ]
        assert all(shape.adds_in_order for shape in shapes)
        assert {dims.get(f"{name}_parts", 1) for name in DIVIDED} == {1}
    for longest, cuts in (
        (1, 1),
        (300, 1),
        (1024, 1),
        (1025, 2),
        (4097, 8),
        (1 << 17, 16),
    ):
        assert {policy.dims(rows, longest)["cuts"] for rows in ROWS} == {cuts}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "longest", "shares_of_rows"),
    [
        # rows: shares of a KV head, of a task
        (32, 4, 511, {1: (3, 1), 8: (16, 1), 32: (32, 1), 48: (66, 2), 128: (66, 2)}),
        (32, 4, 4096, {1: (16, 1), 8: (16, 1), 32: (32, 1), 128: (66, 2)}),
        (64, 8, 4096, {1: (8, 1), 8: (8, 1), 16: (16, 1), 24: (32, 2), 128: (32, 2)}),
        (16, 2, 64, {1: (1, 1), 64: (64, 1), 128: (132, 2)}),
        (48, 4, 4096, {1: (8, 1), 16: (16, 1), 24: (32, 2)}),  # two tasks of a head
        (160, 80, 64, {1: (1, 1), 128: (2, 2)}),
    ],
)
def test_shares_occupy_the_workers(
    tmp_path, rng, heads, kv_heads, longest, shares_of_rows
):
    config = read_config(make_model(tmp_path, rng))
    policy = StepPolicy(replace(config, heads=heads, kv_heads=kv_heads), 132)
    for rows, shares in shares_of_rows.items():
        dims = policy.dims(rows, longest)
        assert (dims["shares"], dims["shares_of_task"]) == shares
        assert dims["cuts"] == 0


@pytest.mark.parametrize(
    ("changes", "workers", "least"),
    [
        ({}, None, 16),
        ({"heads": 64, "kv_heads": 8}, 132, 33),
        ({"heads": 96, "kv_heads": 8}, 132, 16),  # two tasks of a KV head
        ({"heads": 16, "kv_heads": 2}, 132, 132),
        ({"head_dim": 256}, 132, None),
    ],
)
def test_rows_are_in_blocks_where_shares_would_be_long(
    tmp_path, rng, changes, workers, least
):
    config = replace(read_config(make_model(tmp_path, rng)), **changes)
    policy = StepPolicy(config, workers)
    uses = [n for n in range(513) if policy.has_blocks(n)]
    assert uses == ([] if least is None else [*range(least, 513)])
    assert not replace(policy, in_order=True).has_blocks(512)
    assert policy.dims(512, 500).get("most_blocks", 0) == 0
    all_dims = policy.every(500)
    for rows in uses:
        if rows in ROWS:
            dims = {"rows": rows, "outputs": rows}
            dims |= policy.dims(rows, 500, has_blocks=True)
            assert dims in all_dims
            # Each of several prompts has a block with few rows.
            assert dims["most_blocks"] >= rows // 128 + rows // 64
    names = {name for dims in all_dims for name in dims}
    assert ("most_blocks" in names) == (least is not None)
