"""Checks of the caller's arrays, and the dims that their shapes give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etc_dist.errors import ArgumentError, warn_cpu_only
from etc_dist.ir import GraphFunction
from etc_dist.ir.dims import named_dims, refuse_unfit
from etc_dist.runtime.arrays import Array, described


@dataclass(frozen=True)
class Expected:
    """The requirements on an array of a call; `name` is the caller's. `orders` are the
    accepted memory orders, see `Array.order`; `axes` the extents by their dims; `over`
    the array that it may be; `by_element`: GPUs copy no rows of it in bulk."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_written: bool = False
    orders: str = "C"
    axes: tuple[str, ...] = ()
    over: str = ""
    by_element: bool = False

    def describe(self, device: int | str) -> str:
        """The requirements as text, for errors."""
        layout = "contiguous or transposed" if "F" in self.orders else "contiguous"
        place = "the CPU" if device == "cpu" else f"cuda:{device}"
        axes = self.axes or [*map(str, self.shape)]
        shape = ", ".join(
            str(extent) if axis == str(extent) else f"{axis} = {extent}"
            for axis, extent in zip(axes, self.shape, strict=True)
        )
        return f"{self.name} [{shape}] {self.dtype}, {layout}, on {place}"


def bind_dims(
    graph: GraphFunction,
    arrays: Mapping[str, Array],
    explicit_dims: Mapping[str, Any] | None = None,
) -> dict[str, int]:
    """The dims that the shapes of `arrays` give, and `explicit_dims`. `check_arrays` at
    these dims finds shapes that contradict each other. The largest number of rows is at
    least that of this rank. Raises ArgumentError for dims that neither gives."""
    names = {d.name for d in graph.dims}
    dims = named_dims(graph, explicit_dims or {})
    if graph.own_dims is not None:
        for rows in graph.own_rows_of(arrays).values():
            dims[graph.own_dims[1].name] = max(
                rows, dims.get(graph.own_dims[1].name, 0)
            )
    for tensor in graph.arguments():
        array = arrays.get(tensor.name)
        if array is None or len(array.shape) != len(tensor.shape):
            continue
        for extent, value in zip(tensor.shape, array.shape, strict=True):
            if str(extent) in names:
                dims.setdefault(str(extent), value)
    unbound = [d.name for d in graph.dims if d.name not in dims]
    if unbound:
        tensors = graph.given()
        axes = {str(extent) for tensor in tensors for extent in tensor.shape}
        hidden = [name for name in unbound if name not in axes]
        fix = "check the number of axes of each array"
        if hidden:
            fix = f"in the graph, give an input an axis that is just {hidden[0]}: dims "
            fix += "are read from axes, not computed from expressions of dims; or pass "
            fix += f"dims={{'{hidden[0]}': ...}}"
        shapes = {name: list(a.shape) for name, a in arrays.items()}
        raise ArgumentError(
            f"dims of {graph.name} cannot be found from the arrays",
            where=graph.name,
            wanted=f"arrays whose axes are {', '.join(unbound)}: "
            + "; ".join(str(t) for t in tensors),
            got=str(shapes),
            fix=fix,
        )
    bound = {d.name: dims[d.name] for d in graph.dims}
    refuse_unfit(graph, bound)
    return bound


def check_arrays(
    call: str,
    expected: Sequence[Expected],
    arrays: Mapping[str, Array],
    device: int | str,
    *,
    may_be_empty: bool = False,
) -> None:
    """Raise one ArgumentError for all arrays of `call` that are not as expected."""
    faults = []
    for argument in expected:
        array = arrays.get(argument.name)
        faults += _array_faults(argument, array, device, may_be_empty)
    faults = faults or _overlaps(expected, arrays)
    if faults:
        raise ArgumentError(
            f"the arguments do not fit {call}",
            where=call,
            wanted="; ".join(wanted for wanted, _ in faults),
            got="; ".join(got for _, got in faults),
            fix="correct these arrays; nothing was launched on any rank",
        )
    if device == "cpu":
        rows = [arrays[a.name] for a in expected if not a.by_element]
        _warn_of_rows(call, rows)


def _warn_of_rows(call: str, arrays: Sequence[Array]) -> None:
    """Warn of rows that GPUs cannot copy."""
    if odd := [array for array in arrays if array.has_odd_rows]:
        names = ", ".join(array.name for array in odd)
        error = ArgumentError(
            f"arrays of {call} have rows that GPUs cannot copy",
            where=call,
            wanted=f"{names} with rows of a multiple of 16 bytes",
            got=described(*odd),
            fix="pad the rows; only the CPU backend takes such arrays",
        )
        warn_cpu_only(error)


def _array_faults(
    expected: Expected, array: Array | None, device: int | str, may_be_empty: bool
) -> list[tuple[str, str]]:
    """(wanted, got) of one array, if it is not as expected."""
    name = expected.name
    if array is None:
        return [(expected.describe(device), f"no {name}")]
    properties = (array.shape, array.dtype, array.device)
    is_ordered = array.order != "" and array.order in expected.orders
    if properties != (expected.shape, expected.dtype, device) or not is_ordered:
        return [(expected.describe(device), described(array))]
    if 0 in array.shape:
        wanted = f"{name} without an axis of length 0"
        return [] if may_be_empty else [(wanted, described(array))]
    if expected.is_written and array.is_read_only:
        return [(f"{name} that can be written", "a read-only array")]
    has_odd_rows = array.has_odd_rows and not expected.by_element
    if device != "cpu" and (array.pointer % 16 or has_odd_rows):
        wanted = f"{name} with 16-byte aligned rows of a multiple of 16 bytes"
        if expected.by_element:
            wanted = f"{name} at an address that is a multiple of 16"
        return [(wanted, f"{array} at {array.pointer:#x}")]
    return []


def _overlaps(
    expected: Sequence[Expected], arrays: Mapping[str, Array]
) -> list[tuple[str, str]]:
    """Written arrays that share memory with one before, unless they may be that one;
    read ones come first."""
    ordered_arrays = [arrays[argument.name] for argument in expected]
    faults = []
    for array_idx, y in enumerate(ordered_arrays):
        over = expected[array_idx].over
        for x in ordered_arrays[:array_idx] if expected[array_idx].is_written else ():
            is_same = over == x.name and (y.pointer, y.end) == (x.pointer, x.end)
            if y.overlaps(x) and not is_same:
                wanted = f"{y.name} apart from {x.name}"
                wanted += ", or the same array" if over == x.name else ""
                faults.append((wanted, f"{y.name} overlaps {x.name}"))
    return faults
