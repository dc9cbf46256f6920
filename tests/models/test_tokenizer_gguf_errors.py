"""Tokenizers of GGUF files that are damaged or not implemented."""

from __future__ import annotations

import pytest

from etc_dist.errors import ArgumentError
from etc_dist.models import load_tokenizer
from tests.models.test_tokenizer_gguf import written

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")


@pytest.mark.parametrize(
    "metadata",
    [
        {"tokens": ["a"], "eos_token_id": 9},
        {"tokens": ["a"], "bos_token_id": 1},
        {"tokens": ["a"], "bos_token_id": -1},
        {"tokens": ["a"], "token_type": [1, 1]},
        {"tokens": [1]},
    ],
    ids=str,
)
def test_a_file_that_lacks_tokens_is_refused(tmp_path, metadata):
    with pytest.raises(ArgumentError, match=r"tokenizer\.ggml\.tokens, one for each"):
        load_tokenizer(written(tmp_path, **metadata))


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"add_space_prefix": True}, "add_space_prefix: False"),
        ({"add_sep_token": True}, "add_sep_token: False"),
        ({"add_bos_token": True}, "bos_token_id, since add_bos_token is true"),
        ({"add_bos_token": 1}, "add_bos_token: a value of type bool"),
        ({"eos_token_id": "e"}, "eos_token_id: a value of type int"),
        ({"tokens": "e"}, "tokens: a value of type list"),
        ({"merges": ["h x"]}, "merges: pairs of tokens"),
        ({"normalizer": "nfc"}, "no tokenizer.ggml.normalizer"),
    ],
    ids=str,
)
def test_keys_that_are_damaged_or_not_implemented_are_refused(
    tmp_path, metadata, words
):
    with pytest.raises(ArgumentError, match="the tokenizer cannot be used") as caught:
        load_tokenizer(written(tmp_path, **metadata))
    assert words in caught.value.wanted
