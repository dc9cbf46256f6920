"""Fields, defaults and files of transformers, whose version `.ci/run` pins."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib import import_module
from inspect import getsource

import pytest

from etc_dist.models.config import MODEL_TYPES, parse_config
from etc_dist.models.fields import DECODING, HONOURED, NEUTRAL, UNUSED

pytestmark = pytest.mark.torch
LISTED = HONOURED | NEUTRAL.keys() | DECODING | UNUSED
SIZES = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
NEEDED = {
    "glm4_moe": {"head_dim": 128},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}
    | {"head_dim": 128},
}
"""The default sizes have heads of a size that is refused, or no experts."""
READ = re.compile(r'\bconfig\.([a-z]\w*)|attr\([\w.]*config, "(\w+)"')
"""What the code of transformers reads of a configuration."""


def config_class(kind):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[kind]


@pytest.mark.parametrize("kind", MODEL_TYPES.values())
def test_each_field_of_a_configuration_is_listed(kind):
    cls = config_class(kind)
    config = cls()
    names = {field.name for field in fields(cls)} | cls.attribute_map.keys()
    names |= vars(config).keys() | config.to_dict().keys()
    never = {"_post_init_done", "ignore_keys_at_rope_validation"}  # in a file
    assert names - LISTED <= never


@pytest.mark.parametrize("kind", MODEL_TYPES.values())
def test_each_field_that_a_model_reads_is_listed(kind):
    module = config_class(kind).__module__.replace("configuration_", "modeling_")
    model = import_module(module)
    code = getsource(model) + getsource(import_module("transformers.masking_utils"))
    names = {first or second for first, second in READ.findall(code)}
    assert {"is_causal", "rms_norm_eps"} <= names
    cls = config_class(kind)
    methods = {name for name in names if callable(getattr(cls, name, None))}
    of_images = {"vision_config", "text_config", "image_token_id"}
    of_images |= {"mm_tokens_per_image"}
    assert names - methods - LISTED - of_images == set()


def test_each_field_of_a_generation_config_is_listed():
    from transformers import GenerationConfig

    config = GenerationConfig()
    assert vars(config).keys() | config.to_dict().keys() <= LISTED


@pytest.mark.parametrize("kind", MODEL_TYPES.values())
def test_missing_fields_have_the_defaults_of_transformers(kind, tmp_path):
    more = NEEDED.get(kind, {})
    theirs = parse_config(config_class(kind)(**more).to_dict(), tmp_path)
    assert parse_config({"model_type": kind, **more}, tmp_path) == theirs


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_saved_configurations(name, tmp_path, golden):
    """The default tests read these files."""
    kind = MODEL_TYPES[name]
    sizes = SIZES | NEEDED.get(kind, {})
    config = config_class(kind)(**sizes, architectures=[name], dtype="bfloat16")
    config.save_pretrained(tmp_path)
    golden((tmp_path / "config.json").read_text())
