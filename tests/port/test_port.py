"""`etc-dist port`: what of a config.json is supported, and the time of a step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from etc_dist import cli
from etc_dist.models import ModelConfig
from etc_dist.models.config import parse_config
from etc_dist.models.setup import ModelSetup
from etc_dist.port.faults import find_faults
from etc_dist.port.step_checks import prove_steps
from etc_dist.port.step_times import FITTED, predict_us

RECORDS = Path(__file__).parents[2] / "benchmarks" / "results" / "decode.jsonl"
DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
    "vocab_size": 151936,
    "eos_token_id": 151645,
}
MIXTURE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
WINDOWS = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
ERNIE = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "moe_capacity": [64, 64, 64],
    "moe_gate": "topk",
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_end_index": 27,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_use_aux_free": True,
    "num_attention_heads": 20,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000,
    "use_bias": False,
    "use_rmsnorm": True,
    "vocab_size": 103424,
}
CONFIGS = {"qwen3-32b": DENSE, "qwen3-30b-a3b": MIXTURE}


@pytest.fixture
def port(tmp_path, capsys):
    """The exit code and the output for fields of a config.json."""

    def port(fields, *options):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(fields))
        code = cli.main(["port", str(path), *options])
        return code, capsys.readouterr().out

    return port


def test_a_supported_config_has_sizes_and_times(port):
    code, text = port(DENSE, "--no-build", "--no-run", "--ranks", "1,4,7")
    assert code == 0
    words = [
        "config.json: supported",
        "64 query heads, 8 KV heads of 128",
        "32.76 G parameters, 262144 bytes of cache a position",
        "  batch    1 rank   4 ranks   7 ranks",
        "      1     17.46      6.40         -",
        "not on 7 ranks: 7 ranks",
        "weights on each of 1 rank: 65.5 GB",
    ]
    assert [word for word in words if word not in text] == [], text


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"attention_multiplier": 2.0, "mlp_bias": True},
            {"attention_multiplier": "attention", "mlp_bias": "the MLP"},
        ),
        ({"attn_logit_softcapping": 9}, {"attn_logit_softcapping": "attention"}),
        ({"hidden_act": "gelu"}, {"hidden_act": "the MLP"}),
        ({"swiglu_limit": 7.0}, {"swiglu_limit": "the MLP"}),
        ({"scoring_func": "tanh"}, {"scoring_func": "the mixture of experts"}),
        (
            {"final_logit_softcapping": 3},
            {"final_logit_softcapping": "the output head"},
        ),
        ({"quantization_config": {"a": 1}}, {"quantization_config": "the weights"}),
        ({"architectures": ["MambaForCausalLM"]}, {"MambaForCausalLM": "the whole"}),
        ({"head_dim": 1024, "x_norm": 2}, {"1024": "attention", "x_norm": "the norms"}),
        ({"intermediate_size": 30}, {"multiples of 8": ""}),
        ({"wonder": 1}, {"wonder": "no part that is known"}),
    ],
    ids=str,
)
def test_each_field_that_is_not_supported_has_its_part(port, changes, parts):
    code, text = port(DENSE | changes)
    assert code == 1 and "config.json: not supported\n" in text
    _, *lines = text.splitlines()
    assert len(lines) == len(parts), text
    for name, part in parts.items():
        assert any(name in line and f": {part}" in line for line in lines), text


def test_a_supported_config_has_no_faults():
    assert find_faults(MIXTURE, Path("config.json")) == []


def records():
    """The newest record of each step of static programs, with uniform routing, that was
    there when constants were fitted."""
    times = {}
    for line in RECORDS.read_text().splitlines():
        entry = json.loads(line)
        is_plain = entry["schedule"] == "static" and entry.get("steps_per_launch") == 1
        is_plain &= entry.get("routing") in (None, "uniform")
        is_plain &= entry["date"] < FITTED
        if is_plain and entry["model"] in CONFIGS and entry["sampling"] == "None":
            key = (
                entry["model"],
                entry["world_size"],
                entry["batch"],
                entry["context"],
            )
            times[key] = 1e3 * entry["ours_ms"]
    return times


def test_predictions_are_near_the_records_that_they_were_fitted_to():
    errors = {}
    for (model, *step), us in records().items():
        config = parse_config(CONFIGS[model], Path("config.json"))
        errors[model, *step] = predict_us(config, *step) / us - 1
    assert len(errors) >= 34
    assert max(map(abs, errors.values())) < 0.15, errors
    assert np.mean(np.abs([*errors.values()])) < 0.05


def test_a_window_bounds_what_a_step_reads():
    config = parse_config(WINDOWS, Path("config.json"))
    times = [predict_us(config, 1, 8, context) for context in (2048, 4096, 32768)]
    assert times[0] < times[1] == times[2]


def test_all_steps_of_a_batch_are_proved():
    fields = DENSE | {"num_hidden_layers": 2, "vocab_size": 512, "hidden_size": 256}
    fields |= {"intermediate_size": 512, "max_position_embeddings": 64}
    config = parse_config(fields | {"eos_token_id": 1}, Path("config.json"))
    setup = ModelSetup(config, batch=8)
    first, second = (prove_steps(setup, batches) for batches in ([1], [1, 8, 7]))
    assert first.startswith("2 steps with ") and second.startswith("4 steps with ")


@pytest.mark.torch
@pytest.mark.parametrize("fields", [DENSE, MIXTURE, WINDOWS, ERNIE], ids="dmwe")
def test_two_layers_run_beside_those_of_transformers(port, fields):
    code, text = port(fields, "--no-build")
    assert code == 0 and "\nran: 23 tokens of 2 layers, transformers " in text, text


@pytest.mark.torch
def test_a_layer_that_differs_fails(port, monkeypatch):
    tables = ModelConfig.tables

    def other(config, positions):
        arrays = tables(config, positions)
        arrays["spans"][:, 0] = 4096  # without the window
        return arrays

    monkeypatch.setattr(ModelConfig, "tables", other)
    code, text = port(WINDOWS, "--no-build")
    assert code == 1 and "\nFAILED: 23 tokens of 2 layers" in text, text


def test_numbers_are_refused_by_name(port, capsys):
    assert cli.main(["port", "x", "--ranks", "1,a"]) == 1
    assert "--ranks cannot be read" in capsys.readouterr().err
    assert cli.main(["port", "/no/config.json"]) == 1
    assert "wanted: a readable config.json" in capsys.readouterr().err
