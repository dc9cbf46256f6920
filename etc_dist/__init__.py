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
    from etc_dist.ahead import Binary as Binary
    from etc_dist.ahead import build as build
    from etc_dist.compiler import compile as compile
    from etc_dist.errors import EtcDistError as EtcDistError
    from etc_dist.functions.activation import Activation as Activation
    from etc_dist.functions.router import Router as Router
    from etc_dist.ir import device_function as device_function
    from etc_dist.ir import graph_function as graph_function
    from etc_dist.ir import tile as tile
    from etc_dist.layers.mlp import MLP as MLP
    from etc_dist.layers.moe import MoE as MoE
    from etc_dist.ops.all_gather_matmul import AllGatherMatmul as AllGatherMatmul
    from etc_dist.ops.all_reduce import AllReduce as AllReduce
    from etc_dist.ops.all_reduce_norm import AllReduceNorm as AllReduceNorm
    from etc_dist.ops.functional import all_gather_matmul as all_gather_matmul
    from etc_dist.ops.functional import all_reduce as all_reduce
    from etc_dist.ops.functional import all_reduce_norm as all_reduce_norm
    from etc_dist.ops.functional import matmul as matmul
    from etc_dist.ops.functional import matmul_all_reduce as matmul_all_reduce
    from etc_dist.ops.functional import matmul_all_reduce_norm as matmul_all_reduce_norm
    from etc_dist.ops.functional import matmul_reduce_scatter as matmul_reduce_scatter
    from etc_dist.ops.matmul import Matmul as Matmul
    from etc_dist.ops.matmul_all_reduce import MatmulAllReduce as MatmulAllReduce
    from etc_dist.ops.matmul_all_reduce import (
        MatmulAllReduceNorm as MatmulAllReduceNorm,
    )
    from etc_dist.ops.matmul_reduce_scatter import (
        MatmulReduceScatter as MatmulReduceScatter,
    )
    from etc_dist.ops.scaled_weight import ScaledWeight as ScaledWeight
    from etc_dist.ops.scaled_weight import quantize as quantize
    from etc_dist.program import Program as Program
    from etc_dist.settings import Settings as Settings
    from etc_dist.world import World as World
    from etc_dist.world import current as current
    from etc_dist.world import start as start


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
__all__ = sorted({*_PLACES} - {"compile"})


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
