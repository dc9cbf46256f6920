"""Layers: whole parts of a model as one program."""

from etc_dist.layers.mlp import MLP
from etc_dist.layers.moe import MoE

__all__ = ["MLP", "MoE"]
