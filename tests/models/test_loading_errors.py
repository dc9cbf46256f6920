"""Files of models that are refused before they are read."""

from __future__ import annotations

import os

import pytest

from etc_dist.errors import ArgumentError
from etc_dist.models.loading import read_model
from etc_dist.models.part import WHOLE
from etc_dist.models.tokenizer_files import load_tokenizer
from tests.models.small import make_model
from tests.models.test_tokenizer import made as make_tokenizer


def read_all(folder):
    _, read_weights = read_model(folder, "bfloat16")
    load_tokenizer(folder)
    read_weights("bfloat16", WHOLE)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
    ],
)
def test_a_fifo_in_place_of_a_file_is_refused_by_name(tmp_path, rng, name):
    make_tokenizer(tmp_path)
    folder = make_model(tmp_path, rng)
    read_all(folder)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ArgumentError, match="not a regular file") as caught:
        read_all(folder)
    assert caught.value.where == str(folder / name)
