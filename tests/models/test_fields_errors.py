"""Fields of config.json that are refused by their names."""

from __future__ import annotations

import json

import pytest

from etc_dist.errors import ArgumentError
from etc_dist.models.config import read_config
from etc_dist.models.fields import NEUTRAL
from tests.models.test_config import write


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_a_value_that_is_not_neutral_is_refused(name, tmp_path):
    with pytest.raises(ArgumentError) as caught:
        write(tmp_path, **{name: 12345})
    assert caught.value.got == f"{name} = 12345"
    assert caught.value.wanted.startswith(f"{name} ")


@pytest.mark.parametrize("value", [0, 1, True, "sigmoid", [0], {"a": 0}])
def test_a_field_that_is_unknown_is_refused(value, tmp_path):
    with pytest.raises(ArgumentError, match="no unknown field logit_scale") as caught:
        write(tmp_path, logit_scale=value)
    assert caught.value.got == f"logit_scale = {json.dumps(value)}"


def test_all_fields_are_named_at_once(tmp_path):
    with pytest.raises(ArgumentError) as caught:
        write(tmp_path, is_causal=False, embedding_multiplier=12, scale="x" * 100)
    wanted = "embedding_multiplier 1 or null; is_causal true or null; no unknown field"
    assert caught.value.wanted == f"{wanted} scale"
    assert caught.value.got.startswith("embedding_multiplier = 12; is_causal = false; ")
    assert caught.value.got.endswith("...")


def test_the_fields_of_a_generation_config_are_refused_too(tmp_path):
    write(tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text('{"forced_bos_token_id": 3, "other": 1}')
    with pytest.raises(ArgumentError, match="forced_bos_token_id null") as caught:
        read_config(tmp_path)
    assert caught.value.where == str(path)
    assert caught.value.got == "forced_bos_token_id = 3; other = 1"
