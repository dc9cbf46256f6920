"""Requirements: values that numbers of a graph may have in a run.

The proof of a plan finds tasks that do not fit. A requirement is for numbers that only
a CUDA body reads, such as that of a tile shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from etc_dist.errors import EtcDistError
from etc_dist.ir.expr import Expr

Values = tuple[int, ...]


@dataclass(frozen=True)
class Requirement:
    """Numbers of a graph that together have one of the `values` at the dims of a run.
    what: the error, if they have not. fix: what to do then. exprs: the numbers as
    expressions of dims."""

    what: str
    numbers: tuple[Expr, ...]
    values: tuple[Values, ...]
    fix: str
    exprs: tuple[Expr, ...]

    def __str__(self) -> str:
        *first, last = map(str, self.numbers)
        alike: dict[str, list[Values]] = {}
        for before in dict.fromkeys(row[:-1] for row in self.values):
            alike.setdefault(self._last(before), []).append(before)
        groups = [
            f"{last} = {values}" + self._where(first, prefixes)
            for values, prefixes in alike.items()
        ]
        return f"require {'; '.join(groups)}"

    def check(
        self, dims: Mapping[str, int], where: str, kind: type[EtcDistError]
    ) -> None:
        """Raise an error of a kind, if the numbers have none of the values."""
        numbers = tuple(int(number.evaluate(dims)) for number in self.exprs)
        if numbers in self.values:
            return
        pairs = zip(self.numbers, numbers, strict=True)
        text = ", ".join(f"{number} = {value}" for number, value in pairs)
        # Up to the first number that none of the values has.
        count = len(numbers) - 1
        while not (after := self._after(numbers[:count])):
            count -= 1
        place = self._where(list(map(str, self.numbers[:count])), [numbers[:count]])
        raise kind(
            self.what,
            where=where,
            wanted=f"{self.numbers[count]} = {_ranges(after)}{place}",
            got=text,
            fix=self.fix,
        )

    def _last(self, before: Values) -> str:
        return _ranges(self._after(before))

    def _after(self, before: Values) -> list[int]:
        """The values of the number after those with the values `before`."""
        num_before = len(before)
        return sorted(
            {row[num_before] for row in self.values if row[:num_before] == before}
        )

    @staticmethod
    def _where(names: Sequence[str], rows: Sequence[Values]) -> str:
        values = [_ranges(sorted(set(column))) for column in zip(*rows, strict=True)]
        terms = [f"{name} = {of}" for name, of in zip(names, values, strict=True)]
        return f" if {', '.join(terms)}" if terms else ""


def _ranges(values: Sequence[int]) -> str:
    """Numbers in ascending order, in few words."""
    steps = {b - a for a, b in pairwise(values)}
    if len(values) < 3 or len(steps) > 1:
        return " or ".join(map(str, values))
    [step] = steps
    return f"{values[0]} to {values[-1]}" + f" in steps of {step}" * (step > 1)
