"""Layers: whole parts of a model as one program."""

from etc_dist.layers.mlp import MLP

__all__ = ["MLP"]
