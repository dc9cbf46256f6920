"""Code generation: a plan becomes CUDA source and the layout of its arguments.

cuda.py             generate: the source, without logic
calls.py            the struct of a call, tensors and events
dynamic_queues.py   the part that only dynamic plans need
members.py          the shape of generated functions and lines
expression.py       index expressions as CUDA text
names.py            prefixes of user-chosen names
bounds.py           the limits of loaded values
tma_boxes.py        the tensor maps of bulk copies
tiles.py            regions against the tiles that device functions declare
ranges.py           bounds and divisors of expressions
layout.py           argument, symmetric and control block, on host and device"""

from etc_dist.codegen.cuda import Source, generate, title_of
from etc_dist.codegen.layout import Arguments

__all__ = ["Arguments", "Source", "generate", "title_of"]
