"""The headers of a program, as texts by name for NVRTC.

The name of a header is its path below `kernels/`, or the absolute path of a user's
file; each `#include` is rewritten to that name. So the key of a program covers all its
headers, and the compilation fails if it needs any other file.

NOTE: NVRTC opens absolute paths itself. So it gets exactly the text that is searched
for includes, without comments and line splices. Includes in another form than `#include
"NAME"` or `#include <NAME>` are refused."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path

from etc_dist.codegen import Source
from etc_dist.errors import BuildError

_SPLICED = re.compile(r"^(?:[^\n]*\\\n)+[^\n]*", re.MULTILINE)
_COMMENT = r"/\*(?:[^*]|\*(?!/))*\*/"
_TOKEN = re.compile(
    rf"""(?P<comment> {_COMMENT} | //[^\n]* )
    | (?P<raw> (?:u8|[uUL])?R"(?P<mark>[^\s()\\"]*)\( (?s:.*?) \)(?P=mark)" )
    | "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*'
    | \.?\d(?:'?\w|\.)*  # the quotes in a number
    | \w+ | \n""",
    re.VERBOSE,
)
# NOTE: also matches in literals and with comments, as NVRTC may compile a text that
# `_TOKEN` takes for a literal.
_DIRECTIVE = re.compile(
    rf"(?:\#|%:)(?:{_COMMENT}|[^\w\n])*+(?P<word>include_next|include|import|embed)\b"
    rf"[^\S\n]*(?P<name>[^\n]*)"
    r"|\b(?P<test>__has_(?:include\w*|embed)?)\b"
)
_NAME = re.compile(r'"(?P<quoted>[^"\n]+)"|<(?P<angled>[^>\n]+)>')


def headers(source: Source, kernels: Path) -> dict[str, str]:
    """The texts of all headers of a program by name. Raises BuildError for a file
    outside of `kernels` and of the folders of the program's sources."""
    reader = _Included(source, kernels)
    texts: dict[str, str] = {}
    while reader.waiting:
        name, path = reader.waiting.popitem()
        if name not in texts:
            texts[name] = reader.renamed(path)
    return dict(sorted(texts.items()))


class _Included:
    """The folders that a program may include from, and the headers still to be read."""

    def __init__(self, source: Source, kernels: Path):
        self.kernels = kernels
        self.roots = sorted({_normal(path.parent) for path in source.sources})
        # The generated text has the paths of a user's sources as given.
        self.names = {_normal(path): str(path) for path in source.sources}
        own_names = re.findall(r'^#include "([^/"][^"]*)"$', source.text, re.MULTILINE)
        self.waiting = {str(path): path for path in source.sources}
        self.waiting |= {name: kernels / name for name in own_names}

    def renamed(self, path: Path) -> str:
        """The text of a file with renamed includes; adds these to `waiting`."""
        text, directives = _scanned(_read(path), path)

        def rename(directive: re.Match[str]) -> str:
            is_include = directive["word"] == "include"
            name = _NAME.match(directive["name"]) if is_include else None
            file = self.find(name[1] or name[2], path, name[0][0]) if name else None
            if name and file is None and not (name[1] or name[2]).startswith("/"):
                return directive[0]  # NVRTC will not find it, either
            if name is None or file is None or not self.allows(file):
                line = text.count("\n", 0, directive.start()) + 1
                raise _refusal(path, line, directive)
            header_name = self.name(file)
            self.waiting[header_name] = file
            start = directive.start("name") - directive.start()
            end_text = directive["name"][name.end() :]
            return f'{directive[0][:start]}"{header_name}"{end_text}'

        parts, end = [], 0
        for directive in directives:
            parts += [text[end : directive.start()], rename(directive)]
            end = directive.end()
        return "".join([*parts, text[end:]])

    def find(self, name: str, user: Path, quote: str) -> Path | None:
        """The file that an include in `user` refers to, in any folder."""
        folders = [self.kernels, *self.roots]
        if quote == '"':
            folders.insert(0, user.parent)
        # NOTE: of texts, as are the next two: Path takes most of the time of a key.
        paths = (os.path.normpath(os.path.join(folder, name)) for folder in folders)
        return next((Path(path) for path in paths if os.path.isfile(path)), None)

    def allows(self, path: Path) -> bool:
        return str(path).startswith(tuple(map(_below, (self.kernels, *self.roots))))

    def name(self, path: Path) -> str:
        if str(path).startswith(_below(self.kernels)):
            return str(path).removeprefix(_below(self.kernels))
        return self.names.get(path, str(path))


@lru_cache(maxsize=1024)  # programs share most of their headers
def _scanned(text: str, path: Path) -> tuple[str, list[re.Match[str]]]:
    """The normalized `text` of a file, and its directives."""
    normalized = _normalized(text, path)
    return normalized, [*_DIRECTIVE.finditer(normalized)]


def _normalized(text: str, path: Path) -> str:
    """`text` without comments and line splices, with unchanged line numbers."""
    logical_text = text
    while "\\\n" in logical_text:  # one splice can make another
        logical_text = _SPLICED.sub(_joined, logical_text)
    pending = 0

    def replace(token: re.Match[str]) -> str:
        nonlocal pending
        if token["comment"]:
            pending += token[0].count("\n")
            return " "
        if token["raw"] and token[0] not in text:
            raise BuildError(
                "a raw string has a line splice in it",
                where=f"{path}: {token[0].splitlines()[0]}",
                wanted="raw strings without a backslash at the end of a line",
                got=token[0],
                fix="write two strings next to each other",
            )
        if token[0] == "\n":
            num_lines, pending = 1 + pending, 0
            return num_lines * "\n"
        return token[0]

    return _TOKEN.sub(replace, logical_text)


def _joined(lines: re.Match[str]) -> str:
    return lines[0].replace("\\\n", "") + lines[0].count("\\\n") * "\n"


def _refusal(path: Path, line: int, directive: re.Match[str]) -> BuildError:
    got = directive["test"] or f"#{directive['word']} {directive['name'].strip()}"
    return BuildError(
        "a device function includes a file that cannot be part of its program",
        where=f"{path}, line {line}",
        wanted=f'#include "NAME" of a file in {path.parent} or below it, or of a '
        "header of etc_dist such as worker/task.cuh",
        got=got,
        fix="put that file into the folder of the device function's .cuh, and "
        "include it by its path from there, without a macro or a condition on files",
    )


def _below(folder: Path) -> str:
    """The begin of the path of each file in a folder."""
    return os.path.join(folder, "")


def _normal(path: Path) -> Path:
    return Path(os.path.normpath(path))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise BuildError(
            "a header cannot be read",
            where=str(path),
            wanted="a file that this user can read",
            got=str(error),
            fix="correct its permissions",
        ) from error
