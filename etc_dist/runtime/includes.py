"""The headers that a program includes, for a compiler that opens no file by itself.

NVRTC gets each header under the name that `#include` has for it. In the library's own
device code that is the path below `kernels/`, in a user's the absolute path. So every
header is part of the program's key, and a file that is not fails to compile.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from etc_dist.codegen import Source
from etc_dist.errors import BuildError

_COMMENT = r"/\*(?:[^*]|\*(?!/))*\*/"
_GAP = rf"(?:[ \t]|\\\n|{_COMMENT})*"
_DIRECTIVE = re.compile(
    rf"^(?:[^\n]*\*/)?{_GAP}(?:\#|%:){_GAP}(?P<word>include_next|include|import|embed)"
    rf"\b{_GAP}(?P<name>[^\n]*)",
    re.MULTILINE,
)
_NAME = re.compile(r'"(?P<quoted>[^"\n]+)"|<(?P<angled>[^>\n]+)>')


def headers(source: Source, kernels: Path) -> dict[str, str]:
    """The text of all headers of a program by their names for NVRTC, in which every
    `#include` has such a name. Raises BuildError for a file in no folder of these."""
    included = _Included(source, kernels)
    texts: dict[str, str] = {}
    while included.waiting:
        name, path = included.waiting.popitem()
        if name not in texts:
            texts[name] = included.renamed(path)
    return dict(sorted(texts.items()))


class _Included:
    """The files that a program may include, and those that it does."""

    def __init__(self, source: Source, kernels: Path):
        self.kernels = kernels
        self.roots = sorted({_normal(path.parent) for path in source.sources})
        # The generated text names a user's sources as they were given.
        self.names = {_normal(path): str(path) for path in source.sources}
        own = re.findall(r'^#include "([^/"][^"]*)"$', source.text, re.MULTILINE)
        self.waiting = {str(path): path for path in source.sources}
        self.waiting |= {name: kernels / name for name in own}

    def renamed(self, path: Path) -> str:
        """The text of a file with the names that NVRTC knows; what it includes waits
        to be read, too."""
        text = _read(path)

        def rename(directive: re.Match[str]) -> str:
            name = _NAME.match(directive["name"])
            found = self.find(name, path) if name else None
            plain = name is not None and directive["word"] == "include"
            if plain and found is None:
                return directive[0]  # NVRTC will not find it, either
            if not plain or found is None or not self.allows(found):
                line = text.count("\n", 0, directive.start("word")) + 1
                raise self.refusal(path, line, directive)
            known = self.name(found)
            self.waiting[known] = found
            end = directive["name"][name.end() if name else 0 :]
            start = directive.start("name") - directive.start()
            return f'{directive[0][:start]}"{known}"{end}'

        return _DIRECTIVE.sub(rename, text)

    def find(self, name: re.Match[str], user: Path) -> Path | None:
        """The file that an include in `user` means, wherever that is."""
        folders = [self.kernels, *self.roots]
        if name["quoted"]:
            folders.insert(0, user.parent)
        paths = (_normal(folder / (name[1] or name[2])) for folder in folders)
        return next((path for path in paths if path.is_file()), None)

    def allows(self, path: Path) -> bool:
        return any(path.is_relative_to(root) for root in (self.kernels, *self.roots))

    def name(self, path: Path) -> str:
        if path.is_relative_to(self.kernels):
            return str(path.relative_to(self.kernels))
        return self.names.get(path, str(path))

    def refusal(self, path: Path, line: int, directive: re.Match[str]) -> BuildError:
        return BuildError(
            "a device function includes what cannot be part of its program",
            where=f"{path}, line {line}",
            wanted=f'#include "NAME" of a file in {path.parent} or below it, or of a '
            "header of etc_dist such as worker/task.cuh",
            got=f"#{directive['word']} {directive['name'].strip()}",
            fix="put that file into the folder of the device function's .cuh, and "
            "include it by its path from there",
        )


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
