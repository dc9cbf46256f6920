"""What fused operations share: compiled programs for all shapes, and their calls."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

from etc_dist.compiler import compile
from etc_dist.errors import ArgumentError
from etc_dist.ir import GraphFunction
from etc_dist.ops.arguments import sizes_for
from etc_dist.program import Bound, Program, Room, as_refusal
from etc_dist.runtime.arrays import (
    UNKNOWN,
    Array,
    described,
    empty_like,
    identity,
    inspect,
)
from etc_dist.runtime.stream import stream_for
from etc_dist.world import World
from etc_dist.world.agreement import sign

REMEMBERED_CALLS = 256
"""Calls whose argument blocks are kept, so that repeating one costs microseconds."""

Fitted = tuple[dict[str, Array], dict[str, int]]
"""The graph's tensors by name, and its dims."""


class Operation:
    """A program with a fixed set of arguments; owns it and thereby its buffers. There
    may be several, for shapes that differ much: `program` is that of the last call.

    A subclass names its inputs and says what they must be; the first of them decides
    the array library and the stream. Making, calling and closing one is collective.
    """

    names: tuple[str, ...] = ()

    def __init__(
        self,
        make_graph: Callable[..., GraphFunction],
        options: Mapping[str, Any],
        world: World,
        schedule: str = "static",
        trace: bool | None = None,
        sizes: Mapping[str, Any] | None = None,
        others: Mapping[str, Any] | None = None,
    ):
        """`options` are what the operation itself decides of its graph, `sizes` what
        the user asked for beside it, `others` what decides which programs there are.
        All ranks must have them alike."""
        self.world = world
        self._programs: list[Program] = []
        try:
            options = {**options, **sizes_for(make_graph, options, sizes)}
        except Exception as error:
            world.refuse(as_refusal(error, f"the options of {type(self).__name__}"))
        self._agree({**options, "schedule": schedule, **(others or {})})
        self.program = self._compile(make_graph, options, schedule, trace)
        self._calls: OrderedDict[Any, tuple[Program, Bound]] = OrderedDict()

    def synchronize(self) -> None:
        """Wait for the last call on every rank; raises what ended it. Collective."""
        with self.world.exclusive:
            for program in self._programs:
                program.synchronize()

    def close(self) -> None:
        """Free the buffers; collective, idempotent."""
        with self.world.exclusive:
            self._calls.clear()
            with ExitStack() as stack:
                for program in self._programs:
                    stack.callback(program.close)

    def misfit(self, wanted: str, got: str) -> ArgumentError:
        """The error for arguments that do not fit this operation."""
        name = type(self).__name__
        return ArgumentError(
            f"the arguments do not fit {name}",
            where=f"{name} on {self.world.size} ranks",
            wanted=wanted,
            got=got,
            fix="correct the arguments; nothing was launched on any rank",
        )

    def _agree(self, options: Mapping[str, Any]) -> None:
        """Refuse, on every rank, options that differ between ranks."""
        given = ", ".join(f"{name}={options[name]}" for name in sorted(options))
        text = f"{type(self).__name__}({given})"
        self.world.match_call(sign(text), lambda: text)

    def _compile(
        self,
        make_graph: Callable[..., GraphFunction],
        options: Mapping[str, Any],
        schedule: str,
        trace: bool | None,
    ) -> Program:
        """One more program of this operation; collective."""
        try:
            graph = make_graph(self.world.size, **options)
        except Exception as error:
            what = f"the options of {type(self).__name__}"
            self.world.refuse(as_refusal(error, what))
        program = compile(graph, self.world, schedule=schedule, trace=trace)
        self._programs.append(program)
        return program

    def _program_for(self, dims: Mapping[str, int]) -> Program:
        """The program that runs these dims, on every rank the same."""
        return self._programs[0]

    def _call(self, inputs: Sequence[Any], out: Any, stream: Any) -> Any:
        with self.world.exclusive:
            try:
                stream = stream_for(self.world.backend, stream, inputs[0])
                if out is None:
                    # Before the key, so that each call with a new output is a new call.
                    with stream or nullcontext():
                        out = self._make_output(inputs)
                key = (*map(identity, inputs), identity(out))
                known = self._calls.get(key)
                if known is None:
                    program, bound, out = self._bind(inputs, out)
                else:
                    program, bound = known
            except Exception as error:
                what = f"the arguments of {type(self).__name__}"
                self.world.refuse(as_refusal(error, what))
            self.program = program
            program.launch(bound, stream)
            if known is None and UNKNOWN not in key:
                self._calls[key] = program, bound.without_owners()
                if len(self._calls) > REMEMBERED_CALLS:
                    self._calls.popitem(last=False)
            return out

    def _output_shape(self, *shapes: Sequence[int]) -> tuple[int, ...]:
        """The output's shape for inputs of these shapes."""
        raise NotImplementedError

    def _check(self, inputs: Sequence[Array]) -> None:
        """Raise `misfit` for inputs that do not fit each other."""
        raise NotImplementedError

    def _tensors(self, inputs: Sequence[Array], y: Array) -> Fitted:
        """The graph's tensors, in the caller's memory, and its dims."""
        raise NotImplementedError

    def _make_output(self, inputs: Sequence[Any]) -> Any:
        try:
            shape = self._output_shape(*(i.shape for i in inputs))
            return empty_like(inspect(self.names[0], inputs[0]), shape)
        except (AttributeError, IndexError, ArgumentError):
            return None  # _bind finds the words

    def _bind(self, inputs: Sequence[Any], out: Any) -> tuple[Program, Bound, Any]:
        seen = [inspect(n, i) for n, i in zip(self.names, inputs, strict=True)]
        if any(0 in a.shape for a in seen):
            raise self.misfit("no axis of length 0", described(*seen))
        self._check(seen)
        shape = self._output_shape(*(a.shape for a in seen))
        if out is None:
            out = empty_like(seen[0], shape)
        y = inspect("out", out)
        if y.shape != shape:
            raise self.misfit(f"out {list(shape)}", f"out {y}")
        tensors, dims = self._tensors(seen, y)
        program = self._program_for(dims)
        return program, program.bind(tensors, dims), out


def shapes_up_to(name: str, most: int) -> Room:
    """Room for dims in which `name` is up to `most`, whichever of them is needed first:
    a smaller one may need more memory than a larger one, cut into more pieces."""
    return lambda dims: [{**dims, name: n} for n in range(1, most + 1)]
