"""The graphs of vLLM's passes: what of them becomes operations of torch.ops.etc_dist.

What is not served stays as vLLM has it, and the reason is printed on stderr, once."""

from __future__ import annotations

from collections.abc import Mapping
from operator import getitem
from typing import Any

import torch
import torch.distributed._symmetric_memory  # defines torch.ops.symm_mem
from torch import Tensor, fx

from etc_dist.errors import WorldError
from etc_dist.messages import show_message
from etc_dist.torch.ops import REDUCTIONS
from etc_dist.world import of_group

DTYPES = (torch.bfloat16, torch.float16)
EIGHT = 8
"""K, N, and the sizes of norms and experts, are multiples of this on GPUs."""
_printed_texts: set[str] = set()


def say(text: str) -> None:
    """Print why something stays as vLLM has it, once."""
    if text not in _printed_texts:
        _printed_texts.add(text)
        show_message(f"etc_dist: not used by vLLM: {text}\n")


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Those of a call, by the names in the operation's schema."""
    schema: Any = node.target
    names = [argument.name for argument in schema._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _value(node: Any) -> Tensor | None:
    """The fake tensor of a node."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


# ---------------------------------------------------------------------- collectives


def swap_collectives(graph: fx.Graph) -> int:
    """Let fused_matmul_reduce_scatter and fused_all_gather_matmul of torch.ops.symm_mem
    in a graph be those of torch.ops.etc_dist, where these serve their operands. Returns
    how many were replaced."""
    count = 0
    for name in ("fused_matmul_reduce_scatter", "fused_all_gather_matmul"):
        ours = getattr(torch.ops.etc_dist, name).default
        theirs = getattr(torch.ops.symm_mem, name).default
        for node in graph.find_nodes(op="call_function", target=theirs):
            arguments = _arguments(node)
            obstacle = _obstacle(arguments)
            if obstacle:
                say(f"{name}: {obstacle}")
                continue
            _swap(graph, node, ours, arguments)
            count += 1
    return count


def _swap(graph: fx.Graph, node: fx.Node, ours: Any, arguments: dict[str, Any]) -> None:
    is_gather = "Bs" in arguments
    if is_gather:  # gathering A alone, too, is another collective
        for part in [u for u in node.users if u.target is getitem and u.args[1] == 0]:
            if not part.users:
                graph.erase_node(part)
        is_used = any(u.target is not getitem or u.args[1] == 0 for u in node.users)
        arguments["return_A"] = is_used and arguments.get("return_A", True)
    with graph.inserting_before(node):
        new = graph.call_function(ours, (), arguments)
    new.meta = dict(node.meta)
    if is_gather and not arguments["return_A"] and "val" in new.meta:
        new.meta["val"] = None, new.meta["val"][1]
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _obstacle(arguments: dict[str, Any]) -> str | None:
    """Why a call is not served."""
    try:
        of_group(arguments["group_name"])
    except WorldError:
        return "no world over its group"
    if arguments.get("reduce_op", REDUCTIONS[0]) not in REDUCTIONS:
        return f"reduction {arguments['reduce_op']!r}"
    nodes = arguments["A"], *arguments.get("Bs", [arguments.get("B")])
    dtypes = set()
    for node in nodes:
        value = _value(node)
        if value is None:
            return "operands of unknown shape"
        dtypes.add(value.dtype)
        if value.dtype not in DTYPES or len(dtypes) > 1:
            return f"operands of {value.dtype}"
        sizes = value.shape if node is not nodes[0] else value.shape[-1:]
        if any(not isinstance(n, int) or n % EIGHT for n in sizes):
            return f"K or N of {[*map(str, sizes)]}, not a multiple of {EIGHT}"
    return None


# -------------------------------------------------------------- all-reduce and norm


def fuse_norms(graph: fx.Graph, groups: Mapping[str, str]) -> int:
    """Let vLLM's all_reduce, followed by nothing but fused_add_rms_norm of vLLM's IR,
    be all_reduce_norm of torch.ops.etc_dist, where it serves them. groups: the names of
    process groups with a world, by vLLM's names of them. Returns how many were
    replaced."""
    count = 0
    theirs = torch.ops.vllm_ir.fused_add_rms_norm.default
    for node in graph.find_nodes(op="call_function", target=theirs):
        norm = _arguments(node)
        total = norm["x"]
        if getattr(total, "target", None) is not torch.ops.vllm.all_reduce.default:
            continue
        reduced = _arguments(total)
        obstacle = _norm_obstacle(norm, reduced["group_name"], groups)
        if obstacle:
            say(f"all_reduce_norm: {obstacle}")
            continue
        rows = reduced["tensor"], norm["x_residual"], norm["weight"]
        options = norm["epsilon"], groups[reduced["group_name"]]
        with graph.inserting_before(node):
            ours = torch.ops.etc_dist.all_reduce_norm.default
            new = graph.call_function(ours, (*rows, *options))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        graph.erase_node(total)
        count += 1
    return count


def _norm_obstacle(
    norm: dict[str, Any], group_name: str, groups: Mapping[str, str]
) -> str | None:
    """Why an all-reduce and its norm are not served."""
    if group_name not in groups:
        return "no world over its group"
    if len(norm["x"].users) > 1:
        return "another user of the sum"
    if norm.get("variance_size") is not None:
        return "a norm of a part of each row"
    values = [_value(norm[name]) for name in ("x", "x_residual", "weight")]
    x = values[0]
    if x is None or any(value is None for value in values):
        return "operands of unknown shape, or no weights"
    dtypes = {value.dtype for value in values if value is not None}
    if x.dtype not in DTYPES or len(dtypes) > 1:
        return f"operands of {', '.join(sorted(map(str, dtypes)))}"
    width = x.shape[-1]
    if not isinstance(width, int) or width % EIGHT:
        return f"rows of {width}, not a multiple of {EIGHT}"
    return None
