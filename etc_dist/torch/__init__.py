"""The operations in torch: `torch.ops.etc_dist`, with gradients, for torch.compile.

Importing this package imports torch and registers the operations. They run on the world
of a process group: `etc_dist.start(process_group=...)`.

Files, from the user down:

    vllm.py         a plug-in of vLLM
    vllm_graphs.py  the graphs of its passes, with the operations
    vllm_hooks.py   what the plug-in needs of a version
    replace.py      the blocks of a model of Hugging Face transformers
    blocks.py       the blocks of transformers and linear layers that are known
    modules.py      tensor-parallel linear layers, the MLP, the mixture of experts
    ranks.py        the ranks of a group, and what one of them refuses
    chosen_experts.py  experts whose router is elsewhere, for transformers
    ops.py          the operations: what runs, and the results' shapes for tracing
    reductions.py   those that sum over ranks for every rank
    scaled.py       those by weights in float8
    gradients.py    the gradients of the collectives: each is the adjoint of the other
    tensors.py      tensors as arrays of the backend"""

from etc_dist.torch import gradients as gradients  # registers them
from etc_dist.torch.chosen_experts import register_experts
from etc_dist.torch.modules import MLP, ColumnParallelLinear, MoE, RowParallelLinear
from etc_dist.torch.replace import replace

__all__ = [
    "MLP",
    "ColumnParallelLinear",
    "MoE",
    "RowParallelLinear",
    "register_experts",
    "replace",
]
