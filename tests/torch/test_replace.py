"""Models of transformers with replaced blocks, on one rank."""

import ast
import inspect
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.ao.nn import qat
from torch.ao.quantization import default_qat_qconfig
from torch.nn.utils import parametrizations

import etc_dist.torch
from etc_dist.errors import ArgumentError
from etc_dist.layers.mlp_policy import choose_tiles
from etc_dist.torch import ColumnParallelLinear, MoE, RowParallelLinear
from etc_dist.torch.blocks import MLPS
from tests.torch.on_ranks import assert_close, tiny

pytestmark = pytest.mark.torch
IDS = torch.arange(7)[None] * 5 % 64


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Qwen3Moe", "Mixtral"])
def test_replaced_blocks_give_the_same_logits_with_the_same_weights(kind, group):
    model = tiny(kind)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    with torch.no_grad():
        expected = model(IDS).logits
        assert etc_dist.torch.replace(model) is model
        assert_close(model(IDS).logits, expected)
        generated = model.generate(IDS, max_new_tokens=3, do_sample=False)
    assert generated.shape == (1, 10)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before


@pytest.mark.parametrize(
    "kind", ["Glm4Moe", "Qwen2Moe", "MiniMaxM2", "DeepseekV3", "GptOss"]
)
def test_replaced_blocks_have_the_router_and_the_shared_expert(kind, group):
    sizes = {"n_group": 4, "topk_group": 2, "n_routed_experts": 8, "rotary_dim": 8}
    sizes |= {"first_k_dense_replace": 1, "shared_expert_intermediate_size": 48}
    sizes |= {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
    }
    model = tiny(kind, **sizes | {"qk_nope_head_dim": 8, "v_head_dim": 8})
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(torch.randn(buffer.shape) / 8)
    for name, weight in model.named_parameters():
        if kind == "GptOss" and "experts" in name:
            torch.nn.init.normal_(weight, std=0.3)
    with torch.no_grad():
        expected = model(IDS).logits
        etc_dist.torch.replace(model)
        mlps = [layer.mlp for layer in model.model.layers]
        assert any(type(mlp) is MoE for mlp in mlps)
        assert_close(model(IDS).logits, expected)


def test_replaced_blocks_may_give_the_same_bits_for_any_number_of_tokens(
    group, compiled, monkeypatch
):
    in_order = []

    def choose(*arguments, **options):
        in_order.append(options["in_order"])
        return choose_tiles(*arguments, **options)

    monkeypatch.setattr("etc_dist.layers.mlp.choose_tiles", choose)
    for deterministic in ("run", "batch"):
        for kind in ("Qwen3", "Qwen3Moe"):
            model = tiny(kind, hidden_size=40, head_dim=16)
            with torch.no_grad():
                expected = model(IDS).logits
                etc_dist.torch.replace(model, deterministic=deterministic)
                assert_close(model(IDS).logits, expected)
    # One choice serves both layers of a model.
    assert in_order == [False, True]
    assert compiled.count("moe_few_tokens_graph") == compiled.count("moe_graph") == 1
    assert compiled[-1] == "moe_graph"
    with pytest.raises(ArgumentError, match="unknown deterministic"):
        etc_dist.torch.replace(tiny("Qwen3"), deterministic="always")


def test_models_that_compute_something_else_are_refused(group):
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "vocab_size": 64}
    biased = transformers.LlamaConfig(**sizes, mlp_bias=True)
    gelu = transformers.LlamaConfig(**sizes, hidden_act="gelu")
    for config, text in ((biased, "gate_proj.bias"), (gelu, "act_fn gelu")):
        with pytest.raises(ArgumentError, match=text):
            etc_dist.torch.replace(transformers.LlamaForCausalLM(config))
    with pytest.raises(ArgumentError, match=r"torch\.float32"):
        etc_dist.torch.replace(tiny("Qwen3").float())
    with pytest.raises(ArgumentError, match="Linear with no children"):
        etc_dist.torch.replace(torch.nn.Linear(2, 2))
    recorded = tiny("Qwen3Moe")
    recorded.config.output_router_logits = True
    with pytest.raises(ArgumentError, match="output_router_logits False"):
        etc_dist.torch.replace(recorded)


class Adapted(nn.Module):
    """As PEFT's: it shows the weight and bias of its layer, and adds to its result."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer, self.weight, self.bias = layer, layer.weight, layer.bias

    def forward(self, x):
        return self.base_layer(x) + 1


class Scaled(nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


def scaled(layer):
    module = Scaled(layer.in_features, layer.out_features, bias=False)
    module.weight = layer.weight
    return module


def of_quantized_training(layer):
    module = qat.Linear(*layer.weight.shape[::-1], False, qconfig=default_qat_qconfig)
    module.weight = layer.weight
    return module


def hooked(part, kind="forward"):
    getattr(part, f"register_{kind}_hook")(lambda *arguments: None)
    return part


def patched(part):
    part.forward = lambda x: x
    return part


def with_another_weight(layer):
    class Quantised(nn.Parameter):
        pass

    layer.weight = Quantised(layer.weight.detach())
    return layer


PARTS = {
    "an adapter": (Adapted, "the class Adapted"),
    "a subclass": (scaled, "the class Scaled"),
    "one of torch.ao": (of_quantized_training, "the class Linear"),
    "a hook": (hooked, "hooks"),
    "a hook of gradients": (lambda p: hooked(p, "full_backward"), "hooks"),
    "a patched forward": (patched, "another forward"),
    "a parametrization": (parametrizations.weight_norm, "the class Parametrized"),
    "another weight": (with_another_weight, "a weight of Quantised"),
}


@pytest.mark.parametrize("name", PARTS)
def test_linear_layers_that_may_compute_more_are_refused(name, group):
    change, text = PARTS[name]
    model = tiny("Llama")
    mlp = model.model.layers[1].mlp
    mlp.down_proj = change(mlp.down_proj)
    with pytest.raises(ArgumentError, match=f"down_proj: {text}"):
        etc_dist.torch.replace(model)
    assert type(model.model.layers[0].mlp).__name__ == "LlamaMLP"
    for kind in (ColumnParallelLinear, RowParallelLinear):
        with pytest.raises(ArgumentError, match=text):
            kind.from_linear(mlp.down_proj)


@pytest.mark.parametrize("change", [hooked, patched])
def test_blocks_that_may_compute_more_are_refused(change, group, monkeypatch):
    for kind in ("Llama", "Mixtral"):
        model = tiny(kind)
        change(model.model.layers[0].mlp)
        with pytest.raises(ArgumentError, match="hooks|another forward|block: Mixtral"):
            etc_dist.torch.replace(model)
    model = tiny("Mixtral").model.layers[0].mlp
    change(model.experts.act_fn)
    with pytest.raises(ArgumentError, match="experts.act_fn silu"):
        MoE.from_block(model)
    model = tiny("Llama")
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", lambda self, x: x)
    with pytest.raises(ArgumentError, match="another forward"):
        etc_dist.torch.replace(model)


def test_known_blocks_compute_what_the_mlp_does():
    import transformers

    result = "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
    names = set()
    for file in Path(inspect.getfile(transformers)).parent.glob("models/*/modeling_*"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name in MLPS:
                forward = (
                    ast.unparse(node).partition("def forward")[2].partition("\n")[2]
                )
                forward = forward.replace("hidden_state", "x")
                lines = [line.strip() for line in forward.splitlines()]
                assert lines in (
                    [f"down_proj = {result}", "return down_proj"],
                    [f"return {result}"],
                )
                names.add(node.name)
    assert names >= {"LlamaMLP", "Qwen3MLP", "Qwen3MoeMLP", "MistralMLP"}


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral"])
@pytest.mark.parametrize("tokens", [7, 40])
def test_experts_implementation_gives_the_same_logits(kind, tokens, group):
    etc_dist.torch.register_experts()
    model = tiny(kind, num_experts_per_tok=4)
    ids = torch.arange(tokens)[None] * 5 % 64
    with torch.no_grad():
        expected = model(ids).logits
        model.set_experts_implementation("etc_dist")
        assert_close(model(ids).logits, expected)


def clamped(experts, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return experts.act_fn(gate.clamp(max=1)) * up


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"act_fn": nn.GELU()}, "act_fn gelu"),
        ({"act_fn": nn.Hardswish()}, "act_fn hardswish"),
        ({"act_fn": hooked(nn.SiLU())}, "act_fn silu"),
        ({"_apply_gate": clamped}, "_apply_gate of their own"),
        ({"has_post_expert_norm": True}, "has_post_expert_norm = True"),
        ({"has_another_part": True}, "has_another_part = True"),
    ],
)
def test_experts_that_compute_something_else_are_refused(
    changes, text, group, monkeypatch
):
    etc_dist.torch.register_experts()
    model = tiny("Mixtral")
    model.set_experts_implementation("etc_dist")
    experts = model.model.layers[0].mlp.experts
    for name, value in changes.items():
        owner = type(experts) if callable(value) and name[0] == "_" else experts
        monkeypatch.setattr(owner, name, value, raising=False)
    with torch.no_grad(), pytest.raises(ArgumentError, match=text):
        model(IDS)


def test_experts_have_no_gradient(group):
    model = etc_dist.torch.replace(tiny("Mixtral"))
    with pytest.raises(ArgumentError, match="etc_dist.moe"):
        model(IDS).logits.sum().backward()
