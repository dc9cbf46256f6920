"""Float8 weights with scales in torch, in one process."""

import pytest
import torch

import etc_dist
from etc_dist import ScaledWeight
from etc_dist.errors import ArgumentError
from etc_dist.settings import Settings
from etc_dist.torch.tensors import as_array
from etc_dist.world import start
from tests.graphs.scaled import dequantized_rows
from tests.torch.on_ranks import assert_close

pytestmark = pytest.mark.torch
ops = torch.ops.etc_dist


def drawn(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales, and the weight that they are of, in bfloat16."""
    w = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) / 8
    codes, scales = etc_dist.quantize(w, per="row")
    # NOTE: rounded scales, by which a product is exact in bfloat16.
    scales = torch.exp2(scales.log2().round())
    return codes, scales, (codes.float() * scales).bfloat16()


def test_matmul_takes_float8_tensors():
    w = torch.arange(-12, 12, dtype=torch.bfloat16).repeat(16, 2)[:, :32].contiguous()
    codes, scales = etc_dist.quantize(w, per="row")
    assert (codes.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    x = torch.ones(3, 32, dtype=torch.bfloat16)
    with start(Settings(backend="cpu")):
        y = etc_dist.matmul(x, ScaledWeight(codes, scales.to(torch.bfloat16)))
        again = etc_dist.matmul(x, ScaledWeight(codes, scales.flatten()))
    torch.testing.assert_close(
        again, (codes.float() * scales).sum(1).bfloat16()[None].expand(3, -1)
    )
    torch.testing.assert_close(y, again, rtol=2**-7, atol=0.1)


def test_scaled_operations_are_those_of_the_dequantized_weights(group):
    x = torch.randn(3, 5, 32, dtype=torch.bfloat16)
    codes, scales, w = drawn(48, 32)
    assert_close(ops.scaled_matmul(x, codes, scales), ops.matmul(x, w.t()))
    gate, up, down = (drawn(*shape) for shape in ((48, 32), (48, 32), (32, 48)))
    scales = {"gate_scales": gate[1], "up_scales": up[1], "down_scales": down[1]}
    y = ops.mlp(x, gate[0], up[0], down[0], **scales)
    assert_close(y, ops.mlp(x, *(weight[2] for weight in (gate, up, down))))


CALLS = {
    "scaled_matmul": (),
    "scaled_matmul_reduce_scatter": ("avg", 1),
    "scaled_all_gather_matmul": (1,),
    "scaled_matmul_all_reduce": ("sum",),
}
"""The arguments after x [3, 5, K], w and scales."""


def traced(op):
    # NOTE: all operations share code, which torch compiles only a few times.
    torch.compiler.reset()
    return torch.compile(op, fullgraph=True, backend="eager")


@pytest.mark.parametrize("activations", ["16-bit", "float8"])
@pytest.mark.parametrize("name", CALLS)
def test_scaled_operations_can_be_traced(name, activations, group):
    op, options = getattr(ops, name), {"activations": activations}
    torch.manual_seed(0)
    x = torch.randn(3, 5, 160).bfloat16()
    codes, scales = etc_dist.quantize(torch.randn(48, 160) / 8)
    operands = x, codes, scales, *CALLS[name]
    y = op(*operands, **options)
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:48, :160]
    rows = dequantized_rows(as_array(x.flatten(0, 1)))
    exact = torch.from_numpy(rows).view(x.shape) if activations == "float8" else x
    assert_close(y, exact.float() @ (codes.float() * wide).t())
    assert torch.equal(traced(op)(*operands, **options), y)
    # test_schema multiplies float8, which torch has no kernel for.
    torch.library.opcheck(op, operands, options, test_utils="test_faketensor")


def test_an_mlp_of_float8_activations_can_be_traced(group):
    torch.manual_seed(0)
    x, shapes = torch.randn(6, 160).bfloat16(), ((144, 160), (144, 160), (160, 144))
    weights = [etc_dist.quantize(torch.randn(*shape) / 8) for shape in shapes]
    names = "gate_scales", "up_scales", "down_scales"
    options = dict(zip(names, (scales for _, scales in weights), strict=True))
    operands = x, *(codes for codes, _ in weights)
    y, rounded = (
        ops.mlp(*operands, activations=value, **options)
        for value in ("16-bit", "float8")
    )
    difference = (rounded.float() - y.float()).norm() / y.float().norm()
    assert 0.01 < difference < 0.1
    y = traced(ops.mlp)(*operands, activations="float8", **options)
    assert torch.equal(y, rounded)


def test_scaled_operations_refuse_gradients_and_mixed_weights(group):
    x, (codes, scales, w) = torch.randn(5, 32).bfloat16(), drawn(48, 32)
    x.requires_grad_()
    for name in CALLS:
        y = getattr(ops, name)(x, codes, scales)
        words = f"no gradient\n.*backward pass of torch.ops.etc_dist.{name}\n"
        with pytest.raises(ArgumentError, match=words):
            y.sum().backward()
    x, down = x.detach(), torch.ones(32, 48, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match="no scales"):
        ops.mlp(x, codes, w, down, gate_scales=scales)
    with pytest.raises(ArgumentError, match=r"gate \[inner = 48, hidden = 32\] bf"):
        ops.mlp(x, codes, w, down)


def test_wrong_arguments_of_scaled_operations_are_refused(group):
    x, (codes, scales, _) = torch.randn(5, 32).bfloat16(), drawn(48, 32)
    weight = codes, scales
    with pytest.raises(ArgumentError, match="scatter_dim: 0 to 0, an axis of x but"):
        ops.scaled_matmul_reduce_scatter(x, *weight, "sum", 1)
    with pytest.raises(ArgumentError, match="reduce_op: sum or avg"):
        ops.scaled_matmul_reduce_scatter(x, *weight, "max")
    with pytest.raises(ArgumentError, match="wanted: reduce_op: sum\n"):
        ops.scaled_matmul_all_reduce(x, *weight, "avg")
    with pytest.raises(ArgumentError, match=r"x: \[..., K\], of two axes or more"):
        ops.scaled_all_gather_matmul(x[0], *weight)
    with pytest.raises(ArgumentError, match="scales of blocks of 128 x 128"):
        ops.scaled_all_gather_matmul(x, *weight, activations="float8")
    with pytest.raises(ArgumentError, match="unknown activations"):
        ops.scaled_matmul(x, *weight, activations="int8")


def drawn_experts(count: int, n: int, k: int) -> list[torch.Tensor]:
    """The same of experts: codes, scales and the weights."""
    parts = zip(*(drawn(n, k) for _ in range(count)), strict=True)
    return [torch.stack(tensors) for tensors in parts]


def test_mixtures_are_those_of_the_dequantized_weights(group):
    x, router = torch.randn(2, 20, 32).bfloat16(), torch.randn(8, 32).bfloat16()
    gate_up, down = drawn_experts(8, 96, 32), drawn_experts(8, 32, 48)
    shared_up, shared_down = drawn(64, 32), drawn(32, 32)
    scaled = {"shared_gate_up": shared_up[0], "shared_down": shared_down[0]}
    scaled |= {"gate_up_scales": gate_up[1], "down_scales": down[1]}
    scaled |= {"shared_gate_up_scales": shared_up[1]}
    scaled |= {"shared_down_scales": shared_down[1]}
    shared = {"shared_gate_up": shared_up[2], "shared_down": shared_down[2]}
    y = ops.moe(x, router, gate_up[0], down[0], 2, **scaled)
    assert_close(y, ops.moe(x, router, gate_up[2], down[2], 2, **shared))
    module = etc_dist.torch.MoE(
        router,
        ScaledWeight(*gate_up[:2]),
        ScaledWeight(*down[:2]),
        top_k=2,
        shared=(ScaledWeight(*shared_up[:2]), ScaledWeight(*shared_down[:2])),
    )
    assert_close(module(x), y)
    names = {name for name, _ in module.named_parameters()}
    assert {"experts.down_proj_scale_inv", "shared.gate_up_proj_scale_inv"} <= names


def test_chosen_experts_have_scales(group):
    x, weights = torch.randn(20, 32).bfloat16(), torch.rand(20, 2)
    ids = torch.stack([torch.randperm(8)[:2] for _ in range(20)])
    gate_up, down = drawn_experts(8, 96, 32), drawn_experts(8, 32, 48)
    wide = ops.moe_experts(x, ids, weights, gate_up[2], down[2])
    for scales in (down[1], down[1].flatten(1)):
        options = {"gate_up_scales": gate_up[1], "down_scales": scales}
        y = ops.moe_experts(x, ids, weights, gate_up[0], down[0], **options)
        assert_close(y, wide)
    with pytest.raises(ArgumentError, match="scales: of one kind(?s:.)*, nk\n"):
        ops.moe_experts(x, ids, weights, gate_up[0], down[2], gate_up_scales=gate_up[1])


def test_chosen_experts_of_one_block_have_its_scale(group):
    """Gate and up have two blocks."""
    x, weights = torch.randn(20, 128).bfloat16(), torch.rand(20, 1)
    ids = torch.randint(4, (20, 1))
    w = [torch.randn(4, *shape) / 8 for shape in ((192, 128), (128, 96))]
    (gate_up, up_scales), (down, down_scales) = map(etc_dist.quantize, w)
    assert (up_scales.shape[1], down_scales.shape[1]) == (2, 1)
    options = {"gate_up_scales": up_scales, "down_scales": down_scales}
    y = ops.moe_experts(x, ids, weights, gate_up, down, **options)
    wide = [
        (codes.float() * scales.repeat_interleave(128, 1)[:, : codes.shape[1]])
        for codes, scales in ((gate_up, up_scales), (down, down_scales))
    ]
    gate, up = torch.einsum("mh,mih->mi", x.float(), wide[0][ids[:, 0]]).chunk(2, 1)
    active = torch.nn.functional.silu(gate) * up
    expected = torch.einsum("mi,mhi->mh", active, wide[1][ids[:, 0]]) * weights
    assert (y - expected).norm() < 0.01 * expected.norm()
