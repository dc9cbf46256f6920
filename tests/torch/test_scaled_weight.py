"""Float8 weights with scales in torch, in one process."""

import pytest
import torch

import etc_dist
from etc_dist import ScaledWeight
from etc_dist.errors import ArgumentError
from etc_dist.settings import Settings
from etc_dist.world import start
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


def test_scaled_operations_can_be_traced(group):
    x, (codes, scales, _) = torch.randn(3, 5, 32).bfloat16(), drawn(48, 32)
    traced = torch.compile(ops.scaled_matmul, fullgraph=True, backend="eager")
    assert_close(traced(x, codes, scales), ops.scaled_matmul(x, codes, scales))
    # test_schema multiplies float8, which torch has no kernel for.
    torch.library.opcheck(
        ops.scaled_matmul, (x, codes, scales), test_utils="test_faketensor"
    )


def test_scaled_operations_refuse_gradients_and_mixed_weights(group):
    x, (codes, scales, w) = torch.randn(5, 32).bfloat16(), drawn(48, 32)
    y = ops.scaled_matmul(x.requires_grad_(), codes, scales)
    with pytest.raises(ArgumentError, match="the operation has no gradient"):
        y.sum().backward()
    x, down = x.detach(), torch.ones(32, 48, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match="no scales"):
        ops.mlp(x, codes, w, down, gate_scales=scales)
    with pytest.raises(ArgumentError, match=r"gate \[inner = 48, hidden = 32\] bf"):
        ops.mlp(x, codes, w, down)
