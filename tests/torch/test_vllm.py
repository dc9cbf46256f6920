"""The plug-in of vLLM, in a stand-in for it; and its pass in vLLM's own modules, where
these are installed. tests/torch/on_ranks.py runs a graph like that of vLLM's pass."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
import torch
from torch import distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from etc_dist.torch import vllm as plugin
from etc_dist.torch import vllm_graphs
from tests.torch import vllm_stand_in, vllm_wheels
from tests.torch.test_on_ranks import torchrun

pytestmark = pytest.mark.torch


@pytest.fixture
def stand_in(group, monkeypatch):
    """vLLM's modules before `register`."""
    monkeypatch.setattr(plugin, "_is_registered", False)
    monkeypatch.setattr(vllm_graphs, "_printed_texts", set())
    return vllm_stand_in.install(monkeypatch, dist.group.WORLD)


@pytest.fixture
def registered(stand_in):
    plugin.register()
    plugin.register()  # vLLM may call it twice
    return stand_in


def layer(experts=8, hidden=16, inner=8, **changes):
    torch.manual_seed(0)
    weights = {
        "w13_weight": torch.randn(experts, 2 * inner, hidden) / 4,
        "w2_weight": torch.randn(experts, hidden, inner) / 4,
    }
    plain = {
        "activation": SimpleNamespace(value="silu"),
        "apply_router_weight_on_input": False,
        **dict.fromkeys(("swiglu_limit", "swiglu_alpha", "swiglu_beta")),
    }
    weights = {name: weight.bfloat16() for name, weight in weights.items()}
    return SimpleNamespace(**(weights | plain | changes))


def config(top_k=4, **changes):
    parallel = SimpleNamespace(use_ep=False, dp_size=1)
    plain = {"is_lora_enabled": False, "has_bias": False}
    plain |= {"experts_per_token": top_k, "moe_parallel_config": parallel}
    return SimpleNamespace(**(plain | changes))


def call(method, experts, rows=5, top_k=4, padded=0):
    x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    order = torch.rand(rows, len(experts.w2_weight)).argsort(1)
    weights = torch.rand(rows, top_k).softmax(1)
    ids = order[:, :top_k].int()
    ids[rows - padded :] = -1
    choice = weights, ids
    expected = vllm_stand_in.UnquantizedFusedMoEMethod.forward_native(
        SimpleNamespace(calls=0), experts, x, *choice, None, None
    )
    result = method.forward_native(experts, x, *choice, None, None)
    return result, expected


def communicator(parts, unique_name="tp:0"):
    """That of the tensor-parallel ranks, as vLLM makes it."""
    kind = vllm_stand_in.resolve(parts.platform.get_device_communicator_cls())
    group = dist.group.WORLD
    parts.tp.device_communicator = kind(
        cpu_group=group, device_group=group, unique_name=unique_name
    )
    return parts.tp.device_communicator


def manager(parts):
    """vLLM's passes, configured."""
    passes = vllm_stand_in.resolve(parts.platform.get_pass_manager_cls())()
    passes.configure(parts.config)
    return passes


def kept(capfd):
    """What vLLM keeps, as it was said."""
    lines = capfd.readouterr().err.splitlines()
    return [line.removeprefix("etc_dist: not used by vLLM: ") for line in lines]


def test_the_entry_point_is_the_plug_in():
    [entry] = entry_points(group="vllm.general_plugins", name="etc_dist")
    assert entry.value == "etc_dist.torch.vllm:register"
    assert entry.load() is plugin.register


@pytest.mark.parametrize("top_k", [1, 6])
def test_unquantised_experts_are_ours(top_k, registered, capfd):
    method, experts = registered.method.registered(config(top_k)), layer()
    method.process_weights_after_loading(experts)
    result, expected = call(method, experts, top_k=top_k, padded=2)
    assert method.calls == 0
    assert method.etc_dist_group == dist.group.WORLD.group_name
    difference = (result.float() - expected.float()).abs().max()
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
        experts = layer(**of_layer)
        method = registered.method.registered(config(**of_config))
        method.process_weights_after_loading(experts)
        result, expected = call(method, experts)
        assert method.calls == 1
        assert torch.equal(result, expected)
    assert kept(capfd) == [f"experts: {text}"]


def test_sums_of_tensor_parallel_ranks_are_ours(registered, capfd):
    ours, x = communicator(registered), torch.ones(3, 8).bfloat16()
    assert torch.equal(ours.all_reduce(x), x)
    for tensor in (x.float(), x[:, :7].flatten(), x[:0]):
        assert not ours.all_reduce(tensor).any()
    assert communicator(registered, "ep:0").etc_dist_group is None
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("pipeline_parallel_size", 2, "pipeline or data parallelism"),
        ("data_parallel_size", 2, "pipeline or data parallelism"),
        ("enable_dbo", True, "dual batch overlap"),
    ],
)
def test_kernels_that_wait_beside_ours_keep_the_collectives(
    name, value, text, registered, capfd
):
    setattr(registered.config.parallel_config, name, value)
    assert communicator(registered).etc_dist_group is None
    assert kept(capfd) == [f"collectives: {text}"]


def test_vllms_switch_keeps_its_sums(registered, monkeypatch):
    monkeypatch.setattr(vllm_stand_in.CudaCommunicator, "use_custom_allreduce", False)
    assert not communicator(registered).all_reduce(torch.ones(8).half()).any()


def tensor_parallel(x, w, residual, gain):
    name = dist.group.WORLD.group_name
    y = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, name)
    total = torch.ops.vllm.all_reduce(y, "tp:0")
    norm = torch.ops.vllm_ir.fused_add_rms_norm
    y, residual = norm(total, residual, gain, 1e-6)
    return y + residual


SHAPES = (16, 8), (8, 24), (16, 24), (24,)


def captured(function, dtype=torch.bfloat16):
    tensors = [torch.randn(shape).to(dtype) for shape in SHAPES]
    return make_fx(function, tracing_mode="fake")(*tensors), tensors


def test_graphs_are_rewritten_before_vllm_fuses_norms(registered, capfd):
    communicator(registered)
    graph, tensors = captured(tensor_parallel)
    passes = manager(registered)
    names = [type(step).__name__ for step in passes.passes]
    assert names == ["AsyncTPPass", "CallableInductorPass", "AllReduceFusionPass"]
    x, w, residual, gain = tensors
    expected = sum(vllm_stand_in.fused_add_rms_norm(x @ w, residual, gain, 1e-6))
    passes(graph.graph)
    graph.graph.lint()
    graph.recompile()
    assert graph.code.count("torch.ops.etc_dist.") == 2, graph.code
    assert "torch.ops.vllm" not in graph.code
    result = graph(*tensors)
    assert (result - expected).abs().max() < 2e-2 * expected.abs().max()
    compiled = torch.compile(graph, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*tensors), result)
    assert capfd.readouterr().err == ""


def test_a_quantised_model_keeps_its_norms(registered, capfd):
    communicator(registered)
    registered.config.model_config.quantization = "fp8"
    graph, _ = captured(tensor_parallel)
    manager(registered)(graph.graph)
    graph.recompile()
    assert graph.code.count("torch.ops.etc_dist.") == 1
    assert kept(capfd) == ["all_reduce_norm: a quantised model"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"gain": lambda g: g.float() + 1},
            "operands of torch.bfloat16, torch.float32",
        ),
        ({"total": lambda y, total: y + total}, "another user of the sum"),
        ({"size": 8}, "a norm of a part of each row"),
        ({"gain": lambda g: None}, "operands of unknown shape, or no weights"),
        ({"group": "tp:1"}, "no world over its group"),
    ],
)
def test_norms_that_are_not_served_stay_and_are_named(change, text, registered, capfd):
    same = {"gain": lambda g: g, "total": lambda y, _: y, "size": None, "group": "tp:0"}
    get = (same | change).get

    def layer(x, w, residual, gain):
        total = torch.ops.vllm.all_reduce(x @ w, get("group"))
        norm = torch.ops.vllm_ir.fused_add_rms_norm
        y, _ = norm(total, residual, get("gain")(gain), 1e-6, get("size"))
        return get("total")(y, total)

    communicator(registered)
    graph, _ = captured(layer)
    manager(registered)(graph.graph)
    graph.recompile()
    assert "torch.ops.etc_dist" not in graph.code
    assert kept(capfd) == [f"all_reduce_norm: {text}"]


def test_vllms_cache_keeps_our_graphs_apart(registered):
    assert registered.pass_config().compute_hash() != "hash"


def test_of_an_unknown_version_only_hooks_that_fit_are_used(
    stand_in, monkeypatch, capfd
):
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.34.0")
    method = stand_in.method
    monkeypatch.setattr(method, "forward_native", lambda self, layer, x, choice: x)
    plugin.register()
    text = capfd.readouterr().err
    assert method.registered is None
    assert "fits vLLM 0.24 to 0.31, and runs in 0.34.0\n" in text
    assert "experts is not used: " in text
    assert "forward_native(self, layer, x, choice) in place of" in text
    assert communicator(stand_in).etc_dist_group
    monkeypatch.setattr(plugin, "_is_registered", False)
    monkeypatch.delattr(vllm_stand_in.CudaCommunicator, "all_reduce")
    plugin.register()
    text = capfd.readouterr().err
    assert "all_reduce is not used: AttributeError" in text
    assert "graphs is not used: it needs the world of all_reduce" in text


def test_the_files_of_a_wheel_show_what_it_lacks(tmp_path):
    with ZipFile(tmp_path / "vllm-0.31.0-any.whl", "w") as files:
        files.writestr(
            "vllm/base.py", "class Base:\n def run(self, x, y=1): self.z = x"
        )
        files.writestr("vllm/a.py", "from .base import Base as B\nclass A(B): w: int")
    wheel = vllm_wheels.Wheel(tmp_path / "vllm-0.31.0-any.whl")
    for same in ("A.run(self, x, y)", "A.z", "A.w"):
        assert wheel.seen("vllm.a", same) == same
    assert wheel.seen("vllm.a", "A.run(self, x)") == "A.run(self, x, y)"
    assert wheel.seen("vllm.a", "A.v") == wheel.seen("vllm.b", "A") == "nothing"
    assert not vllm_wheels.compare(tmp_path / "vllm-0.31.0-any.whl")


if find_spec("vllm") is not None:  # not in CI

    def test_vllms_own_pass_gives_our_operations():
        process = torchrun(Path(__file__).with_name("vllm_pass.py"))
        assert process.stdout.count(" passed") == 2, process.stdout
