"""Tunings: what is measured on a kind of GPU to choose the tiles of matmuls.

A tuning has the constants of the model in `tile_model.py`. After `etc-dist tune
--sizes` it also has tiles that were measured as faster than the model's choice.

The tunings in `tuned/` belong to the package. `etc-dist tune` measures one, and saves
it in the cache.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etc_dist.cache import Cache, Entry, canonical, sha256
from etc_dist.errors import ArgumentError
from etc_dist.files import read_object
from etc_dist.settings import AUTO

if TYPE_CHECKING:
    from etc_dist.world import World

FORMAT = 6
KIND = "tunings"
"""The kind of entries of the cache."""
PACKAGE = "package"
"""The setting that takes the package's, and reads none of the cache."""
DEFAULT = "h200"
"""The tuning of GPUs without one of their own."""
AGAIN = "measure it again: etc-dist tune"


@dataclass(frozen=True)
class TileConstants:
    """The constants of the model in `tile_model.py`. Times are in microseconds. A block
    is 64 elements of k of a tile."""

    call_us: float
    """Launch, prologue, and the time after the last tile."""
    cycles_per_us: float
    """Of the tensor cores of an SM, at 2048 multiply-adds a cycle."""
    mean_cycles_per_us: float
    """The same on average of all SMs, which have less power while all are busy."""
    fill_bytes_per_us: float
    """The rate of loads into the shared memory of one SM."""
    shared_ratio: float
    """The rate of accesses to the shared memory of one SM, in 128 bytes a cycle."""
    latency_us: float
    """From the issue of a load to its arrival."""
    stage_us: float
    """The synchronisation of a stage."""
    memory_bytes_per_us: float
    """The rate of the GPU's memory."""
    worker_bytes_per_us: float
    """The rate at which one SM reads memory."""
    idle_share: float
    """Of the bytes that idle SMs could read, those for which others do not use the
    memory's rate."""
    task_us: float
    """The part of an epilogue, and of the begin of a tile, that does not depend on the
    tile's size."""
    end_us: float
    """The epilogue of a tile of 128 x 256."""
    parts_us: float
    """The cost of split-K that does not depend on the bytes of partial sums."""
    sums_bytes_per_us: float
    """The rate at which one SM reads partial sums."""


@dataclass(frozen=True)
class KeptTiles:
    """Tiles that were measured as faster than the model's choice for x [m, k] @
    w [n, k].T, as text: see `text_of` in `tile_model.py`."""

    m: int
    n: int
    k: int
    tiles: str


@dataclass(frozen=True)
class Tuning:
    """workers: of a GPU of the kind `device`. tiles: the model's constants. kept: tiles
    of some sizes. origin: for messages."""

    device: str
    workers: int
    tiles: TileConstants
    kept: tuple[KeptTiles, ...] = ()
    origin: str = field(default="", compare=False)

    def document(self) -> dict[str, Any]:
        """For JSON, with a checksum."""
        content = {"format": FORMAT, **asdict(self)}
        del content["origin"]
        content["kept"] = list(content["kept"])
        return {**content, "checksum": sha256(canonical(content))[:16]}

    def kept_tiles(self, sizes: tuple[int, int, int]) -> str:
        """The text of the measured tiles for exactly these m, n and k, or ""."""
        return next(
            (
                entry.tiles
                for entry in self.kept
                if (entry.m, entry.n, entry.k) == sizes
            ),
            "",
        )

    @cached_property
    def checksum(self) -> str:
        """That of the document, which names the tuning in records."""
        return str(self.document()["checksum"])

    def show(self) -> str:
        """Where it is from, and its checksum."""
        return f"{self.origin}, checksum {self.checksum}"


def parse(document: Any, where: str, origin: str) -> Tuning:
    """The tuning of a document; ArgumentError if it is damaged."""
    try:
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']}")
        tiles = document["tiles"]
        tuning = Tuning(
            document["device"],
            document["workers"],
            TileConstants(**tiles),
            tuple(KeptTiles(**entry) for entry in document["kept"]),
            origin,
        )
        constants = [tiles[entry.name] for entry in fields(TileConstants)]
        sizes = [n for entry in tuning.kept for n in (entry.m, entry.n, entry.k)]
        is_positive = all(math.isfinite(n) and n > 0 for n in constants)
        is_whole = all(type(n) is int and n > 0 for n in (tuning.workers, *sizes))
        if is_positive and is_whole and document == tuning.document():
            return tuning
        got = f"checksum {document.get('checksum')}, {tuning.checksum} of its content"
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        got = repr(error)
    except (RecursionError, ValueError) as error:
        got = str(error)
    wanted = f"format {FORMAT}, positive numbers and their checksum"
    raise _refused(where, wanted, got, AGAIN)


def read_tuning(path: Path, origin: str) -> Tuning:
    """The tuning in a file; ArgumentError if it cannot be read or is damaged."""
    where = f"file {path}"
    try:
        document = read_object(path.expanduser())
    except (OSError, RuntimeError, ValueError) as error:  # also without a home
        fix = "correct ETC_DIST_TUNING, or write the file: etc-dist tune --output FILE"
        raise _refused(where, "a JSON file", str(error), fix) from error
    return parse(document, where, origin)


@cache
def shipped() -> Mapping[str, Tuning]:
    """The tunings of the package, by the names that ETC_DIST_TUNING may have."""
    files = sorted((Path(__file__).parent / "tuned").glob("*.json"))
    tunings = {file.stem: read_tuning(file, "") for file in files}
    return {
        name: replace(tuning, origin=f"{tuning.device}, of the package")
        for name, tuning in tunings.items()
    }


def default_tuning() -> Tuning:
    """The shipped one that is used without a GPU, and on GPUs of other kinds."""
    return shipped()[DEFAULT]


def find_tuning(setting: str, cache: Cache, device: str) -> Tuning:
    """The tuning for GPUs of the kind `device`; empty without a GPU. ArgumentError for
    a damaged one, and for a file of another kind of GPU."""
    if setting == PACKAGE:
        return shipped_for(device)
    if setting in shipped():
        return shipped()[setting]
    if setting != AUTO:
        path = Path(setting)
        tuning = read_tuning(path, f"file {path}")
        if device and tuning.device != device:
            fix = "measure this GPU (etc-dist tune), or choose another file"
            raise _refused(f"file {path}", device, tuning.device, fix)
        return tuning
    user_tuning = _load(cache, device) if device else None
    if user_tuning is not None:
        return user_tuning
    return shipped_for(device)


def shipped_for(device: str) -> Tuning:
    """The package's tuning for GPUs of the kind `device`, or the default one."""
    for tuning in shipped().values():
        if tuning.device == device:
            return tuning
    tuning = default_tuning()
    if not device:
        return tuning
    why = f"since {device} has none (etc-dist tune measures it)"
    return replace(tuning, origin=f"{tuning.origin}, {why}")


def save_tuning(cache: Cache, tuning: Tuning) -> None:
    """For later worlds of this user, in place of an older one."""
    cache.store(KIND, _key(tuning.device), Entry(tuning.document()))


def tuning_of(world: World) -> Tuning:
    """The tuning of a world's GPUs. Collective at its first call. ArgumentError if the
    ranks have different ones: they would choose different tiles."""
    # NOTE: here, since `etc-dist doctor` runs without NumPy.
    from etc_dist.world.rank_errors import expect_alike

    if KIND not in world.kept:
        cache, setting = Cache(world.settings.cache), world.settings.tuning
        tunings = world.agree(lambda: find_tuning(setting, cache, device_of(world)))
        fix = "run etc-dist tune on all ranks together, or set ETC_DIST_TUNING to "
        fix += f"{' or '.join(shipped())} on every rank"
        texts = [f"{tuning.show()}, {tuning.checksum}" for tuning in tunings]
        expect_alike(texts, "tunings", "the choice of tiles", fix, ArgumentError)
        world.kept[KIND] = tunings[world.rank]
    tuning = world.kept[KIND]
    assert isinstance(tuning, Tuning)
    return tuning


def device_of(world: World) -> str:
    """The kind of a rank's GPU; empty on the CPU backend."""
    if world.backend == "cpu":
        return ""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(world.device)
    return str(properties["name"].decode())


def _load(cache: Cache, device: str) -> Tuning | None:
    """The user's own tuning, or the package's in place of one of an older format; None
    if there is none."""
    key = _key(device)
    path, entry = cache.root / KIND / f"{key}.json", cache.load(KIND, key)
    if entry is not None and entry.facts.get("format") in range(1, FORMAT):
        tuning = shipped_for(device)
        why = f"since that of {path} has an older format (etc-dist tune measures it)"
        return replace(tuning, origin=f"{tuning.origin}, {why}")
    if entry is not None:
        return parse(entry.facts, f"file {path}", f"{device}, by etc-dist tune")
    if os.path.lexists(path) and not cache.fault():
        fix = f"{AGAIN}, or remove the file"
        raise _refused(f"file {path}", "the file of etc-dist tune", "other bytes", fix)
    return None


def _key(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower())


def _refused(where: str, wanted: str, got: str, fix: str) -> ArgumentError:
    return ArgumentError(
        "a tuning cannot be used", where=where, wanted=wanted, got=got, fix=fix
    )
