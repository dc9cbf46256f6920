"""The numbers of steps: few choices, made once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etc_dist.functions.router import Router
from etc_dist.models import step_policy
from etc_dist.models.config import read_config
from etc_dist.models.experts import Mixture
from etc_dist.models.step_policy import ROWS, StepPolicy, shapes_of
from tests.models.small import make_model


def test_each_choice_is_listed_and_made_once(tmp_path, rng, monkeypatch):
    config = read_config(make_model(tmp_path, rng))
    policy = StepPolicy(config, 132)
    listed = policy.every(500)
    monkeypatch.setattr(step_policy, "choose", None)
    for rows in ROWS:
        for longest in (1, 127, 128, 255, 256, 384, 499, 500):
            assert {"rows": rows, **policy.dims(rows, longest)} in listed
    policy.dims(1, 1).clear()
    assert policy.dims(1, 1)


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@pytest.mark.parametrize("workers", [None, 132])
@pytest.mark.parametrize("mixture", [None, Mixture(8, Router(2), "plain")])
def test_the_sums_of_a_row_may_depend_on_its_own_length_alone(
    tmp_path, rng, mixture, workers, schedule
):
    config = read_config(make_model(tmp_path, rng))
    shared_inner = 0 if mixture is None else 64
    config = replace(config, mixture=mixture, shared_inner=shared_inner)
    policy = StepPolicy(config, workers, shapes_of(schedule), in_order=True)
    for dims in policy.every(4096):
        shapes = [policy.shapes[n] for name, n in dims.items() if "shape" in name]
        assert {shape.k_parts for shape in shapes} == {1}
        assert dims["attend_heads"] == 1
    for longest in (1, 300, 2048, 4096):
        slices = {policy.dims(rows, longest)["slices"] for rows in ROWS}
        assert slices == {1 if workers is None else {1: 1, 300: 2}.get(longest, 16)}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "wanted"),
    [
        (32, 4, {1: 1, 32: 1, 48: 2, 64: 2, 96: 4, 128: 4}),
        (64, 8, {16: 1, 32: 2, 128: 4}),
        (18, 6, {16: 1, 24: 2, 128: 2}),
        (36, 4, {128: 1}),  # more than a task has of one head
    ],
)
def test_tasks_attend_to_more_heads_where_workers_are_few(
    tmp_path, rng, heads, kv_heads, wanted
):
    config = read_config(make_model(tmp_path, rng))
    policy = StepPolicy(replace(config, heads=heads, kv_heads=kv_heads), 132)
    assert {n: policy.dims(n, 2047)["attend_heads"] for n in wanted} == wanted
    assert policy.dims(128, 2048)["attend_heads"] == 1
