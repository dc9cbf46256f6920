"""The checks of tests/torch/test_on_ranks.py: each rank of torchrun runs them in order,
and prints which of them passed. Also on GPUs, which the ranks may share."""

import traceback
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import etc_dist.torch
from etc_dist import Router, Settings, World, start
from etc_dist.errors import ArgumentError, ArgumentTypeError
from etc_dist.models import load
from etc_dist.torch import ColumnParallelLinear, RowParallelLinear
from etc_dist.torch.vllm_graphs import fuse_norms, swap_collectives
from tests.torch import vllm_stand_in

BF16 = torch.bfloat16
SHAPES = ((32, 16), 0), ((2, 32, 16), 1), ((32, 3, 16), 0)
ops = torch.ops.etc_dist
name = ""
"""The name of the process group."""


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    """Different values on each rank."""
    generator = torch.Generator(torch.get_default_device())
    generator.manual_seed(97 * dist.get_rank() + seed)
    tensor = torch.randn(*shape, generator=generator) / 4
    return tensor.to(dtype).requires_grad_()


def joined(part: Tensor, dim: int = 0) -> Tensor:
    """The parts of all ranks along `dim`, in float32."""
    part = part.detach().float().contiguous()
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    return torch.cat(parts, dim)


def summed(whole: Tensor, dim: int = 0) -> Tensor:
    """This rank's part along `dim` of the sum over ranks, in float32."""
    total = whole.detach().float().contiguous()
    dist.all_reduce(total)
    return total.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def rows(tensor: Tensor) -> Tensor:
    return tensor.detach().float().flatten(0, -2)


def assert_close(result: Tensor, expected: Tensor) -> None:
    """Within the rounding of bfloat16, relative to the largest element."""
    assert result.shape == expected.shape, (result.shape, expected.shape)
    difference = (result.detach().float() - expected.detach().float()).abs().max()
    assert difference < 2e-2 * expected.abs().max(), difference


def check_reduce_scatter() -> None:
    for shape, dim in SHAPES:
        for dtype in (BF16, torch.float16):
            A = random(*shape, dtype=dtype)
            W, B = random(24, 16, dtype=dtype), random(16, 8, dtype=dtype)
            y = ops.fused_matmul_reduce_scatter(A, W.t(), "sum", dim, name)
            assert_close(y, summed(A.float() @ W.float().t(), dim))
            y = ops.fused_matmul_reduce_scatter(A, B, "avg", dim, name)
            mean = summed(A.float() @ B.float(), dim) / dist.get_world_size()
            assert_close(y, mean)


def check_options_that_differ_are_refused() -> None:
    A, B = random(4, 4, 16), random(16, 8)
    is_first = dist.get_rank() == 0
    calls = [
        lambda: ops.fused_matmul_reduce_scatter(
            A, B, "sum", 0 if is_first else 1, name
        ),
        lambda: ops.fused_matmul_reduce_scatter(
            A, B, "sum" if is_first else "avg", 0, name
        ),
        lambda: ops.fused_all_gather_matmul(A, [B], 1 if is_first else 0, name),
    ]
    for call in calls:
        try:
            call()
        except ArgumentError as error:
            assert "the ranks do not make the same call" in str(error)
        else:
            raise AssertionError("accepted")


def check_all_gather() -> None:
    for shape, dim in SHAPES:
        A, W, B = random(*shape), random(24, 16), random(16, 8)
        whole, (y, z) = ops.fused_all_gather_matmul(A, [W.t(), B], dim, name)
        assert torch.equal(whole.float(), joined(A, dim))
        assert_close(y, joined(A, dim) @ W.float().t())
        assert_close(z, joined(A, dim) @ B.float())
        strided = torch.cat([B, B], 1)[:, :8]
        none, (again,) = ops.fused_all_gather_matmul(
            A, [strided], dim, name, return_A=False
        )
        assert none is None
        assert torch.equal(again, z)


def check_scaled_collectives() -> None:
    """Of codes, scales and numbers of x by which all products are exact."""
    codes, scales = etc_dist.quantize(random(24, 144).detach().float())
    scales = torch.exp2(scales.log2().round())
    W = codes.float() * scales.repeat_interleave(128, 1)[:, :144]
    signs = random(2, 32, 144).detach().sign() * 448
    float8 = {"activations": "float8"}
    for x, dim in ((signs[0], 0), (signs, 1)):
        operands, own_sum = (x, codes, scales), summed(x.float() @ W.t(), dim)
        y = ops.scaled_matmul_reduce_scatter(*operands, "sum", dim, name, **float8)
        assert_close(y, own_sum)
        y = ops.scaled_all_gather_matmul(*operands, dim, name, **float8)
        assert_close(y, joined(x, dim) @ W.t())
        y = ops.scaled_matmul_all_reduce(*operands, "sum", name, **float8)
        assert_close(y, joined(own_sum, dim))


def check_gradients_of_reduce_scatter() -> None:
    for shape, dim in SHAPES:
        for op in ("sum", "avg"):
            A, W = random(*shape), random(24, 16, seed=1)
            y = ops.fused_matmul_reduce_scatter(A, W.t(), op, dim, name)
            gradient = random(*y.shape, seed=2).detach()
            y.backward(gradient)
            whole = joined(gradient, dim) / (
                dist.get_world_size() if op == "avg" else 1
            )
            assert_close(A.grad, whole @ W.float())
            assert_close(W.grad, rows(whole).t() @ rows(A))


def check_gradients_of_all_gather() -> None:
    for shape, dim in SHAPES:
        for return_A in (True, False):
            A, W, B = random(*shape), random(24, 16, seed=1), random(16, 8, seed=2)
            whole, (y, z) = ops.fused_all_gather_matmul(
                A, [W.t(), B], dim, name, return_A=return_A
            )
            results = (y, z, whole) if return_A else (y, z)
            gradients = [random(*result.shape, seed=3).detach() for result in results]
            torch.autograd.backward(results, gradients)
            expected = (
                gradients[0].float() @ W.float() + gradients[1].float() @ B.float().t()
            )
            expected = expected + (gradients[2].float() if return_A else 0)
            assert_close(A.grad, summed(expected, dim))
            assert_close(W.grad, rows(gradients[0]).t() @ rows(joined(A, dim)))
            assert_close(B.grad, rows(joined(A, dim)).t() @ rows(gradients[1]))


def total(part: Tensor) -> Tensor:
    """The sum over ranks, in float32."""
    whole = part.detach().float().contiguous()
    dist.all_reduce(whole)
    return whole


def check_all_reduce() -> None:
    for shape in ((8,), (3, 5, 24)):
        for dtype in (BF16, torch.float16):
            x = random(*shape, dtype=dtype)
            y = ops.all_reduce(x, "sum", name)
            assert_close(y, total(x))
            gradient = random(*shape, dtype=dtype, seed=1).detach()
            y.backward(gradient)
            assert_close(x.grad, total(gradient))
    parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, y.detach())
    assert all(torch.equal(part, y) for part in parts)


def check_all_reduce_norm() -> None:
    x, residual, gain = (random(*s).detach() for s in ((2, 3, 24), (2, 3, 24), (24,)))
    for same in (residual, gain):
        dist.broadcast(same, 0)
    y, sums = ops.all_reduce_norm(x, residual, gain, 1e-5, name)
    assert_close(sums, total(x) + residual.float())
    norm = nn.functional.rms_norm(sums.float(), (24,), gain.float(), 1e-5)
    assert_close(y, norm)


def check_matmul_all_reduce() -> None:
    for shape in ((5, 16), (2, 3, 16)):
        A, W, B = random(*shape), random(24, 16, seed=1), random(16, 8, seed=2)
        for matrix in (W.t(), B):
            y = ops.matmul_all_reduce(A, matrix, "sum", name)
            assert_close(y, total(A.float() @ matrix.float()))
            gradient = random(*y.shape, seed=3).detach()
            A.grad = None
            y.backward(gradient)
            assert_close(A.grad, total(gradient) @ matrix.float().t())
        assert_close(B.grad, rows(A).t() @ rows(total(gradient)))


def check_row_parallel_with_all_reduce() -> None:
    """As one nn.Linear: what follows is the same on all ranks."""
    narrow = nn.Linear(48, 32, dtype=BF16)
    for parameter in narrow.parameters():
        dist.broadcast(parameter.data, 0)
    row = RowParallelLinear.from_linear(narrow, reduce="all")
    row.bias = nn.Parameter(row.bias.detach())
    whole = random(2, 5, 48).detach()
    dist.broadcast(whole, 0)
    columns = slice(24 * dist.get_rank(), 24 * dist.get_rank() + 24)
    part = whole[..., columns].clone().requires_grad_()
    compiled = torch.compile(row, fullgraph=True, backend="aot_eager")
    expected = narrow(whole.requires_grad_())
    expected.square().sum().backward()
    for run in (row, compiled):
        y = run(part)
        assert_close(y, expected)
        for tensor in (part, row.weight, row.bias):
            tensor.grad = None
        y.square().sum().backward()
        assert_close(part.grad, whole.grad[..., columns])
        assert_close(row.weight.grad, narrow.weight.grad[:, columns])
        assert_close(row.bias.grad, narrow.bias.grad)


def check_compiled_reductions() -> None:
    x, w, gain = random(6, 16), random(24, 16, seed=1), random(24, seed=2).detach()
    dist.broadcast(gain, 0)

    def layer(x: Tensor) -> Tensor:
        y = ops.matmul_all_reduce(x, w.t(), "sum", name)
        with torch.no_grad():
            norm, sums = ops.all_reduce_norm(y, y * 0, gain, 1e-5, name)
        return ops.all_reduce(y, "sum", name) + norm + sums

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(layer(x).sum(), (x, w))
    gradients = torch.autograd.grad(compiled(x).sum(), (x, w))
    for gradient, reference in zip(gradients, expected, strict=True):
        assert_close(gradient, reference)
    longer = random(9, 16)
    assert_close(compiled(longer), layer(longer))


def check_gradients_of_gradients() -> None:
    """As of a gradient penalty, summed over the ranks; compared with all ranks' parts
    in one process."""
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    weights = (torch.randn(32, 24) / 4).to(BF16)
    for kind in ("all_gather", "reduce_scatter"):
        x, B = random(*((16, 16) if kind == "all_gather" else (32, 16))), random(16, 24)
        if kind == "all_gather":
            whole, (y,) = ops.fused_all_gather_matmul(x, [B], 0, name)
            y = y + whole.square().sum(-1, keepdim=True)
        else:
            y = ops.fused_matmul_reduce_scatter(x, B, "sum", 0, name)
        loss = (torch.tanh(y) * weights[: len(y)]).float().sum()
        first = torch.autograd.grad(loss, (x, B), create_graph=True)
        gradients = torch.autograd.grad(
            sum(g.float().square().sum() for g in first), (x, B)
        )

        parts = [tensor.to(BF16) for p in (x, B) for tensor in joined(p).chunk(size)]
        parts = [part.requires_grad_() for part in parts]
        xs, Bs = parts[:size], parts[size:]
        if kind == "all_gather":
            whole = torch.cat(xs)
            ys = [whole @ B + whole.square().sum(-1, keepdim=True) for B in Bs]
        else:
            total = sum(x @ B for x, B in zip(xs, Bs, strict=True))
            ys = list(total.chunk(size))
        loss = sum((torch.tanh(y) * weights[: len(y)]).float().sum() for y in ys)
        first = torch.autograd.grad(loss, parts, create_graph=True)
        squares = sum(g.float().square().sum() for g in first)
        expected = torch.autograd.grad(squares, (xs[rank], Bs[rank]))
        for tensor, reference in zip(gradients, expected, strict=True):
            assert_close(tensor, reference)


def check_adjoints() -> None:
    # Over all ranks, <reduce_scatter(A @ B), y> = <A, all_gather(y) @ B.T>.
    A, B, y = random(32, 16), random(16, 24, seed=1), random(16, 24, seed=2)
    part = ops.fused_matmul_reduce_scatter(A, B, "sum", 0, name)
    _, (activations,) = ops.fused_all_gather_matmul(y, [B.t()], 0, name, return_A=False)
    inner_products = torch.stack(
        [(part.float() * y).sum(), (A * activations.float()).sum()]
    ).detach()
    sizes = torch.stack([(part.float() * y).abs().sum(), torch.tensor(0.0)]).detach()
    dist.all_reduce(inner_products)
    dist.all_reduce(sizes)
    assert (inner_products[0] - inner_products[1]).abs() < 2e-2 * sizes[0], (
        inner_products
    )


def check_unwanted_gradients() -> None:
    A, W = random(32, 16).detach(), random(24, 16)
    ops.fused_matmul_reduce_scatter(A, W.t(), "sum", 0, name).sum().backward()
    _, (y,) = ops.fused_all_gather_matmul(A, [W.t()], 0, name, return_A=False)
    y.sum().backward()
    assert A.grad is None
    assert W.grad.shape == W.shape


def check_errors_of_one_rank() -> None:
    A = random(16, 8).detach()
    is_wrong = dist.get_rank() == 1
    wrong = A.to(torch.float8_e5m2) if is_wrong else A  # NumPy has no such dtype
    for words, call in {
        "scatter_dim: 0 to 0": lambda: ops.fused_matmul_reduce_scatter(
            A, A.t(), "sum", int(is_wrong), name
        ),
        "Float8_e5m2": lambda: ops.all_reduce(wrong, "sum", name),
    }.items():
        try:
            call()
        except (ArgumentError, ArgumentTypeError) as error:
            assert "rank 1" in str(error) and words in str(error), error
        else:
            raise AssertionError(f"{words}: rank 1 was not refused")


def check_modules_that_one_rank_refuses() -> None:
    w, linear = random(16, 8).detach(), nn.Linear(8, 16, dtype=BF16)

    def moe(top_k: Any, **options: Any) -> nn.Module:
        return etc_dist.torch.MoE(w, w, w, top_k=top_k, **options)

    makers = {
        "bias [16]": lambda: ColumnParallelLinear(w, w[0, :1]),
        "reduce = 'both'": lambda: RowParallelLinear(w, reduce="both"),
        "in_features: a multiple": lambda: RowParallelLinear.from_linear(
            nn.Linear(7, 8, dtype=BF16)
        ),
        "the class ReLU": lambda: ColumnParallelLinear.from_linear(nn.ReLU()),
        "known deterministic": lambda: etc_dist.torch.MLP(w, w, w, deterministic="no"),
        "act_fn": lambda: etc_dist.torch.MLP.from_block(nn.Identity()),
        "top_k": lambda: moe("2"),
        "a field of the Router": lambda: moe(
            Router(2, normalize=False), normalize=True
        ),
        "correction, as": lambda: moe(Router(2, has_correction=True)),
        "shared: a pair": lambda: moe(2, shared_gate=w),
        "([E, 2 I], [E, H])": lambda: moe(2, expert_biases=[w]),
        "unknown parallel": lambda: moe(2, parallel="data"),
        "an Activation": lambda: moe(2, activation="gelu_tanh"),
        "block: Identity": lambda: etc_dist.torch.MoE.from_block(nn.Identity()),
        "Linear with no children": lambda: etc_dist.torch.replace(nn.Linear(1, 1)),
    }
    for words, make in makers.items():
        try:
            if dist.get_rank() == 1:
                make()
            else:
                ColumnParallelLinear.from_linear(linear)(random(4, 8))
        except (ArgumentError, ArgumentTypeError) as error:
            assert words in str(error) and "rank 1: " in str(error), error
        else:
            raise AssertionError(f"{words}: not refused")


def check_gathers_of_two_shapes() -> None:
    # As backward passes of which only some ranks run: torch alone would wait, or mix.
    A = random(8 * (1 + dist.get_rank()), 8).detach()
    for op in (ops.gather_rows, ops.scatter_rows):
        try:
            op(A, name)
        except ValueError as error:
            assert f"{op.__name__} of [16, 8]" in str(error)
        else:
            raise AssertionError("gathers of two shapes were paired")


class Block(nn.Module):
    """A tensor-parallel layer of a sequence-parallel model."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(random(48, 32).detach())
        self.down = nn.Parameter(random(32, 48, seed=1).detach())

    def forward(self, x: Tensor) -> Tensor:
        _, (wide,) = ops.fused_all_gather_matmul(
            x, [self.up.t()], 0, name, return_A=False
        )
        wide = nn.functional.silu(wide)
        return x + ops.fused_matmul_reduce_scatter(wide, self.down.t(), "sum", 0, name)


def check_compiled_model() -> None:
    model, x = nn.Sequential(Block(), Block()), random(16, 32, seed=3)
    parameters = [x, *model.parameters()]
    y = model(x)
    expected = torch.autograd.grad(y.sum(), parameters)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    result = compiled(x)
    assert_close(result, y)
    for gradient, reference in zip(
        torch.autograd.grad(result.sum(), parameters), expected, strict=True
    ):
        assert_close(gradient, reference)
    longer = random(24, 32)
    assert_close(compiled(longer), model(longer))


def check_linear_modules() -> None:
    wide, narrow = nn.Linear(32, 48, dtype=BF16), nn.Linear(48, 32, dtype=BF16)
    for parameter in (*wide.parameters(), *narrow.parameters()):
        dist.broadcast(parameter.data, 0)
    column = ColumnParallelLinear.from_linear(wide, dim=1)
    row = RowParallelLinear.from_linear(narrow, dim=1)
    row.bias = nn.Parameter(row.bias.detach())  # not the one of `narrow`
    x = random(2, 8, 32)
    y = row(nn.functional.silu(column(x)))
    whole = joined(x, 1).to(BF16)
    expected = narrow(nn.functional.silu(wide(whole)))
    assert_close(y, expected.chunk(dist.get_world_size(), 1)[dist.get_rank()])
    y.sum().backward()
    expected.sum().backward()
    shard = slice(24 * dist.get_rank(), 24 * dist.get_rank() + 24)
    assert_close(column.weight.grad, wide.weight.grad[shard])
    assert_close(column.bias.grad, wide.bias.grad[shard])
    assert_close(row.weight.grad, narrow.weight.grad[:, shard])
    assert_close(row.bias.grad, narrow.bias.grad)


def tiny(kind: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A model of transformers with random weights, the same on all ranks."""
    import transformers

    config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    config |= {"head_dim": 8, "dtype": BF16}
    if kind not in ("Llama", "Qwen3"):
        config |= {"moe_intermediate_size": 32, "num_experts": 8}
        config |= {"num_local_experts": 8, "num_experts_per_tok": 2}
    torch.manual_seed(seed)
    settings = getattr(transformers, f"{kind}Config")(**config | changes)
    return getattr(transformers, f"{kind}ForCausalLM")(settings).to(BF16).eval()


def check_replaced_models() -> None:
    ids = torch.arange(7)[None] * 5 % 64
    for kind, parallel in (
        ("Qwen3", "tensor"),
        ("Qwen3Moe", "tensor"),
        ("Qwen3Moe", "expert"),
    ):
        model = tiny(kind)
        with torch.no_grad():
            expected = model(ids).logits
            logits = etc_dist.torch.replace(model, parallel=parallel)(ids).logits
        assert_close(logits, expected)


def check_experts_with_different_numbers_of_tokens() -> None:
    block = tiny("Qwen3Moe").model.layers[0].mlp
    moe = etc_dist.torch.MoE.from_block(block, parallel="expert")
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    for run, counts in ((moe, (0, 5)), (compiled, (7, 3)), (compiled, (5, 0))):
        x = random(1, counts[dist.get_rank()], 32).detach()
        with torch.no_grad():
            y = run(x)
        assert y.shape == x.shape
        if x.numel():
            assert_close(y, block(x))


def check_bits_for_any_number_of_rows() -> None:
    """On the CPU results are only close: NumPy rounds a row's products differently with
    another number of rows."""
    size, K, N, most = dist.get_world_size(), 512, 256, 300
    sizes = {"hidden_size": K, "intermediate_size": N, "moe_intermediate_size": 64}
    sizes |= {"num_experts": 128, "num_experts_per_tok": 4, "num_hidden_layers": 1}
    batch = {"deterministic": "batch"}
    dense, sparse = (
        etc_dist.torch.replace(tiny(kind, **sizes), **batch).model.layers[0].mlp
        for kind in ("Qwen3", "Qwen3Moe")
    )
    column = ColumnParallelLinear(random(N, K))
    row = RowParallelLinear(random(N, K))
    weights = random(8, N, K), random(8, K, N // 2)
    ids, shares = random(most, 8).argsort(1)[:, :4], random(most, 4).abs()
    x, partials = random(most, K), random(size, most, K, seed=1)
    dist.broadcast(x.data, 0)
    calls = {
        "matmul": lambda m: ops.matmul(x[:m], weights[0][0].t(), **batch),
        "mlp": lambda m: dense(x[:m]),
        "moe": lambda m: sparse(x[:m]),
        "moe_experts": lambda m: ops.moe_experts(x[:m], ids[:m], shares[:m], *weights),
        "column": lambda m: column(x[:m]).view(size, m, N).movedim(0, 1),
        "row": lambda m: row(partials[:, :m].flatten(0, 1)),
    }
    for call, run in calls.items():
        with torch.no_grad():
            whole = run(most)
            for m in (1, 5, 33, 100):
                assert_close(run(m), whole[:m])
                is_same = torch.equal(run(m), whole[:m])
                assert is_same or x.device.type == "cpu", f"{call} of {m} rows"


def check_gradients_of_replaced_model() -> None:
    ids, model, replaced = torch.arange(7)[None] * 5 % 64, tiny("Qwen3"), tiny("Qwen3")
    etc_dist.torch.replace(replaced)
    for module in (model, replaced):
        module(ids, labels=ids).loss.backward()
    layer, own_layer = model.model.layers[0], replaced.model.layers[0]
    assert_close(
        own_layer.input_layernorm.weight.grad, layer.input_layernorm.weight.grad
    )
    part = slice(32 * dist.get_rank(), 32 * dist.get_rank() + 32)
    expected = layer.mlp.up_proj.weight.grad[part]
    assert_close(own_layer.mlp.up_proj.weight.grad, expected)


def check_compiled_modules() -> None:
    model = etc_dist.torch.replace(tiny("Qwen3")).model.layers[0].mlp
    x = random(1, 7, 32).detach()
    dist.broadcast(x, 0)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), model(x))


def check_loaded_model() -> None:
    model = tiny("Llama", head_dim=64, rope_theta=1e4, eos_token_id=None)
    ids = [5, 40, 3, 17, 9, 60, 22]
    with TemporaryDirectory() as folder:
        folders = [folder]
        if dist.get_rank() == 0:
            model.save_pretrained(folder)
        dist.broadcast_object_list(folders, 0)  # after rank 0 has saved it
        decoder = load(folders[0], positions=32, batch=1)
        dist.barrier()
    with decoder:
        new = decoder.generate([ids], max_new_tokens=4)[0]
        decoder.step(ids, [0] * len(ids), range(len(ids)), [[0]])
        part = torch.from_dlpack(decoder.logits.astype("float32"))
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    assert_close(joined(part, 1), expected.float())
    assert len(new) == 4
    assert new[0] == joined(part, 1)[-1].argmax()


def check_graph_of_vllms_pass() -> None:
    """The operations that vLLM's AsyncTP pass leaves in a graph become ours."""
    A, wide, narrow = random(16, 32), random(48, 32, seed=1), random(32, 48, seed=2)
    tensors = [tensor.detach() for tensor in (A, wide.t(), narrow.t())]

    def layer(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        symm = torch.ops.symm_mem
        _, (y,) = symm.fused_all_gather_matmul(x, [up], gather_dim=0, group_name=name)
        y = nn.functional.silu(y)
        whole, (z,) = symm.fused_all_gather_matmul(x, [up], 0, name)
        y = y + z + whole.sum()
        return symm.fused_matmul_reduce_scatter(
            y, down, "sum", scatter_dim=0, group_name=name
        )

    captured = make_fx(layer, tracing_mode="fake")(*tensors)
    assert swap_collectives(captured.graph) == 3
    captured.graph.lint()
    captured.recompile()
    assert "symm_mem" not in captured.code
    gathers = captured.graph.find_nodes(
        op="call_function", target=ops.fused_all_gather_matmul.default
    )
    assert [node.kwargs["return_A"] for node in gathers] == [False, True]
    result = captured(*tensors)
    whole = joined(tensors[0])
    y = whole @ tensors[1].float()
    y = (nn.functional.silu(y) + y + whole.sum()).to(BF16).float()
    assert_close(result, summed(y @ tensors[2].float()))
    # Those that are not served stay.
    for variant in (
        [tensor.float() for tensor in tensors],
        [tensors[0], random(48, 36).t(), tensors[2]],
    ):
        variant[0] = variant[0].new_empty(16, variant[1].shape[0])
        captured = make_fx(layer, tracing_mode="fake")(*variant)
        swap_collectives(captured.graph)
        assert "symm_mem.fused_all_gather_matmul" in captured.graph.python_code("s").src


def check_graph_of_vllms_norm() -> None:
    """vLLM's all-reduce and the norm that follows it become one operation."""
    x, residual, gain = random(6, 24), random(6, 24, seed=1), random(24, seed=2)
    for same in (residual, gain):
        dist.broadcast(same.detach(), 0)
    tensors = [tensor.detach() for tensor in (x, residual, gain)]

    def layer(x: Tensor, residual: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        sums = torch.ops.vllm.all_reduce(x, "tp:0")
        return torch.ops.vllm_ir.fused_add_rms_norm(sums, residual, gain, 1e-5)

    captured = make_fx(layer, tracing_mode="fake")(*tensors)
    assert fuse_norms(captured.graph, {"tp:0": name}) == 1
    captured.recompile()
    assert "torch.ops.vllm" not in captured.code
    sums = total(tensors[0])
    expected = vllm_stand_in.fused_add_rms_norm(sums, *tensors[1:], 1e-5)
    for result, reference in zip(captured(*tensors), expected, strict=True):
        assert_close(result, reference)


def check_captured_calls() -> None:
    if torch.get_default_device().type == "cpu":
        return
    A, W, x = random(32, 16).detach(), random(24, 16).detach(), random(32, 16).detach()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ops.fused_matmul_reduce_scatter(A, W.t(), "sum", 0, name)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = ops.fused_matmul_reduce_scatter(A, W.t(), "sum", 0, name)
    for operand in (x, A.clone()):
        A.copy_(operand)
        graph.replay()
        torch.cuda.synchronize()
        assert_close(y, summed(operand.float() @ W.float().t()))


def main() -> None:
    global name
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank() % torch.cuda.device_count())
    dist.init_process_group("gloo")
    name = dist.group.WORLD.group_name
    world: World = start(replace(Settings.load(), world_limit=20.0))
    if world.backend == "cuda":
        torch.set_default_device(torch.device("cuda", world.device))
    for check, function in list(globals().items()):
        if check.startswith("check_"):
            try:
                function()
                text = f"rank {world.rank}: {check} passed\n"
            except Exception:
                text = f"rank {world.rank}: {check}\n{traceback.format_exc()}\n"
            print(text, end="", flush=True)
    world.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
