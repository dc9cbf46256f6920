"""Whether the caller's arrays fit the tensors of a graph, and at which dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from etc_dist.errors import ArgumentError
from etc_dist.ir import GraphFunction, Tensor
from etc_dist.runtime.arrays import Array, described, place_on

Device = int | str


def bind_dims(graph: GraphFunction, arrays: Mapping[str, Array]) -> dict[str, int]:
    """The dims that the shapes of `arrays` give; shapes that contradict each other are
    found when the arrays are checked at these dims."""
    dims: dict[str, int] = {}
    names = {d.name for d in graph.dims}
    for tensor in (*graph.inputs(), *graph.outputs()):
        array = arrays.get(tensor.name)
        if array is None or len(array.shape) != len(tensor.shape):
            continue
        for extent, value in zip(tensor.shape, array.shape, strict=True):
            if str(extent) in names:
                dims.setdefault(str(extent), value)
    unbound = [d.name for d in graph.dims if d.name not in dims]
    if unbound:
        tensors = graph.inputs()
        axes = {str(extent) for tensor in tensors for extent in tensor.shape}
        hidden = [name for name in unbound if name not in axes]
        fix = "check the number of axes of each array"
        if hidden:
            fix = f"in the graph, give an input an axis that is just {hidden[0]}: dims "
            fix += "are read from axes, not computed from expressions of dims"
        shapes = {name: list(a.shape) for name, a in arrays.items()}
        raise ArgumentError(
            f"dims of {graph.name} cannot be found from the arrays",
            where=graph.name,
            wanted=f"arrays whose axes are {', '.join(unbound)}: "
            + "; ".join(str(t) for t in tensors),
            got=str(shapes),
            fix=fix,
        )
    return {d.name: dims[d.name] for d in graph.dims}


def check_arrays(
    graph: GraphFunction,
    arrays: Mapping[str, Array],
    dims: Mapping[str, int],
    rank: int,
    device: Device,
    *,
    outputs: bool = True,
) -> None:
    """Raise ArgumentError unless the arrays of the inputs, and of the `outputs`, fit at
    `dims`."""
    tensors = [*graph.inputs(), *(graph.outputs() if outputs else ())]
    env = graph.environment(dims, rank)
    faults = []
    for tensor in tensors:
        shape = tuple(int(s.evaluate(env)) for s in tensor.shape)
        faults += _array_faults(tensor, shape, arrays.get(tensor.name), device)
    faults = faults or _overlaps(tensors, arrays)
    if faults:
        raise ArgumentError(
            f"the arguments do not fit {graph.name}",
            where=f"{graph.name}, {', '.join(f'{k}={v}' for k, v in dims.items())}",
            wanted="; ".join(wanted for wanted, _ in faults),
            got="; ".join(got for _, got in faults),
            fix="correct these arrays",
        )


def _array_faults(
    tensor: Tensor, shape: tuple[int, ...], array: Array | None, device: Device
) -> list[tuple[str, str]]:
    """What is wanted and got, in the caller's names and shapes."""
    if array is None:
        wanted = f"{tensor.name} {list(shape)} {tensor.dtype}, {place_on(device)}"
        return [(wanted, f"no {tensor.name}")]
    name = array.name
    if array.shape != shape or array.dtype != tensor.dtype or not array.lies_on(device):
        seen = array.given_shape if array.shape == shape else None
        wanted = f"{name} {list(seen or shape)} {tensor.dtype}, {place_on(device)}"
        return [(wanted, described(array))]
    host = array.owner if isinstance(array.owner, np.ndarray) else None
    if tensor.kind == "output" and host is not None and not host.flags.writeable:
        return [(f"{name} that can be written", "a read-only array")]
    if device != "cpu" and (
        array.pointer % 16 or shape[-1] * tensor.itemsize % 16 or 0 in shape
    ):
        rows = f"{name} with 16-byte aligned, non-empty rows"
        return [(rows, f"{array} at {array.pointer:#x}")]
    return []


def _overlaps(
    tensors: Sequence[Tensor], arrays: Mapping[str, Array]
) -> list[tuple[str, str]]:
    """What is wanted and got of outputs that share memory with one before them."""
    seen = [arrays[tensor.name] for tensor in tensors]
    return [
        (f"{y.name} apart from {x.name}", f"{y.name} overlaps {x.name}")
        for place, y in enumerate(seen)
        if tensors[place].kind == "output"
        for x in seen[:place]
        if y.overlaps(x)
    ]
