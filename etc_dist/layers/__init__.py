"""Layers: whole parts of a model as one program.

mlp.py               MLP, and its graph for many rows of several ranks
mlp_tiles.py         its graph for one rank, and for fewer rows of several
mlp_policy.py        the choice of its tiles
mlp_steps.py         shared by these graphs
moe.py               MoE
moe_graph.py         its graph on one rank and on many
moe_few_tokens.py    its graph for decoding
moe_exchange.py      its exchange between ranks, on one host and several
moe_steps.py         shared by these graphs
shared_expert.py     the expert that every token takes, and the sums with its rows
sparse_block.py      weights of a Hugging Face block
block_families.py    the kinds of these blocks, by the names of their classes
plain.py             whether a part of a model computes what its class says
"""

from etc_dist.layers.mlp import MLP
from etc_dist.layers.moe import MoE

__all__ = ["MLP", "MoE"]
