"""The language: symbolic dims, tensors, event tensors, device and graph functions.

graph.py      graph functions; loop.py: loops over calls
call.py       calls, and their loads from runtime tensors; order.py: their task orders
function.py   device functions; operand.py: the regions that their CUDA bodies need;
              bodies.py: the digest of their NumPy bodies
tensor.py     tensors and regions
event.py      event tensors
expr.py       symbolic integers; loads.py: loads in them; interval.py: their bounds
guard.py      conditions of expressions, and of waits and notifications
dims.py       the numbers given for dims
checks.py     refusals of calls that are not correct
"""

from etc_dist.ir.call import RANK, TASK, Call, up_to
from etc_dist.ir.event import EventRef, EventTensor
from etc_dist.ir.expr import (
    Expr,
    Symbol,
    ceildiv,
    equal,
    maximum,
    minimum,
    select,
)
from etc_dist.ir.function import DeviceFunction, TmaBox, device_function
from etc_dist.ir.graph import Graph, GraphFunction, graph_function
from etc_dist.ir.operand import Extent, Operand
from etc_dist.ir.tensor import Region, Tensor, span, tile

__all__ = [
    "RANK",
    "TASK",
    "Call",
    "DeviceFunction",
    "EventRef",
    "EventTensor",
    "Expr",
    "Extent",
    "Graph",
    "GraphFunction",
    "Operand",
    "Region",
    "Symbol",
    "Tensor",
    "TmaBox",
    "ceildiv",
    "device_function",
    "equal",
    "graph_function",
    "maximum",
    "minimum",
    "select",
    "span",
    "tile",
    "up_to",
]
