"""Every error that etc_dist raises, in one tree.

EtcDistError
 ├── ArgumentError        a call's arrays, shapes, dtypes or options do not fit
 ├── ArgumentTypeError    an argument of a collective call has a wrong Python type
 ├── GraphError           a graph function is not a correct program
 │    ├── DeadlockError   some wait can never be met
 │    └── RaceError       two tasks touch the same bytes and nothing orders them
 ├── ScheduleError        no plan can be made for this graph and these workers
 ├── CodegenError         the plan cannot be written as CUDA source
 ├── BuildError           the generated source did not compile or load
 ├── EmulationError       a CUDA body that the emulator ran is wrong
 ├── WorldError           processes, GPUs or symmetric memory are not as needed
 │    └── SymmetricMemoryError   the symmetric heap is exhausted
 ├── WaitTimeoutError     a wait was not met within the time limit; the run was ended
 └── NotFiniteError       the logits of a step of a model are not finite

Warnings: CpuOnlyWarning, for what only the CPU backend runs.

A message has four parts: what failed, where, what was wanted and got, what to do.
A wrong Python type is a plain TypeError, raised by `expect_type`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real


class EtcDistError(Exception):
    """Base of all errors here, in four parts, which are attributes too: `what` is wrong
    `where`, what is `wanted`, what was `got`, and the `fix`. `details`: attributes that
    a class declares with their defaults."""

    def __init__(
        self,
        what: str,
        *,
        where: str,
        wanted: str,
        got: str,
        fix: str,
        **details: object,
    ):
        assert all(hasattr(type(self), name) for name in details), details
        self.what, self.where = what, where
        self.wanted, self.got, self.fix = wanted, got, fix
        vars(self).update(details)
        super().__init__(
            f"{what}\n  where:  {where}\n  wanted: {wanted}\n  got:    {got}\n"
            f"  to do:  {fix}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are sent between ranks: pickle the parts, not the message.
        return (_rebuild, (type(self), self.__dict__.copy()))


def _rebuild(cls: type[EtcDistError], state: dict[str, object]) -> EtcDistError:
    parts = {k: str(state[k]) for k in ("what", "where", "wanted", "got", "fix")}
    error = cls(parts.pop("what"), **parts)
    error.__dict__.update(state)
    return error


class ArgumentError(EtcDistError, ValueError):
    """A call's arrays, shapes, dtypes, options or data do not fit, on some rank."""


class ArgumentTypeError(EtcDistError, TypeError):
    """An argument of a collective call has a wrong Python type, on some rank."""


class GraphError(EtcDistError):
    """A graph function is not a correct program; all faults are listed."""


class DeadlockError(GraphError):
    """Some wait can never be met with the workers at hand."""


class RaceError(GraphError):
    """Two tasks touch the same bytes, one writes, and no event orders them."""


class ScheduleError(EtcDistError):
    """No plan can be made for this graph and these workers."""


class CodegenError(EtcDistError):
    """The plan cannot be written as CUDA source."""


class BuildError(EtcDistError):
    """The generated source did not compile or load.

    `source` is the whole text; `numbered()` prints it with line numbers."""

    source: str = ""

    def numbered(self) -> str:
        """The source with line numbers."""
        lines = self.source.splitlines()
        return "\n".join(f"{n:4d}  {line}" for n, line in enumerate(lines, 1))


class EmulationError(EtcDistError):
    """A CUDA body, run by the emulator, accesses memory out of bounds or without order,
    or its threads wait for one another."""


class CpuOnlyWarning(UserWarning):
    """The CPU backend runs a region or an array that GPUs refuse."""


def warn_cpu_only(error: EtcDistError) -> None:
    """Warn of the `error` that GPUs give, at the line that calls this package."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals["__name__"].startswith(__package__):
        frame, level = frame.f_back, level + 1
    warnings.warn(str(error), CpuOnlyWarning, stacklevel=level)


class WorldError(EtcDistError):
    """Processes, GPUs or symmetric memory are not as needed."""


class SymmetricMemoryError(WorldError, MemoryError):
    """The symmetric heap has no space for an allocation."""


def expect_type(
    value: object, kind: type | tuple[type, ...], name: str, *, fix: str = ""
) -> None:
    """Raise TypeError("name expects a str, got int; fix") unless `value` is a `kind`.

    NumPy's integers count as int and its floats as float; a bool does not."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    accepted = tuple({int: Integral, float: Real}.get(k, k) for k in kinds)
    is_bool = isinstance(value, bool) and bool not in kinds
    if is_bool or not isinstance(value, accepted):
        wanted = " or ".join("None" if k is type(None) else k.__name__ for k in kinds)
        article = "an" if wanted[0] in "AEIOUaeiou" else "a"
        got = "None" if value is None else type(value).__name__
        advice = f"; {fix}" if fix else ""
        raise TypeError(f"{name} expects {article} {wanted}, got {got}{advice}")


def expect_range(value: int, low: int, high: int | None, name: str) -> int:
    """`value` as an int; TypeError or ArgumentError unless it is an int from `low` to
    `high`."""
    expect_type(value, int, name)
    if value < low or (high is not None and value > high):
        limits = f"from {low}" if high is None else f"from {low} to {high}"
        raise ArgumentError(
            f"{name} is out of range",
            where=f"argument {name}",
            wanted=f"{name}: an integer {limits}" + " on" * (high is None),
            got=f"{name} = {value}",
            fix="change it, or omit it if it has a default",
        )
    return int(value)


def expect_choice(value: object, choices: Sequence[object], name: str) -> None:
    """Raise TypeError or ArgumentError unless `value` is one of `choices`."""
    expect_type(value, type(choices[0]), name)
    if value not in choices:
        raise ArgumentError(
            f"unknown {name}",
            where=f"argument {name}",
            wanted=" or ".join(map(repr, choices)),
            got=f"{name} = {value!r}",
            fix="choose one of these",
        )


def as_refusal(error: Exception, what: str) -> EtcDistError:
    """The four-part error of all ranks for `error` on one; a TypeError if it is one."""
    if isinstance(error, EtcDistError):
        return error
    kind = ArgumentTypeError if isinstance(error, TypeError) else ArgumentError
    refusal = kind(
        f"{what} cannot be used",
        where="before the launch, on the rank that is named",
        wanted="arguments of the documented types and values",
        got=f"{type(error).__name__}: {error}",
        fix="correct the error above; nothing was launched on any rank",
    )
    refusal.__cause__ = error
    return refusal


@dataclass(frozen=True)
class WaitRecord:
    """One wait that was not met: who waited for what, and how far it had come. `worker`
    is -1 where no worker had taken the task yet."""

    rank: int
    worker: int
    lane: str
    task: str
    event: str
    have: int
    want: int

    def __str__(self) -> str:
        worker = f"worker {self.worker}, " if self.worker >= 0 else ""
        return (
            f"rank {self.rank}, {worker}{self.lane} lane: {self.task} "
            f"waits for {self.event}: have {self.have}, want {self.want}"
        )


@dataclass(frozen=True)
class WorkersRecord:
    """How many workers of a rank had begun when the first wait of a run failed."""

    rank: int
    begun: int
    workers: int

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.begun} of {self.workers} workers had begun"


@dataclass(frozen=True)
class RangeRecord:
    """One task whose data do not fit the graph, such as indices out of range: `wanted`
    names the index expressions, `got` their values as far as they are known."""

    rank: int
    worker: int
    lane: str
    task: str
    wanted: str
    got: str

    def __str__(self) -> str:
        return f"rank {self.rank}, worker {self.worker}, {self.lane} lane: {self.task}"


class WaitTimeoutError(EtcDistError, TimeoutError):
    """A wait was not met within the time limit; every rank's run was ended.

    `records` lists the waits of all ranks that still responded."""

    records: tuple[WaitRecord, ...] = ()


class NotFiniteError(EtcDistError, ArithmeticError):
    """Logits of a step are NaN or +inf, or a row has no finite one.

    `requests` lists the numbers of the requests with such logits."""

    requests: tuple[int, ...] = ()
