"""Two tensor-parallel linear layers in torch, with gradients and torch.compile.

    torchrun --nproc-per-node 2 examples/torch_tensor_parallel.py

On GPUs where each rank has its own, otherwise on CPUs. With ETC_DIST_SHARE_GPU=1 the
ranks share the GPUs that there are. Each rank has a part of the rows and a shard of the
weights: the first layer gathers the rows, the second sums over ranks.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch import distributed as dist

import etc_dist
from etc_dist.torch import ColumnParallelLinear, RowParallelLinear

ROWS, HIDDEN, INNER = 64, 256, 512


def start() -> etc_dist.World:
    """The world of torchrun's ranks, by NCCL where each has a GPU."""
    local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(local_rank % gpus)
    # NCCL does not serve two ranks on one GPU.
    has_own_gpu = int(os.environ["LOCAL_WORLD_SIZE"]) <= gpus
    dist.init_process_group("nccl" if has_own_gpu else "gloo")
    return etc_dist.start(process_group=dist.group.WORLD)


def error(result: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    difference = (result.detach().float() - expected.detach()).abs().max()
    return float(difference / expected.detach().abs().max())


def main() -> None:
    world = start()
    device = "cpu" if world.backend == "cpu" else f"cuda:{world.device}"
    torch.manual_seed(1)  # the same whole model and rows on every rank
    with torch.device(device):
        up = nn.Linear(HIDDEN, INNER, bias=False, dtype=torch.bfloat16)
        down = nn.Linear(INNER, HIDDEN, bias=False, dtype=torch.bfloat16)
        rows = torch.randn(ROWS * world.size, HIDDEN, dtype=torch.bfloat16)

    model = nn.Sequential(
        ColumnParallelLinear.from_linear(up),
        nn.SiLU(),
        RowParallelLinear.from_linear(down),
    )
    own_rows = slice(world.rank * ROWS, (world.rank + 1) * ROWS)
    x = rows[own_rows].clone().requires_grad_()
    y = model(x)
    y.float().pow(2).sum().backward()

    whole = rows.float().requires_grad_()
    expected = nn.functional.silu(whole @ up.weight.float().t())
    expected = expected @ down.weight.float().t()
    expected.pow(2).sum().backward()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    own_result = (
        error(y, expected[own_rows]),
        error(x.grad, whole.grad[own_rows]),
        torch.equal(compiled(x), y),
    )
    results = world.agree(lambda: own_result)  # of all ranks
    forward, backward, _ = map(max, zip(*results, strict=True))
    is_same = all(result[2] for result in results)
    if world.rank == 0:
        print(f"{world.size} ranks, {world.backend}, {dist.get_backend()}")
        print(
            f"largest error against float32: y {forward:.1e}, gradient {backward:.1e}"
        )
        print(f"torch.compile gives the same bits on every rank: {is_same}")
        print("passed" if is_same and max(forward, backward) < 2e-2 else "FAILED")
    world.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
