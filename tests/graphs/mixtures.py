"""The graphs of mixtures of experts, by the fields of the mixture."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from etc_dist.functions.router import Router, as_router
from etc_dist.functions.routing import Mixture
from etc_dist.ir import GraphFunction
from etc_dist.layers import moe_few_tokens
from etc_dist.layers import moe_graph as many


def _made(
    graph: Callable[..., GraphFunction],
    world: int,
    *,
    experts: int,
    top_k: int | Router,
    normalize: bool | None = None,
    **options: Any,
) -> GraphFunction:
    names = [name for name in options if name in Mixture.__dataclass_fields__]
    fields = {name: options.pop(name) for name in names}
    mixture = Mixture(experts, as_router(top_k, normalize), **fields)
    return graph(world, mixture=mixture, **options)


moe_graph = partial(_made, many.moe_graph)
moe_few_tokens_graph = partial(_made, moe_few_tokens.moe_few_tokens_graph)
