"""Float8 weights with scales in torch, in one process."""

import pytest
import torch

import etc_dist
from etc_dist import ScaledWeight
from etc_dist.settings import Settings
from etc_dist.world import start

pytestmark = pytest.mark.torch


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
