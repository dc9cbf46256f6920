"""The plug-in of vLLM, in a stand-in for it; and its pass in vLLM's own modules, where
these are installed. tests/torch/on_ranks.py runs a graph like that of vLLM's pass."""

from __future__ import annotations

from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from etc_dist.torch import vllm as plugin
from etc_dist.world import of_group
from tests.torch import vllm_stand_in
from tests.torch.test_on_ranks import torchrun

pytestmark = pytest.mark.torch


@pytest.fixture
def registered(group, monkeypatch):
    """vLLM's modules after `register`."""
    monkeypatch.setattr(plugin, "_is_registered", False)
    monkeypatch.setattr(plugin, "_said", set())
    found = vllm_stand_in.install(monkeypatch, dist.group.WORLD)
    plugin.register()
    plugin.register()  # vLLM may call it twice
    return found


def layer(experts=8, hidden=16, inner=8, **changes):
    torch.manual_seed(0)
    weights = {
        "w13_weight": torch.randn(experts, 2 * inner, hidden) / 4,
        "w2_weight": torch.randn(experts, hidden, inner) / 4,
    }
    plain = {
        "activation": SimpleNamespace(value="silu"),
        "apply_router_weight_on_input": False,
    }
    weights = {name: one.bfloat16() for name, one in weights.items()}
    return SimpleNamespace(**(weights | plain | changes))


def config(top_k=4, **changes):
    parallel = SimpleNamespace(use_ep=False, dp_size=1)
    plain = {"is_lora_enabled": False, "has_bias": False}
    plain |= {"experts_per_token": top_k, "moe_parallel_config": parallel}
    return SimpleNamespace(**(plain | changes))


def call(method, given, rows=5, top_k=4):
    x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    order = torch.rand(rows, len(given.w2_weight)).argsort(1)
    weights = torch.rand(rows, top_k).softmax(1)
    chosen = weights, order[:, :top_k].int()
    expected = vllm_stand_in.UnquantizedFusedMoEMethod.forward_native(
        SimpleNamespace(calls=0), given, x, *chosen, None, None
    )
    found = method.forward_native(given, x, *chosen, None, None)
    return found, expected


def test_the_entry_point_is_the_plug_in():
    [found] = entry_points(group="vllm.general_plugins", name="etc_dist")
    assert found.value == "etc_dist.torch.vllm:register"
    assert found.load() is plugin.register


def test_unquantised_experts_are_ours(registered, capfd):
    method, given = registered.method.registered(config()), layer()
    method.process_weights_after_loading(given)
    found, expected = call(method, given)
    assert method.calls == 0
    assert method.etc_dist_group == dist.group.WORLD.group_name
    difference = (found.float() - expected.float()).abs().max()
    assert difference < 2e-2 * expected.float().abs().max()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("of_layer", "of_config", "text"),
    [
        ({}, {"has_bias": True}, "a bias"),
        ({"activation": SimpleNamespace(value="gelu")}, {}, "the activation gelu"),
        ({"experts": 513}, {}, "513 experts"),
        ({}, {"top_k": 17}, "17 experts of a token"),
        ({"swiglu_limit": 7.0}, {}, "a limit or a scale of SwiGLU"),
        (
            {},
            {"moe_parallel_config": SimpleNamespace(use_ep=True, dp_size=1)},
            "expert or data parallelism",
        ),
    ],
)
def test_other_experts_stay_with_vllm_and_are_named_once(
    of_layer, of_config, text, registered, capfd
):
    for _ in range(2):
        given = layer(**of_layer)
        method = registered.method.registered(config(**of_config))
        method.process_weights_after_loading(given)
        found, expected = call(method, given)
        assert method.calls == 1
        assert torch.equal(found, expected)
    assert capfd.readouterr().err == f"etc_dist: not used by vLLM: experts: {text}\n"


def test_graphs_are_swapped_after_vllms_pass(registered):
    name = dist.group.WORLD.group_name
    registered.parallel_state.initialize_model_parallel(1)
    assert of_group(name)

    def multiply(x, w):
        symm = torch.ops.symm_mem
        return symm.fused_matmul_reduce_scatter(x, w, "sum", 0, name)

    x, w = torch.randn(16, 8).bfloat16(), torch.randn(8, 24).bfloat16()
    captured = make_fx(multiply, tracing_mode="fake")(x, w)
    swap = registered.pass_manager.AsyncTPPass()
    swap(captured.graph)
    assert swap.seen is captured.graph
    captured.recompile()
    assert torch.equal(captured(x, w), torch.ops.etc_dist.matmul(x, w))
    compiled = torch.compile(captured, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, w), captured(x, w))


def test_another_vllm_is_left_alone(registered, monkeypatch, capfd):
    monkeypatch.setattr(plugin, "_is_registered", False)
    monkeypatch.delattr(registered.parallel_state, "initialize_model_parallel")
    plugin.register()
    assert "this version of vLLM is not supported" in capfd.readouterr().err


if find_spec("vllm") is not None:  # not in CI

    def test_vllms_own_pass_gives_our_operations():
        done = torchrun(Path(__file__).with_name("vllm_pass.py"))
        assert done.stdout.count(" passed") == 2, done.stdout
