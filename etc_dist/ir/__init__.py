"""The language: symbolic dims, tensors, event tensors, device and graph functions.

The whole language. `x*` is a tuple, `x?` may be None; names without a type are strings,
integers or Booleans. A `Graph` builds these values, `graph.show()` prints them.

    GraphFunction(name, world_size, dims: Symbol*, derived: (Symbol, Expr)*,
                  tensors: Tensor*, events: EventTensor*, calls: Call*, local_size,
                  own_dims: (Symbol, Symbol)?, requirements: Requirement*)

    Requirement(what, numbers: Expr*, values: (integer*)*, fix, exprs: Expr*)
    Tensor(name, shape: Expr*, dtype, kind, over, flagged)
        kind   "input" | "output" | "state" | "local" | "symmetric"
        dtype  "bfloat16" | "float16" | "float32" | "int32" | "float8_e4m3fn"
    EventTensor(name, shape: Expr*, axes: Symbol*, expects: Expr, cross_rank,
                carried_by)

    Call(name, function: DeviceFunction, axes: Coordinate*, reads: Region*,
         writes: Region*, waits: EventRef*, notifies: EventRef*, order: Expr*,
         pace: Expr, loops, values: (name, Expr)*, even, streams_after?)
        The first `loops` axes are those of loops. A task is a coordinate of the axes.
    Coordinate(symbol: Symbol, extent: Expr, count: Load?)
    Region(tensor: Tensor, rank: Expr?, start: Expr*, size: Expr*, kept_axes*)
    EventRef(events: EventTensor, rank: Expr?, index: Expr*, guards: Guard*)
    Guard = Comparison | Expr

    Expr = Const(value)
         | Symbol(name, kind)
         | Op(name, left: Expr, right: Expr)    + - * // % min max
         | Load(tensor, shape: Expr*, index: Expr*, is_given)
         | Select(condition: Comparison, then: Expr, other: Expr)
        kind   "dim" | "own" | "derived" | "coordinate" | "rank" | "task"
    Comparison(name, left: Expr, right: Expr)    < <= ==

    DeviceFunction(name, body, source, lane, reads, writes,
                   boxes: {position: TmaBox}, constants: {name: number}, roles*, shared,
                   streams*, gathers*, reads_before_wait*, tile: {position: Operand},
                   epilogue: DeviceFunction?, loads_before_wait, far,
                   starts: {name: (position, axis)})
        lane   "tensor" | "transfer"
        roles  "prepare" | "load" | "gather" | "compute" | "store"
    Operand(size: Extent*?, dtype*, leading, contiguous, like?, apart, mirrors?,
            by_element, flagged)
    Extent(size?, most: Expr?, multiple, begins: Expr, name, whole, not_empty, clipped,
           times, per: Expr?)
    TmaBox(rows: Expr, columns, large)

graph.py      graph functions; loop.py: loops over calls
call.py       calls, and their loads from runtime tensors; order.py: their task orders
function.py   device functions; operand.py: the regions that their CUDA bodies need;
              bodies.py: the digest of their NumPy bodies
tensor.py     tensors and regions
event.py      event tensors; flagged_tensors.py: those that flagged tensors carry
expr.py       symbolic integers; loads.py: loads in them; interval.py: their bounds
guard.py      conditions of expressions, and of waits and notifications
dims.py       the numbers given for dims; requirement.py: those that a graph allows
checks.py     refusals of calls that are not correct"""

from etc_dist.ir.call import RANK, TASK, Call, up_to
from etc_dist.ir.event import EventRef, EventTensor
from etc_dist.ir.expr import Expr, Symbol, ceildiv, equal, maximum, minimum, select
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
