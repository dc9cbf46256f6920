"""The operations of torch.ops.etc_dist in one process."""

import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest
import torch
import torch.distributed._symmetric_memory
from torch import nn

import etc_dist.torch
from etc_dist.errors import ArgumentError, WorldError
from etc_dist.runtime.arrays import empty_like
from etc_dist.torch import ColumnParallelLinear, RowParallelLinear
from etc_dist.world import start
from tests.torch.on_ranks import assert_close

pytestmark = pytest.mark.torch
ops = torch.ops.etc_dist


def random(*shape: int, grad: bool = False):
    generator = torch.Generator().manual_seed(sum(shape))
    tensor = torch.randn(*shape, generator=generator) / 4
    return tensor.to(torch.bfloat16).requires_grad_(grad)


def test_signatures_are_those_of_symm_mem():
    for name in ("fused_matmul_reduce_scatter", "fused_all_gather_matmul"):
        schema = getattr(ops, name).default._schema
        theirs = getattr(torch.ops.symm_mem, name).default._schema
        assert str(schema).partition("::")[2] == str(theirs).partition("::")[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_torch_allocates_an_output_of_another_dtype(dtype):
    name = str(dtype).removeprefix("torch.")
    output = empty_like(random(2), (3, 4), dtype=name)
    assert (output.shape, output.dtype) == ((3, 4), dtype)


CALLS = {
    "reduce_scatter": (
        "fused_matmul_reduce_scatter",
        lambda g: (random(16, 8, grad=True), random(8, 24, grad=True), "sum", 0, g),
    ),
    "reduce_scatter of a view": (
        "fused_matmul_reduce_scatter",
        lambda g: (random(2, 16, 8, grad=True), random(24, 8).t(), "avg", 1, g),
    ),
    "all_gather": (
        "fused_all_gather_matmul",
        lambda g: (random(16, 8, grad=True), [random(8, 24, grad=True)], 0, g),
    ),
    "all_gather for two": (
        "fused_all_gather_matmul",
        lambda g: (random(2, 16, 8), [random(8, 24), random(24, 8).t()], 1, g),
    ),
    "matmul": ("matmul", lambda g: (random(5, 8, grad=True), random(24, 8).t())),
    "all_reduce": ("all_reduce", lambda g: (random(3, 5, 8, grad=True), "sum", g)),
    "all_reduce_norm": (
        "all_reduce_norm",
        lambda g: (random(3, 5, 8), random(3, 5, 8), random(8), 1e-5, g),
    ),
    "matmul_all_reduce": (
        "matmul_all_reduce",
        lambda g: (random(2, 5, 8, grad=True), random(24, 8).t(), "sum", g),
    ),
    "mlp": ("mlp", lambda g: (random(2, 3, 8), *[random(16, 8)] * 2, random(8, 16))),
    "moe": (
        "moe",
        lambda g: (random(4, 8), random(8, 8), random(8, 16, 8), random(8, 8, 8), 2),
    ),
    "moe_experts": (
        "moe_experts",
        lambda g: (
            random(3, 8),
            torch.tensor([[0, 5, 2, 3], [7, 2, 1, 4], [5, 1, 6, 0]]),
            random(3, 4).abs(),
            random(8, 16, 8),
            random(8, 8, 8),
        ),
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_operations_pass_opcheck(call, group):
    name, arguments = CALLS[call]
    op, operands = getattr(ops, name).default, arguments(group.group_name)
    torch.library.opcheck(op, operands)
    if "deterministic" in str(op._schema):
        torch.library.opcheck(op, operands, {"deterministic": "batch"})
    if name == "moe":
        torch.library.opcheck(
            op, operands, {"count": torch.tensor([3], dtype=torch.int32)}
        )


def test_wrong_arguments_are_refused(group):
    name, x = group.group_name, random(16, 8)
    with pytest.raises(ArgumentError, match="scatter_dim: 0 to 0"):
        ops.fused_matmul_reduce_scatter(x, x.t(), "sum", 1, name)
    with pytest.raises(ArgumentError, match="reduce_op: sum or avg"):
        ops.fused_matmul_reduce_scatter(x, x.t(), "max", 0, name)
    with pytest.raises(ArgumentError, match=r"B \[K, N\]"):
        ops.fused_all_gather_matmul(x, [x[0]], 0, name)
    for op, operands in ((ops.all_reduce, [x]), (ops.matmul_all_reduce, [x, x.t()])):
        with pytest.raises(ArgumentError, match="wanted: reduce_op: sum\n.*'max'"):
            op(*operands, "max", name)
    with pytest.raises(ArgumentError, match=r"residual: the shape of x, \[16, 8\]"):
        ops.all_reduce_norm(x, x[:4], x[0], 1e-6, name)
    with pytest.raises(ArgumentError, match=r"x: one axis or more, \[..., H\]"):
        ops.all_reduce_norm(x[0, 0], x[0, 0], x[0], 1e-6, name)
    with pytest.raises(ArgumentError, match=r"x \[rows, 8 \* vectors\]"):
        ops.all_reduce(x[:3, :4], "sum", name)
    with pytest.raises(ArgumentError, match="unknown reduce"):
        RowParallelLinear(x, reduce="both")
    for linear in (ColumnParallelLinear, RowParallelLinear):
        with pytest.raises(ArgumentError, match=r"bias \[16\]\n.*bias \[1\]"):
            linear(x, x[0, :1])
    with pytest.raises(ArgumentError, match="bfloat16 or float16"):
        ops.matmul(x.float(), x.float().t())
    with pytest.raises(ArgumentError, match="unknown deterministic"):
        ops.matmul(x, x.t(), deterministic="always")
    operands = CALLS["moe"][1](name)
    for option, words in (
        ("gate_up_bias", r"expert_biases: a pair .*\n.*\(Tensor, NoneType\)"),
        ("shared_down", r"shared: a pair .*\n.*\(NoneType, Tensor\), shared_gate None"),
        ("shared_gate", r"shared: a pair .*\n.*NoneType, shared_gate Tensor"),
    ):
        with pytest.raises(ArgumentError, match=words):
            ops.moe(*operands, **{option: x})
    with pytest.raises(WorldError, match="no world over this process group"):
        ops.fused_matmul_reduce_scatter(x, x.t(), "sum", 0, "another")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
def test_experts_of_padding_add_nothing(dtype, group):
    x, ids, weights, *of_experts = CALLS["moe_experts"][1](group.group_name)
    whole = ops.moe_experts(x, ids, weights, *of_experts)
    ids[1], ids[2, 0] = -1, -1
    sums = ops.moe_experts(x, ids.to(dtype), weights, *of_experts)
    assert torch.equal(sums[0], whole[0])
    assert not sums[1].any()
    weights[2, 0] = 0
    ids[2, 0] = 5
    assert torch.equal(sums[2], ops.moe_experts(x, ids, weights, *of_experts)[2])


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (torch.tensor([[0, 5], [8, 2], [5, 1]]), "id 8"),
        (torch.tensor([[0, 5], [-2, 2], [5, 1]]), "id -2"),
        (torch.tensor([[0, 5], [7, 2**32 + 3], [5, 1]]), f"id {2**32 + 3}"),
        (torch.tensor([[0.0, 5], [7, 2], [5, 1]]), "torch.float32"),
        (torch.tensor([[True, False]] * 3), "torch.bool"),
    ],
    ids=["large", "negative", "beyond 32 bits", "floats", "bools"],
)
def test_ids_that_are_not_experts_are_refused(wrong, text, group):
    x, ids, *weights = CALLS["moe_experts"][1](group.group_name)
    with pytest.raises(ArgumentError) as caught:
        ops.moe_experts(x, wrong, *weights)
    assert caught.value.wanted == "ids: integers, 0 to 7, or -1 for no expert"
    assert caught.value.got == text
    ops.moe_experts(x, ids, *weights)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("call", CALLS)
def test_forward_mode_derivatives_are_refused(call, group):
    name, arguments = CALLS[call]
    first, *operands = arguments(group.group_name)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(first, torch.ones_like(first))
        with pytest.raises(ArgumentError, match="forward-mode"):
            getattr(ops, name)(dual, *operands)


def test_a_negated_view_is_not_taken_for_the_remembered_tensor(group):
    x, w, out = random(16, 8), random(24, 8), random(16, 24)
    etc_dist.matmul(x, w, out=out)
    with pytest.raises(ArgumentError, match="negation"):
        etc_dist.matmul(torch._neg_view(x), w, out=out)


def test_a_broken_world_is_replaced_by_another_over_its_group(group, monkeypatch):
    name, x = group.group_name, random(16, 8)
    broken = start(group.settings, process_group=torch.distributed.group.WORLD)
    broken.leave("a failure of this rank alone")
    monkeypatch.setitem(etc_dist.torch.ops._open, name, broken)
    y = ops.fused_matmul_reduce_scatter(x, x.t(), "sum", 0, name)
    broken.close()
    torch.testing.assert_close(y, x @ x.t())


def test_layers_of_one_shape_share_a_program(group, compiled):
    x = random(4, 8)
    for _ in range(3):
        ops.mlp(x, random(40, 8), random(40, 8), random(8, 40))
    assert len(compiled) <= 1


if which("g++") is not None:  # compiles the rest of the model

    @pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
    def test_inductor_compiles_a_model(group):
        model = nn.Sequential(
            ColumnParallelLinear(random(48, 16)),
            nn.SiLU(),
            RowParallelLinear(random(16, 48)),
        )
        x = random(32, 16, grad=True)
        parameters = [x, *model.parameters()]
        expected, y = model(x), torch.compile(model, fullgraph=True)(x)
        assert_close(y, expected)
        expected_gradients = torch.autograd.grad(expected.sum(), parameters)
        gradients = torch.autograd.grad(y.sum(), parameters)
        for gradient, reference in zip(gradients, expected_gradients, strict=True):
            assert_close(gradient, reference)


def test_the_cost_of_the_operations_is_measured_without_a_gpu():
    script = Path(__file__).parents[2] / "benchmarks" / "run.py"
    command = [sys.executable, script, "torch_cost", "--cpu"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert process.stdout.count("added_us") == 4, process.stdout + process.stderr
