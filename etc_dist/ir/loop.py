"""Loops over calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from etc_dist.errors import GraphError
from etc_dist.ir.call import Call, Coordinate
from etc_dist.ir.expr import Expr, Symbol, wrap


class LoopBlock(AbstractContextManager[Symbol]):
    """The context manager of `g.loop`, for one block. `loops` are those that are open,
    `calls` those of the graph, `claim` takes a name."""

    def __init__(
        self,
        loop: Coordinate,
        where: str,
        loops: list[Coordinate],
        calls: Sequence[Call],
        claim: Callable[[str], str],
    ):
        self._loop, self._where = loop, where
        self._loops, self._calls, self._claim = loops, calls, claim
        self._first_idx: int | None = None

    def __enter__(self) -> Symbol:
        name = self._loop.symbol.name
        if self._first_idx is not None:
            raise GraphError(
                f"loop {name} is entered twice",
                where=self._where,
                wanted="one block of `with` for each g.loop(...)",
                got="a second one",
                fix="write all calls of the loop in one block, or call g.loop() again, "
                "with another name",
            )
        self._claim(name)
        self._first_idx = len(self._calls)
        self._loops.append(self._loop)
        return self._loop.symbol

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._loops.pop()
        if kind is None and self._first_idx == len(self._calls):
            name = self._loop.symbol.name
            raise GraphError(
                f"loop {name} has no calls",
                where=self._where,
                wanted="calls in the block of `with`",
                got="none",
                fix=f"write g.call(...) in the block of with g.loop({name}=...)",
            )


def refuse_open(loops: Sequence[Coordinate], where: str) -> None:
    """Raise GraphError for loops whose block has not ended."""
    if loops:
        raise GraphError(
            f"loop {loops[-1].symbol.name} has no end",
            where=where,
            wanted="a block of `with` that ends before the graph function",
            got="a loop that was entered by hand",
            fix="write `with g.loop(...) as layer:` around its calls",
        )


def loop_extent(where: str, extents: Mapping[str, Expr | int]) -> tuple[str, Expr]:
    """The name and the number of turns of a loop, from the arguments of g.loop().
    Raises GraphError unless there is one."""
    if len(extents) != 1:
        raise GraphError(
            "a loop does not have one coordinate",
            where=where,
            wanted="one argument, as in g.loop(layer=layers)",
            got=f"{len(extents)} arguments",
            fix="nest a loop for each coordinate",
        )
    ((name, turns),) = extents.items()
    return name, wrap(turns, f"{where}: the turns of loop {name}")
