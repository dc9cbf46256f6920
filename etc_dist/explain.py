"""The command `etc-dist explain`: the way of a call, from the Python function to the
tensor cores: it observes a small call on the CPU backend, and reads the kernels."""

from __future__ import annotations

import inspect
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

import numpy as np

from etc_dist import codegen, compiler
from etc_dist.errors import ArgumentError
from etc_dist.ops import functional
from etc_dist.ops.operation import Operation
from etc_dist.program import Program
from etc_dist.runtime.build import build, kernels_folder
from etc_dist.runtime.cpu.executor import CpuExecutor
from etc_dist.runtime.gpu import GpuExecutor
from etc_dist.schedule import schedule_static
from etc_dist.settings import Settings
from etc_dist.verify.verify import verify
from etc_dist.world import start

SIZE = 64
"""Rows, columns and k of the call."""
RANKS = {"x": 2, "w": 2, "residual": 2, "gain": 1}
"""The arguments that have no default: their numbers of axes."""
ROOT = Path(__file__).parent.parent
DEFINITION = re.compile(
    r"^ *ETC_DEVICE (?:static |constexpr )*[\w:<>,* &]*?\b(\w+)\(", re.MULTILINE
)
STRUCT = re.compile(r"^(?:struct|class) (\w+)", re.MULTILINE)
INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)
BODIES = "functions/"
"""The folder of the device functions."""
TENSOR_CORE = "wgmma.mma_async"


@dataclass(frozen=True)
class Step:
    """A function on the way: its place, its name and the first line about it."""

    place: str
    name: str
    text: str
    depth: int = 0

    def show(self, width: int) -> str:
        """The step as a line; `width` is that of the places."""
        head = f"  {self.place:<{width}}  {'  ' * self.depth}{self.name}"
        return f"{head}: {self.text}" if self.text else head


def explain(name: str) -> str:
    """The functions from a call of the operation `name` of `etc_dist` to the device
    code of its matmul, as text. ArgumentError for another name."""
    operations = _operations()
    if name not in operations:
        raise ArgumentError(
            f"there is no operation {name!r} to explain",
            where="etc-dist explain",
            wanted=f"one of {', '.join(operations)}",
            got=repr(name),
            fix="name one of these",
        )
    function, ranks = operations[name]
    arguments = [np.ones((SIZE,) * count, np.float16) for count in ranks]
    first, again = Calls(), Calls()
    # An empty cache: nothing is proved yet.
    with TemporaryDirectory() as folder, start(_settings(folder)) as world:
        with first.observed():
            function(*arguments)
        with again.observed():
            function(*arguments)
        operation = next(iter(world.kept.values()))
        assert isinstance(operation, Operation)
        program = operation.program
    parts = {
        "The first call makes the program:": first.way(
            schedule_static, codegen.generate, compiler._executor, verify
        ),
        "Later calls, which check NumPy arrays again:": again.way(CpuExecutor.launch),
        "On a GPU, instead of those of the CPU:": [
            _step(build.__code__),
            _step(GpuExecutor.launch.__code__),
        ],
        "The persistent kernel, in each worker:": _device_steps(program),
    }
    width = max(len(step.place) for steps in parts.values() for step in steps)
    lines = []
    for title, steps in parts.items():
        lines += [title, *(step.show(width) for step in steps)]
    return "\n".join(lines) + "\n"


def _settings(folder: str) -> Settings:
    return replace(Settings.load(), backend="cpu", cache=Path(folder))


def _operations() -> dict[str, tuple[Callable[..., Any], list[int]]]:
    """name -> the function, and the numbers of axes of its required arguments."""
    function_by_name = {}
    for name, function in vars(functional).items():
        if getattr(function, "__module__", "") != functional.__name__:
            continue
        required_names = [
            argument.name
            for argument in inspect.signature(function).parameters.values()
            if argument.default is argument.empty
        ]
        if all(argument in RANKS for argument in required_names):
            num_axes = [RANKS[argument] for argument in required_names]
            function_by_name[name] = function, num_axes
    return function_by_name


# ----------------------------------------------------------------------- Python


@dataclass(eq=False)
class EnteredFunction:
    """A function that a call has entered."""

    code: CodeType
    caller: EnteredFunction | None
    is_on_way: bool = False


@dataclass
class Calls:
    """The functions of this package that a call enters, in order."""

    entries: list[EnteredFunction] = field(default_factory=list)

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Observe what this thread does inside."""
        frames: dict[FrameType, EnteredFunction] = {}

        def note(frame: FrameType, event: str, _: Any) -> None:
            if event == "return":
                frames.pop(frame, None)
            elif event == "call" and _is_ours(frame.f_code):
                outer = frame.f_back
                while outer is not None and outer not in frames:
                    outer = outer.f_back
                caller = None if outer is None else frames[outer]
                frames[frame] = EnteredFunction(frame.f_code, caller)
                self.entries.append(frames[frame])

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(before)

    def way(self, *targets: Callable[..., Any]) -> list[Step]:
        """The functions from the call to the first entry of each of the targets and of
        each graph."""
        code_objects = {target.__code__ for target in targets}
        code_objects |= {
            entry.code
            for entry in self.entries
            if "/ops/" in entry.code.co_filename
            and entry.code.co_name.endswith("_graph")
        }
        for entry in self.entries:
            if entry.code in code_objects:
                code_objects.remove(entry.code)
                step: EnteredFunction | None = entry
                while step is not None:
                    step.is_on_way = True
                    step = step.caller
        steps = []
        depths: dict[EnteredFunction | None, int] = {None: -1}
        for entry in self.entries:
            if entry.is_on_way:
                is_local = "<locals>" in entry.code.co_qualname  # not worth a line
                depths[entry] = depths[entry.caller] + (not is_local)
                if not is_local:
                    steps.append(_step(entry.code, depths[entry]))
        return steps


def _is_ours(code: CodeType) -> bool:
    return Path(code.co_filename).is_relative_to(ROOT / "etc_dist")


def _step(code: CodeType, depth: int = 0) -> Step:
    path = Path(code.co_filename).relative_to(ROOT)
    module = sys.modules[".".join(path.with_suffix("").parts)]
    value: Any = module
    for name in code.co_qualname.split("."):
        value = getattr(value, name, None)
    place = f"{path}:{code.co_firstlineno}"
    return Step(place, code.co_qualname, _first_sentence(value.__doc__ or ""), depth)


def _first_sentence(text: str) -> str:
    text = " ".join(text.removeprefix("Internal: ").split())
    return re.split(r"(?<=[.;])\s", text)[0].rstrip(".;")


# ----------------------------------------------------------------------- kernels


@dataclass(frozen=True)
class Definition:
    """A function of the device code."""

    header: str
    line: int
    owner: str
    name: str
    comment: str
    body: str

    @cached_property
    def calls(self) -> list[str]:
        """The names of the functions that the body calls, in its order."""
        return list(dict.fromkeys(re.findall(r"\b(\w+)\s*[<(]", self.body)))

    @cached_property
    def body_calls(self) -> set[str]:
        """Those of any device function."""
        body = r"(?:\bcompute\.|\bFunction\b[^;()]*::)(?:template )?"
        return set(re.findall(body + r"(\w+)\s*[<(]", self.body))

    def step(self, depth: int) -> Step:
        """This function as a step."""
        name = f"{self.owner}::{self.name}" if self.owner else self.name
        text = _first_sentence(self.comment)
        return Step(f"kernels/{self.header}:{self.line}", name, text, depth)


def _device_steps(program: Program) -> list[Step]:
    """The shortest way from the worker to the tensor cores by the calls that the texts
    of the included headers show, or to the bodies of a program without matmuls."""
    texts = _included(program.source)
    definitions = [d for name in texts for d in _definitions(name, texts[name])]
    has_tensor_cores = any(TENSOR_CORE in text for text in texts.values())
    first = next(d for d in definitions if d.name == "run_worker")
    before: dict[Definition, Definition | None] = {first: None}
    waiting = deque([first])
    while waiting:
        caller = waiting.popleft()
        is_end = caller.header.startswith(BODIES)
        if has_tensor_cores:
            is_end = TENSOR_CORE in texts[caller.header]
        if is_end:
            return _way_to(caller, before)
        near = _closure(caller.header, texts)
        # NOTE: kinds of tiles share a name; the first one that is included is followed.
        candidates = [d for d in definitions if d.header in near and d not in before]
        first_by_name = {d.name: d for d in reversed(candidates)}
        called = [first_by_name[n] for n in caller.calls if n in first_by_name]
        bodies = [
            d
            for d in definitions
            if d.header.startswith(BODIES) and d.name in caller.body_calls
        ]
        own_bodies = [d for d in bodies if f'"{d.header}"' in program.source]
        for definition in [*called, *(own_bodies or bodies)]:
            if definition not in before:
                before[definition] = caller
                waiting.append(definition)
    raise AssertionError("run_worker calls no body")


def _way_to(
    end: Definition, before: Mapping[Definition, Definition | None]
) -> list[Step]:
    way: list[Definition] = []
    definition_on_way: Definition | None = end
    while definition_on_way is not None:
        way.append(definition_on_way)
        definition_on_way = before[definition_on_way]
    return [
        definition.step(step_idx) for step_idx, definition in enumerate(reversed(way))
    ]


def _included(source: str) -> dict[str, str]:
    """The headers of a program, in the order of their inclusion: name -> text."""
    folder = kernels_folder()
    texts: dict[str, str] = {}
    waiting = INCLUDE.findall(source)
    while waiting:
        name = waiting.pop(0)
        if name not in texts and (folder / name).is_file():
            texts[name] = (folder / name).read_text()
            waiting = [*INCLUDE.findall(texts[name]), *waiting]
    return texts


def _closure(header: str, texts: Mapping[str, str]) -> set[str]:
    """A header, and those that it includes."""
    closure = {header}
    waiting = [header]
    while waiting:
        for name in INCLUDE.findall(texts[waiting.pop()]):
            if name in texts and name not in closure:
                closure.add(name)
                waiting.append(name)
    return closure


def _definitions(header: str, text: str) -> Iterator[Definition]:
    structs = [
        (match.start(), _end(text, text.find("{", match.end())), match[1])
        for match in STRUCT.finditer(text)
    ]
    for match in DEFINITION.finditer(text):
        opening = text.find("{", match.end())
        if opening < 0 or ";" in text[match.end() : opening]:
            continue
        body = text[opening : _end(text, opening)]
        comment, owner = _comment(text, match.start()), ""
        for begin, end, name in structs:
            if begin < match.start() < end:
                owner, comment = name, comment or _comment(text, begin)
        line = text.count("\n", 0, match.start()) + 1
        yield Definition(header, line, owner, match[1], comment, body)


def _end(text: str, opening: int) -> int:
    """The position after the brace that closes the one at `opening`."""
    depth = 0
    for place in range(opening, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1
    return len(text)


def _comment(text: str, place: int) -> str:
    """The comment before a definition that begins there, or before its template."""
    lines = text[:place].splitlines()
    line_idx = len(lines)
    while line_idx > 0 and re.match(
        r" *(template\b|  +\w.*[,>]$)", lines[line_idx - 1]
    ):
        line_idx -= 1
    lines = lines[:line_idx]
    comment: list[str] = []
    while lines and lines[-1].lstrip().startswith("//"):
        comment.insert(0, lines.pop().lstrip(" /"))
    return " ".join(comment)
