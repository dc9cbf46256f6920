"""Epilogues: what a matrix multiplication on tiles stores of its sums; CUDA half in
`kernels/functions/epilogue.cuh`, and in `kernels/epilogues/` for those here.

An epilogue is a device function in two halves. The NumPy half gets the sums of a tile
in fp32, then views of further arrays. The CUDA half gets eight neighbouring columns of
a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.errors import GraphError
from etc_dist.functions.activation import SWIGLU, Activation
from etc_dist.functions.scaled_weights import E4M3
from etc_dist.functions.weight_layouts import silu
from etc_dist.ir import DeviceFunction, Expr, Extent, Operand
from etc_dist.ir.function import TENSOR

PER_ELEMENT, PER_COLUMN, PER_ROW = "per element", "per column", "per row"
READS = (PER_ELEMENT, PER_COLUMN, PER_ROW)
WRITES = (PER_ELEMENT, PER_ROW)
Y_DTYPES = ("bfloat16", "float16", "float32", E4M3)


@dataclass(frozen=True, eq=False)
class Epilogue:
    """What `Tiles.matmul` computes of the sums of a tile; made by `epilogue(...)`."""

    half: DeviceFunction
    """Reads the tiles of sums, then `reads`; writes y, then `writes`."""
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    gated: bool
    dtype: str | None
    mirrors: bool = False
    """Whether further writes are y in the memory of peers."""
    pads: bool = False
    """Whether y has columns after those of the weights, to a multiple of 8."""

    @property
    def weights(self) -> int:
        """The number of weights, of which a task has a tile of sums each."""
        return 2 if self.gated else 1

    @property
    def reduces(self) -> bool:
        """Whether it reduces the rows of strips."""
        return PER_ROW in self.writes

    def operands(
        self, y_dtype: str, strip: Expr | None = None, num_scales: int = 0
    ) -> tuple[list[Operand], list[Operand]]:
        """The regions of the further reads, and of y and the further writes. strip:
        columns of y in a strip. num_scales: of operands between weights and reads."""
        rows, columns = Extent(name="rows"), Extent(name="columns", begins=8)
        reads = {
            PER_ELEMENT: Operand((rows, columns), leading=True),
            PER_COLUMN: Operand((columns,), leading=True),
            PER_ROW: Operand((rows,), leading=True),
        }
        y_columns = replace(columns, times=8, per=8) if self.pads else columns
        y = Operand((rows, y_columns), self.dtype or y_dtype, leading=True)
        strips = Extent(name="columns", per=strip)
        writes = {**reads, PER_ROW: Operand((strips, rows), leading=True)}
        if self.mirrors:
            place = 1 + self.weights + num_scales + len(self.reads)  # that of y
            writes[PER_ELEMENT] = replace(y, mirrors=place)
        return [reads[k] for k in self.reads], [y, *(writes[k] for k in self.writes)]

    def __str__(self) -> str:
        return f"epilogue {self.half.name}"


def epilogue(
    *,
    source: str | Path,
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
    gated: bool = False,
    dtype: str | None = None,
    constants: Mapping[str, int | float] | None = None,
) -> Callable[[Callable[..., Any]], Epilogue]:
    """Make an epilogue of a NumPy body: body(sums, *reads, y, *writes) fills y and the
    writes. `sums` is the fp32 tile x @ w.T; with `gated`, there are two of them, of two
    weights. Its arrays are views of the call's regions, clipped at the edges.

    source: the `.cuh` file that defines `template <class Task> struct <name>`.
    reads, writes: the arrays beyond x, the weights and y: `PER_ELEMENT` [rows,
        columns]; `PER_COLUMN` [columns]; `PER_ROW` [rows]. A PER_ROW write has a
        number for each row of a *strip*, [strips, rows], of which the body gets one:
        then the body is called for each strip of the tile, `Tiles.strip_columns` wide.
    dtype: the elements of y; None: those of x. For float8_e4m3fn the body gets y in
        fp32. Then it is rounded; numbers beyond +-448 become +-448, NaN stays.
    constants: named numbers for the CUDA half, as those of `device_function`."""

    def decorate(body: Callable[..., Any]) -> Epilogue:
        half = DeviceFunction(
            name=body.__name__,
            body=body,
            source=source,
            lane=TENSOR,
            reads=(2 if gated else 1) + len(reads),
            writes=1 + len(writes),
            constants={} if constants is None else constants,
        )
        result = Epilogue(half, tuple(reads), tuple(writes), gated, dtype)
        _check(result)
        return result

    return decorate


def _check(epilogue: Epilogue) -> None:
    for name, kinds, supported in (
        ("reads", epilogue.reads, READS),
        ("writes", epilogue.writes, WRITES),
        ("dtype", [epilogue.dtype or Y_DTYPES[0]], Y_DTYPES),
    ):
        if faults := [kind for kind in kinds if kind not in supported]:
            raise GraphError(
                f"{name}= of {epilogue} is unknown",
                where=str(epilogue),
                wanted=f"{name}= of {', '.join(map(repr, supported))}",
                got=", ".join(map(repr, faults)),
                fix="use the constants of etc_dist/functions/epilogue.py",
            )
    parameters = signature(epilogue.half.body).parameters.values()
    wanted = epilogue.half.reads + epilogue.half.writes
    if len(parameters) != wanted or any(
        p.kind is Parameter.KEYWORD_ONLY for p in parameters
    ):
        sums = "gate, up" if epilogue.gated else "sums"
        arrays = [*(f"a {k} read" for k in epilogue.reads), "y"]
        arrays += [f"a {k} write" for k in epilogue.writes]
        raise GraphError(
            f"the body of {epilogue} does not take its arrays",
            where=str(epilogue),
            wanted=f"{wanted} positional parameters: {sums}, {', '.join(arrays)}",
            got=f"({', '.join(map(str, parameters))})",
            fix="declare further arrays in reads= and writes=",
        )


@epilogue(source="epilogues/store.cuh")
def store(sums: Any, y: Any) -> None:
    """y = the sums, rounded to its dtype."""
    y[...] = sums.astype(y.dtype)


def store_on_ranks(count: int) -> Epilogue:
    """As `store`, into this rank's memory and that of `count` - 1 peers: y is a region
    of a symmetric tensor, the further writes are the same one on each peer."""

    def body(sums: Any, *ys: Any) -> None:
        for y in ys:
            y[...] = sums.astype(y.dtype)

    half = DeviceFunction(
        name="store_on_ranks",
        body=body,
        source="epilogues/store_on_ranks.cuh",
        lane=TENSOR,
        reads=1,
        writes=count,
    )
    return Epilogue(half, (), (PER_ELEMENT,) * (count - 1), False, None, mirrors=True)


@epilogue(source="epilogues/partial.cuh", dtype="float32")
def partial(sums: Any, y: Any) -> None:
    """y = the sums, in fp32."""
    y[...] = sums


@epilogue(source="epilogues/logits.cuh", dtype="float32")
def logits(sums: Any, y: Any) -> None:
    """y = the sums, in fp32, each of two partial sums over k on swapped tiles of more
    than 64 columns. Columns of y after those of w have no meaning."""
    y[:, : sums.shape[1]] = sums


logits = replace(logits, pads=True)


@epilogue(source="epilogues/swiglu.cuh", gated=True)
def swiglu(gate: Any, up: Any, y: Any) -> None:
    """y = silu(gate) * up, rounded: SwiGLU (Shazeer, 2020)."""
    y[...] = (silu(gate) * up).astype(y.dtype)


def activated(activation: Activation) -> Epilogue:
    """y = the activation of gate and up, rounded."""
    if activation == SWIGLU:
        return swiglu
    of = activation.constants()

    @epilogue(source="epilogues/activated.cuh", gated=True, constants=of)
    def activated(gate: Any, up: Any, y: Any) -> None:
        y[...] = activation.apply(gate, up).astype(y.dtype)

    return activated


def soft_cap(cap: float) -> Epilogue:
    """y = cap * tanh(sums / cap), rounded."""

    @epilogue(source="epilogues/soft_cap.cuh", constants={"kCap": float(cap)})
    def soft_cap(sums: Any, y: Any) -> None:
        y[...] = (np.float32(cap) * np.tanh(sums / np.float32(cap))).astype(y.dtype)

    return soft_cap


@epilogue(source="epilogues/residual.cuh", reads=[PER_ELEMENT])
def residual(sums: Any, addend: Any, y: Any) -> None:
    """y = sums + addend, added in fp32 and rounded."""
    y[...] = (sums + addend.astype(np.float32)).astype(y.dtype)


@epilogue(source="epilogues/row_squares.cuh", writes=[PER_ROW])
def row_squares(sums: Any, y: Any, squares: Any) -> None:
    """y = the sums, rounded, and each row's sum of squares over a strip, in fp32."""
    y[...] = sums.astype(y.dtype)
    squares[...] = (sums * sums).sum(axis=1)
