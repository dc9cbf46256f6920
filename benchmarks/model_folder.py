"""A folder of a model with random weights and a tokenizer of as many words as it has
ids, in the files of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import IO

import numpy as np

from benchmarks.decoder_models import Fields, config_of
from benchmarks.device import DTYPES
from benchmarks.workload import DTYPE
from etc_dist.models.config import ModelConfig
from etc_dist.models.part import WHOLE
from etc_dist.models.weight_places import WeightPlaces
from etc_dist.models.weights import weight_shapes

NUM_DRAWN = 2**22 - 3
"""Random numbers, which repeat in all tensors. Odd, so that rows of one differ."""
STORED_DTYPE = "BF16"


def write_model(folder: Path, fields: Fields) -> None:
    """Write config.json with these fields, a file of weights, and a tokenizer: id n is
    the word "wn"."""
    config = config_of(fields)
    (folder / "config.json").write_text(json.dumps({**fields, "torch_dtype": DTYPE}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(config.vocabulary)))
    special = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    with (folder / "model.safetensors").open("wb") as file:
        _write_weights(file, config)


def tokenizer(num_words: int) -> dict[str, object]:
    """The contents of a tokenizer.json: words that spaces separate."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {f"w{number}": number for number in range(num_words)},
            "unk_token": "w0",
        },
    }


def tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of the file of weights."""
    shapes, places = weight_shapes(config), WeightPlaces(config, WHOLE)
    for name in places:
        place = places.find(name)
        assert place is not None
        array, index = place
        yield name, np.broadcast_to(np.int8(0), shapes[array])[index].shape


def _write_weights(file: IO[bytes], config: ModelConfig) -> None:
    """Gains about 1; else numbers of the deviation that keeps the size of a vector."""
    drawn = np.random.default_rng(0).standard_normal(NUM_DRAWN, np.float32)
    shapes, header, end = dict(tensor_shapes(config)), {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {
            "dtype": STORED_DTYPE,
            "shape": shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    file.write(len(text).to_bytes(8, "little") + text)
    for shape in shapes.values():
        numbers = 1 + drawn / 8 if len(shape) == 1 else drawn * shape[-1] ** -0.5
        data, num_bytes = numbers.astype(DTYPES[DTYPE]).tobytes(), 2 * prod(shape)
        for first in range(0, num_bytes, len(data)):
            file.write(memoryview(data)[: num_bytes - first])
