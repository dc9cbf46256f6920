"""etc_dist: fused computation and communication across GPUs, from event tensors.

Importing starts nothing: no CUDA, no MPI, no NVSHMEM. Names and submodules load on
first use. See README.md for the first steps."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etc_dist import emulate as emulate
    from etc_dist import errors as errors
    from etc_dist import ir as ir
    from etc_dist import models as models
    from etc_dist import torch as torch
    from etc_dist.ahead import Binary, build
    from etc_dist.compiler import compile as compile
    from etc_dist.errors import EtcDistError
    from etc_dist.functions.activation import Activation
    from etc_dist.functions.router import Router
    from etc_dist.ir import device_function, graph_function, tile
    from etc_dist.layers.mlp import MLP
    from etc_dist.layers.moe import MoE
    from etc_dist.ops.all_gather_matmul import AllGatherMatmul
    from etc_dist.ops.all_reduce import AllReduce
    from etc_dist.ops.all_reduce_norm import AllReduceNorm
    from etc_dist.ops.functional import (
        all_gather_matmul,
        all_reduce,
        all_reduce_norm,
        matmul,
        matmul_all_reduce,
        matmul_all_reduce_norm,
        matmul_reduce_scatter,
    )
    from etc_dist.ops.matmul import Matmul
    from etc_dist.ops.matmul_all_reduce import MatmulAllReduce, MatmulAllReduceNorm
    from etc_dist.ops.matmul_reduce_scatter import MatmulReduceScatter
    from etc_dist.ops.scaled_weight import ScaledWeight, quantize
    from etc_dist.program import Program
    from etc_dist.settings import Settings
    from etc_dist.world import World, current, start

__version__ = "0.1.0"

_PLACES = {
    "Activation": "functions.activation",
    "AllGatherMatmul": "ops.all_gather_matmul",
    "AllReduce": "ops.all_reduce",
    "AllReduceNorm": "ops.all_reduce_norm",
    "Binary": "ahead",
    "EtcDistError": "errors",
    "MLP": "layers.mlp",
    "Matmul": "ops.matmul",
    "MatmulAllReduce": "ops.matmul_all_reduce",
    "MatmulAllReduceNorm": "ops.matmul_all_reduce",
    "MatmulReduceScatter": "ops.matmul_reduce_scatter",
    "MoE": "layers.moe",
    "Program": "program",
    "Router": "functions.router",
    "ScaledWeight": "ops.scaled_weight",
    "Settings": "settings",
    "World": "world",
    "all_gather_matmul": "ops.functional",
    "all_reduce": "ops.functional",
    "all_reduce_norm": "ops.functional",
    "build": "ahead",
    "compile": "compiler",
    "current": "world",
    "device_function": "ir",
    "graph_function": "ir",
    "matmul": "ops.functional",
    "matmul_all_reduce": "ops.functional",
    "matmul_all_reduce_norm": "ops.functional",
    "matmul_reduce_scatter": "ops.functional",
    "quantize": "ops.scaled_weight",
    "start": "world",
    "tile": "ir",
}
"""The modules of the public names."""
_SUBMODULES = {"emulate", "errors", "ir", "models", "torch"}

# Without `compile`, which is also a built-in function: write etc_dist.compile(...).
__all__ = [
    "MLP",
    "Activation",
    "AllGatherMatmul",
    "AllReduce",
    "AllReduceNorm",
    "Binary",
    "EtcDistError",
    "Matmul",
    "MatmulAllReduce",
    "MatmulAllReduceNorm",
    "MatmulReduceScatter",
    "MoE",
    "Program",
    "Router",
    "ScaledWeight",
    "Settings",
    "World",
    "all_gather_matmul",
    "all_reduce",
    "all_reduce_norm",
    "build",
    "current",
    "device_function",
    "graph_function",
    "matmul",
    "matmul_all_reduce",
    "matmul_all_reduce_norm",
    "matmul_reduce_scatter",
    "quantize",
    "start",
    "tile",
]


def __dir__() -> list[str]:
    # Without torch, since `help` and completion load all names of this list.
    return sorted({*_PLACES, *_SUBMODULES} - {"torch"})


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"etc_dist.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'etc_dist' has no attribute {name!r}")
    value = getattr(import_module(f"etc_dist.{_PLACES[name]}"), name)
    globals()[name] = value
    return value
