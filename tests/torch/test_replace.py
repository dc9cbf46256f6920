"""Models of transformers with replaced blocks, on one rank."""

import pytest
import torch

import etc_dist.torch
from etc_dist.errors import ArgumentError
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


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral"])
@pytest.mark.parametrize("tokens", [7, 40])
def test_experts_implementation_gives_the_same_logits(kind, tokens, group):
    etc_dist.torch.register_experts()
    model, ids = tiny(kind), torch.arange(tokens)[None] * 5 % 64
    with torch.no_grad():
        expected = model(ids).logits
        model.set_experts_implementation("etc_dist")
        assert_close(model(ids).logits, expected)


def test_experts_with_another_activation_are_refused(group):
    etc_dist.torch.register_experts()
    model = tiny("Mixtral")
    model.set_experts_implementation("etc_dist")
    model.model.layers[0].mlp.experts.act_fn = torch.nn.GELU()
    with torch.no_grad(), pytest.raises(ArgumentError, match="act_fn gelu"):
        model(IDS)


def test_experts_have_no_gradient(group):
    model = etc_dist.torch.replace(tiny("Mixtral"))
    with pytest.raises(ArgumentError, match="etc_dist.moe"):
        model(IDS).logits.sum().backward()
