"""The numbers of steps: few choices, made once."""

from __future__ import annotations

from etc_dist.models import step_policy
from etc_dist.models.config import read_config
from etc_dist.models.step_policy import ROWS, StepPolicy
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
