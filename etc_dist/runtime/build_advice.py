"""The errors of a source that did not compile, and the fix, from the compiler's log."""

from __future__ import annotations

import re
from pathlib import Path

_NO_STRUCT = re.compile(
    r'error: (?:class ")?(?:etc::)?(\w+)"? (?:is not a template|may not have a templ)'
    r"|no template named '(\w+)'"
    r"|after alias declaration\n[^\n]*Function = (\w+)<Task>"
)
_NO_RUN = re.compile(
    r'class "(?:etc::)?(\w+)<[^\n]*" has no member "run"'
    r"|no member named 'run' in '(?:etc::)?(\w+)<"
)
_OTHER = {
    r"error: [^\n]*\n[^\n]*\.operand<\d+>\(": (
        "write task.template operand<n>(), counted from 0: reads first, then writes"
    ),
    r"(?:arithmetic or unscoped enum type|modifiable lvalue|binary expression"
    r"|not assignable)[^\n]*\n[^\n]*\.at\(|subscript operator|\"\[\]\" matches": (
        "an element is *x.at(i, j): at() returns its address"
    ),
    r"NoScratch|error: invalid type conversion\n[^\n]*\.scratch": (
        "tasks of the transfer lane have no scratch memory: use functions of a warp, "
        'or lane="tensor"'
    ),
    r"cuda_(bf|fp)16|__nv_bfloat16|\b__half\b|__float2(bf|h)"
    r"|types are: etc::b?f16 = |known conversion from 'float' to 'const b?f16'": (
        "elements of 16 bits are bf16 or f16 of common/types.cuh: they convert to "
        "float, and bf16::from(v) rounds a float"
    ),
    r"open source file|' file not found": (
        "put the file that is included into the folder of the .cuh or below it; "
        "headers of CUDA and of the system cannot be included"
    ),
}
"""The fix by a pattern of the log; the first one that matches counts."""


_NOTE = re.compile(
    r"^(?: {12}instantiation of [^\n]*|In file included from [^\n]*"
    r"|/[^:\n]*:\d+:\d+: note: in instantiation [^\n]*(?:\n *(?:\d+ )?\|[^\n]*)*)\n",
    re.MULTILINE,
)
"""Where a template was instantiated, or a file included, by NVRTC and by clang."""
_NO_NOTES = re.compile(r"^          detected during:\n(?! {12})", re.MULTILINE)


def errors_of(text: str, log: str) -> str:
    """`log` without the notes that name no file of the user. There are several of them
    for each error in a body, all in the library's headers."""
    folders = {f"{Path(file).parent}/" for file in _own_files(text)}

    def kept(note: re.Match[str]) -> str:
        is_own = any(folder in note[0] for folder in folders)
        return note[0] if is_own and not note[0].startswith("In file") else ""

    return _NO_NOTES.sub("", _NOTE.sub(kept, log)).strip()


def advice(text: str, log: str) -> str:
    """The fix for errors in `log`, of NVRTC or clang, about the generated `text`."""
    for pattern in (_NO_STRUCT, _NO_RUN):
        match = pattern.search(log)
        name = match and next(filter(None, match.groups()))
        if name and f"Function = {name}<Task>" in text:
            return (
                f"{_file_of(name, text)} must define, in namespace etc: template "
                f"<class Task> struct {name} {{ static void run(const Task& task) "
                "{ ... } }"
            )
    for message, fix in _OTHER.items():
        if re.search(message, log):
            return fix
    if "undeclared identifier" in log:
        return (
            "correct the .cuh file of the first error; define a CUDA function that the "
            "emulator lacks under #ifdef ETC_EMULATED"
        )
    return "correct the .cuh file of the first error; error.numbered() is the source"


def _file_of(name: str, text: str) -> str:
    """The source of device function `name`, or all candidates."""
    files = _own_files(text)
    matches = [file for file in files if Path(file).stem == name]
    return " or ".join(matches or files) or f"the source of {name}"


def _own_files(text: str) -> list[str]:
    """The sources of device functions outside of the library."""
    return re.findall(r'^#include "(/[^"]+)"', text, re.MULTILINE)
