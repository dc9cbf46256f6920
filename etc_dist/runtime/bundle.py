"""Bundles: compiled programs and proofs in a folder, for processes that make neither.

The folder has `manifest.json`, a cubin of each program, and `proofs.json`. The manifest
holds the SHA-256 of each file and its own, who made it, and for what. A bundle is read
as a whole, and checked before anything of it is used."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.cache import Entry, canonical, sha256, signed, unsigned
from etc_dist.errors import ArgumentError
from etc_dist.files import parse_object, read_file, read_object
from etc_dist.verify.proof import is_record, is_texts, verifier_digest

FORMAT = 1
MANIFEST, PROOFS = "manifest.json", "proofs.json"
OWN_NAME = re.compile(rf"{re.escape(PROOFS)}|[0-9a-f]{{32}}\.cubin")
"""The names of a bundle's files, except the manifest."""
FACTS = ("registers", "spill_bytes", "stack_bytes", "remarks")
"""The recorded facts of a cubin."""
OF_OTHERS = 0o022
"""The mode bits with which other users can write."""
BUILD = "build it again: etc-dist build MODEL --bundle FOLDER"


def made_by() -> dict[str, str]:
    """The versions that programs and proofs depend on."""
    return {
        "etc_dist": import_module(__package__.partition(".")[0]).__version__,
        "numpy": np.__version__,
        "verifier": verifier_digest().hex()[:16],
    }


def is_program(entry: Entry) -> bool:
    """Whether it has a cubin, and its FACTS of the right types."""
    *counts, remarks = map(entry.facts.get, FACTS)
    has_counts = all(type(count) is int for count in counts)
    return "cubin" in entry.files and has_counts and is_texts(remarks)


@dataclass(frozen=True)
class Bundle:
    """compiler: its release, which compiled the programs. workers: of a GPU, for which
    the proofs are. parameters: what the programs are for. programs, proofs: by the keys
    of the cache."""

    folder: Path
    architecture: str
    compiler: str
    workers: int
    parameters: Mapping[str, Any]
    programs: Mapping[str, Entry]
    proofs: Mapping[str, Mapping[str, Any]]

    def expect(self, architecture: str, parameters: Mapping[str, Any]) -> None:
        """ArgumentError unless the bundle was built for these."""
        own_values = {"architecture": self.architecture}
        self._compare(
            "was built for another GPU", {"architecture": architecture}, own_values
        )
        own_values, values = _plain(self.parameters), _plain(parameters)
        self._compare("was built for something else", values, own_values)

    def expect_workers(self, workers: int) -> None:
        """ArgumentError unless the proofs are for so many workers."""
        own_values = {"workers": self.workers}
        self._compare("was built for another GPU", {"workers": workers}, own_values)

    def program(self, key: str, title: str) -> Entry:
        """The program of this key, with file "cubin". Raises ArgumentError if there is
        none."""
        if key not in self.programs:
            titles = [str(entry.facts.get("title")) for entry in self.programs.values()]
            raise ArgumentError(
                "a bundle does not have a program",
                where=f"bundle {self.folder}",
                wanted=f"{title}, of key {key}: of these sources, not traced",
                got=", ".join(titles) or "no programs",
                fix=f"unset ETC_DIST_TRACE, or {BUILD}",
            )
        return self.programs[key]

    def _compare(
        self, what: str, wanted: Mapping[str, Any], own_values: Mapping[str, Any]
    ) -> None:
        names = [*wanted, *(name for name in own_values if name not in wanted)]
        wrong = [name for name in names if wanted.get(name) != own_values.get(name)]
        if wrong:
            raise ArgumentError(
                f"a bundle {what}",
                where=f"bundle {self.folder}",
                wanted=_listed(wanted, wrong),
                got=_listed(own_values, wrong),
                fix=f"load with the values of the bundle, or {BUILD}",
            )


def read_bundle(folder: Path) -> Bundle:
    """The bundle in `folder`. ArgumentError if a file is missing or damaged, if others
    may have written it, or other versions made it."""
    for path in (folder, folder / MANIFEST):
        _refuse_of_others(folder, path)
    manifest = _read_manifest(folder)
    try:
        if manifest["made_by"] != made_by():
            raise _refused(folder, str(made_by()), str(manifest["made_by"]), BUILD)
        files = {
            name: _read(folder / Path(name).name, digest)
            for name, digest in manifest["files"].items()
        }
        programs = {
            key: Entry(program["facts"], {"cubin": files[program["file"]]})
            for key, program in manifest["programs"].items()
        }
        field_names = ("architecture", "compiler", "workers", "parameters")
        of_all = {name: manifest[name] for name in field_names}
        proofs = parse_object(files[PROOFS])
        odd = [key for key, record in proofs.items() if not is_record(record, key)]
        odd += [key for key, entry in programs.items() if not is_program(entry)]
        if odd:
            wanted = "programs and proofs of their keys, with all facts"
            raise _refused(folder, wanted, f"others: {', '.join(odd[:4])}", BUILD)
        return Bundle(folder, **of_all, programs=programs, proofs=proofs)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise _refused(folder / MANIFEST, "all fields", repr(error), BUILD) from error


def write_bundle(bundle: Bundle) -> None:
    """Write `bundle` to its folder, in place of an older one."""
    folder = bundle.folder
    files = {PROOFS: canonical(bundle.proofs)}
    programs = {}
    for key, entry in bundle.programs.items():
        name = f"{key}.cubin"
        files[name] = entry.files["cubin"]
        programs[key] = {"file": name, "facts": dict(entry.facts)}
    document = {
        "format": FORMAT,
        "made_by": made_by(),
        "architecture": bundle.architecture,
        "compiler": bundle.compiler,
        "workers": bundle.workers,
        "parameters": _plain(bundle.parameters),
        "programs": programs,
        "files": {name: sha256(content) for name, content in files.items()},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_older(folder)
        folder.chmod(folder.stat().st_mode & ~OF_OTHERS)
        # First: a folder in which a file is missing can be written again.
        manifest = json.dumps(signed(document), indent=1).encode()
        for name, content in {MANIFEST: manifest, **files}.items():
            (folder / name).write_bytes(content)
            (folder / name).chmod(0o644)
    except OSError as error:
        wanted, fix = "a folder that can be written", "choose another folder"
        raise _refused(folder, wanted, str(error), fix) from error


def _remove_older(folder: Path) -> None:
    """Remove the programs and proofs of the bundle that is there, and nothing else;
    ArgumentError for a folder of other files, or with a manifest that is damaged."""
    present = sorted(path.name for path in folder.iterdir())
    if not present:
        return
    try:
        files = [*_read_manifest(folder)["files"]]
    except (ArgumentError, KeyError, TypeError) as error:
        wanted, fix = "an empty folder, or one with a bundle", "choose another folder"
        raise _refused(folder, wanted, ", ".join(present[:4]), fix) from error
    for name in filter(OWN_NAME.fullmatch, files):
        (folder / name).unlink(missing_ok=True)


def _refuse_of_others(folder: Path, path: Path) -> None:
    """ArgumentError if another user may have written the folder or a file in it: a GPU
    runs the programs, and proofs are believed."""
    try:
        status = path.stat()
    except OSError as error:
        raise _refused(path, "the file", str(error), BUILD) from error
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (os.geteuid(), 0) or mode & OF_OTHERS:
        raise _refused(
            path,
            f"of user {os.geteuid()} or root, and writable by no other",
            f"of user {status.st_uid}, mode {mode:04o}",
            f"if you trust it: chown -R $(id -u) {folder}; chmod -R go-w {folder}; the "
            "same for a copy (cp -r), if others need this one",
        )


def _read_manifest(folder: Path) -> dict[str, Any]:
    path, wanted = folder / MANIFEST, f"a manifest of format {FORMAT}, not damaged"
    try:
        return unsigned(read_object(path), format=FORMAT)
    except (OSError, ValueError) as error:
        raise _refused(path, wanted, str(error), BUILD) from error


def _read(path: Path, digest: str) -> bytes:
    _refuse_of_others(path.parent, path)
    try:
        content = read_file(path)
    except OSError as error:
        raise _refused(path, "the file", str(error), BUILD) from error
    if sha256(content) != digest:
        raise _refused(path, f"SHA-256 {digest}", sha256(content), BUILD)
    return content


def _plain(values: Mapping[str, Any]) -> Any:
    """As JSON returns them."""
    return json.loads(json.dumps(dict(values)))


def _listed(values: Mapping[str, Any], names: list[str]) -> str:
    return ", ".join(f"{name}={values.get(name)!r}" for name in names)


def _refused(path: Path, wanted: str, got: str, fix: str) -> ArgumentError:
    return ArgumentError(
        "a bundle cannot be used",
        where=f"bundle {path}",
        wanted=wanted,
        got=got,
        fix=fix,
    )
