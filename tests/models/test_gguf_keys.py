"""The keys of a GGUF file that are honoured, or change nothing."""

from __future__ import annotations

from etc_dist.errors import ArgumentError
from etc_dist.models.gguf_file import GgufFile
from etc_dist.models.gguf_keys import (
    EACH_LAYER,
    HONOURED,
    NEUTRAL,
    OWN_SIZES,
    UNUSED,
    WINDOW,
)
from etc_dist.models.gguf_mixtures import PLAIN, VALUES
from tests.models.gguf_bytes import write

YARN = {
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
    "rope.scaling.type": "yarn",
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
EXPERTS = {"expert_count": 8, "expert_feed_forward_length": 24, "expert_used_count": 2}
CHANGES = {
    "attention.head_count": 2,
    "attention.head_count_kv": 2,
    "attention.key_length": 128,
    "attention.layer_norm_rms_epsilon": 1e-3,
    "block_count": 3,
    "context_length": 32,
    "embedding_length": 128,
    "expert_count": 16,
    "expert_feed_forward_length": 32,
    "expert_used_count": 4,
    "feed_forward_length": 72,
    "rope.freq_base": 5e5,
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.type": "none",
    "rope.scaling.yarn_beta_fast": 16.0,
    "rope.scaling.yarn_beta_slow": 2.0,
    "vocab_size": 128,
}
"""Another value of each key that is honoured."""


DOTS = EXPERTS | {
    "block_count": 3,
    "expert_gating_func": 2,
    "expert_group_count": 4,
    "expert_group_used_count": 3,
    "expert_shared_count": 2,
    "expert_shared_feed_forward_length": 48,
    "expert_weights_norm": True,
    "expert_weights_scale": 2.5,
    "leading_dense_block_count": 1,
}
OF_DOTS = {
    "expert_feed_forward_length": 32,
    "expert_gating_func": 1,
    "expert_group_count": 8,
    "expert_group_used_count": 2,
    "expert_shared_count": 3,
    "expert_shared_feed_forward_length": 24,
    "expert_weights_norm": False,
    "expert_weights_scale": 1.0,
    "leading_dense_block_count": 2,
}
"""Another value of each key of mixtures."""


def config_of(folder, architecture="llama", metadata=None, **changes):
    base = {"attention.head_count": 4, "attention.key_length": 64}
    write(folder / "model.gguf", architecture, metadata=metadata, **base | changes)
    return GgufFile(folder / "model.gguf").config()


def test_each_key_that_is_honoured_changes_the_model(tmp_path):
    assert CHANGES.keys() == HONOURED
    for name, value in CHANGES.items():
        is_dense = name in ("feed_forward_length", *YARN)
        architecture, more = ("llama", YARN) if is_dense else ("qwen3moe", EXPERTS)
        before = config_of(tmp_path, architecture, **more)
        entries = more | {name: value}
        assert config_of(tmp_path, architecture, **entries) != before, name


def test_each_key_of_mixtures_changes_the_model_or_is_refused(tmp_path):
    assert OF_DOTS.keys() == VALUES.keys()
    before = config_of(tmp_path, "dots1", **DOTS)
    for name, value in OF_DOTS.items():
        for wrong in (value, "a text", [1.0, 2.0], -1, float("nan")):
            try:
                config = config_of(tmp_path, "dots1", **DOTS | {name: wrong})
            except ArgumentError as error:
                assert error.where == str(tmp_path / "model.gguf")
            else:
                assert wrong == value and config != before, name


def test_files_of_mixtures_have_no_windows(tmp_path):
    sizes = {"block_count": 64, "context_length": 8192}
    assert config_of(tmp_path, "dots1", **DOTS | sizes).windows == ()


def test_neutral_keys_change_nothing(tmp_path):
    config = config_of(tmp_path)
    for last in (0, -1):
        values = {name: values[last] for name, values in (NEUTRAL | PLAIN).items()}
        values |= {name: of(config)[last] for name, of in OWN_SIZES.items()}
        assert config_of(tmp_path, **values) == config
    assert config_of(tmp_path, **{WINDOW: config.positions}) == config
    assert config_of(tmp_path, **dict.fromkeys(UNUSED, "a note")) == config
    assert config_of(tmp_path, **dict.fromkeys(EXPERTS, 0)) == config


def test_equal_numbers_of_all_layers_are_one_number(tmp_path):
    config = config_of(tmp_path, "qwen3", block_count=3)
    numbers = {"attention.head_count": 4, "feed_forward_length": 64}
    numbers["attention.head_count_kv"] = 4
    assert numbers.keys() == set(EACH_LAYER)
    lists = {name: [number] * 3 for name, number in numbers.items()}
    assert config_of(tmp_path, "qwen3", block_count=3, **lists) == config


def test_a_special_token_may_be_none(tmp_path):
    none = {"tokenizer.ggml.eos_token_id": 2**32 - 1, "tokenizer.ggml.eot_token_id": 7}
    assert config_of(tmp_path, metadata=none).stop_tokens == (7,)
