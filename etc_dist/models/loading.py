"""Loading a model from a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from etc_dist.compiler import world_or_current
from etc_dist.errors import expect_choice
from etc_dist.models.config import ModelConfig, read_config
from etc_dist.models.gguf_file import GgufFile
from etc_dist.models.model import Model
from etc_dist.models.part import Part
from etc_dist.models.setup import ModelSetup, part_of
from etc_dist.models.step_policy import ROWS
from etc_dist.models.weights import load_weights
from etc_dist.runtime.build import ARCH
from etc_dist.runtime.bundle import Bundle, read_bundle
from etc_dist.world import World

DTYPES = ("bfloat16", "float16")
DEFAULTS = {
    "batch": 8,
    "positions": None,
    "page_size": 64,
    "dtype": "bfloat16",
    "schedule": "static",
    "steps_per_launch": 1,
    "pages": None,
    "deterministic": "run",
    "experts": "tensor",
    "most_rows": ROWS[-1],
}
"""The options of a model without a bundle."""
OPTIONS: Mapping[str, tuple[type, str | None]] = {
    "batch": (int, "requests at once"),
    "positions": (int, "of a request"),
    "page_size": (int, "positions of a page"),
    "pages": (int, "of the cache"),
    "steps_per_launch": (int, "ids of a request that a launch computes"),
    "dtype": (str, None),
    "schedule": (str, None),
    "deterministic": (str, None),
    "experts": (str, None),
    "most_rows": (
        int,
        "positions that a step computes, of prompts and decoded requests",
    ),
}
"""Of commands: types and help texts."""
ReadWeights = Callable[[str, Part, str], dict[str, Any]]
"""By the dtype, the part and the backend."""


def load(
    path: str | Path,
    *,
    batch: int | None = None,
    positions: int | None = None,
    page_size: int | None = None,
    dtype: str | None = None,
    schedule: str | None = None,
    steps_per_launch: int | None = None,
    pages: int | None = None,
    deterministic: str | None = None,
    experts: str | None = None,
    most_rows: int | None = None,
    speculate: int = 0,
    bundle: str | Path | None = None,
    world: World | None = None,
) -> Model:
    """The model in `path`: a Hugging Face folder with config.json and safetensors
    files, or a GGUF file, of a family in docs/models.md. Collective; a world of
    several ranks splits heads, inner width and vocabulary, and each rank loads only its
    part.

    batch: requests at once, at most 128; default: 8. positions: tokens of a request,
    its prompt included, at least 2; default: those of the model, at most 2048.
    page_size: positions of a page of the cache: 16, 32, 64 or 128; default: 64. dtype:
    "bfloat16" (default) or "float16", to which weights are converted. schedule: as for
    `etc_dist.compile`; default: "static". steps_per_launch: ids of a request that one
    launch computes, at most 128; default: 1. pages: of the cache; default: as many as
    `batch` requests of `positions` tokens need, and at least those of one.
    deterministic: "run" (default) or "batch": the logits of a position have the same
    bits in each batch. experts: of a mixture: "tensor" (default): each rank has a part
    of the inner width of every expert; "parallel": E / W of the E experts, whole, on
    each of W ranks. most_rows: positions that a step computes, of prompts and decoded
    requests together, at least `batch` and at most 2048 (default), of which 512 are
    used with deterministic="batch"; with fewer, requests wait less for others' prompts,
    which take longer, and less memory is used. speculate: drafts of a request's next
    tokens, found earlier in its text, that a step checks; at most 32, only with one
    step in a launch; default: 0.
    bundle: a folder that `etc-dist build MODEL --bundle` wrote: nothing is compiled or
    proved, and its options are the defaults. world: default: the current one.

    Raises ArgumentError on every rank for a path without a model, a model that is not
    implemented or that the ranks cannot split, a cache that does not fit in the memory,
    weights that are missing, unknown, of another shape or not finite, and a bundle that
    is damaged, built for other options, or writable by another user."""
    world = world_or_current(world)
    options: dict[str, Any] = {
        "batch": batch,
        "positions": positions,
        "page_size": page_size,
        "dtype": dtype,
        "schedule": schedule,
        "steps_per_launch": steps_per_launch,
        "pages": pages,
        "deterministic": deterministic,
        "experts": experts,
        "most_rows": most_rows,
    }
    with world.refusing("the arguments of load"):
        opened_bundle = _read_bundle(bundle)
        parameters = {} if opened_bundle is None else opened_bundle.parameters
        defaults = {**DEFAULTS, **parameters}
        options = {k: defaults[k] if v is None else v for k, v in options.items()}
        config, read_weights = read_model(path, options["dtype"])
        options["speculate"] = speculate
        setup = ModelSetup(config, **options, ranks=world.size)
        setup.check()
        setup.check_memory(world.free_bytes())
        if opened_bundle is not None:
            opened_bundle.expect(ARCH, setup.of_bundle(opened_bundle).parameters())
        part = part_of(world.rank, world.size, options["experts"])
        weights = read_weights(options.pop("dtype"), part, world.backend)
    # NOTE: the numbers were examined as they were read.
    return Model(
        config, weights, **options, bundle=opened_bundle, are_finite=True, world=world
    )


def add_options_of_load(group: argparse._ArgumentGroup) -> None:
    """Add the options of `load` to those of a command."""
    for name, (kind, help) in OPTIONS.items():
        metavar = "N" if kind is int else name.upper()
        option = f"--{name.replace('_', '-')}"
        group.add_argument(option, type=kind, metavar=metavar, help=help)


def _read_bundle(folder: Any) -> Bundle | None:
    return None if folder is None else read_bundle(Path(folder).expanduser())


def read_model(path: Any, dtype: Any) -> tuple[ModelConfig, ReadWeights]:
    """The configuration of the model in `path`, and what reads its weights."""
    expect_choice(dtype, DTYPES, "dtype")
    path = Path(path).expanduser()
    if not path.is_dir():
        file = GgufFile(path)
        of_file = file.config()
        return of_file, partial(file.weights, of_file)
    config = read_config(path)
    return config, partial(load_weights, path, config)
