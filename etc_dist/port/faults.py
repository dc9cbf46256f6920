"""The fields of a config.json that are not supported, and the part of the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etc_dist.errors import ArgumentError
from etc_dist.models.config import parse_config
from etc_dist.models.fields import refuse_fields

PARTS: Mapping[str, str] = {
    r"architectures|model_type|ForCausalLM": "the whole layer "
    "(etc_dist/models/families.py)",
    r"quant|compression": "the weights (etc_dist/models/weights.py)",
    r"expert|router|moe|topk|n_group|scoring|dense": "the mixture of experts "
    "(etc_dist/models/experts.py)",
    r"final_logit|^logits?_|vocab|tie_|nextn|mtp": "the output head (`pick` of "
    "etc_dist/models/decoder.py)",
    r"rope|rotary|partial": "the rotary embedding (etc_dist/models/rope.py)",
    r"attn|attention|head|window|sink|key|query|lora|layer_types|chunk": "attention "
    "(`attend` of etc_dist/models/decoder.py)",
    r"act|mlp|glu|intermediate": "the MLP (`add_mlp` of etc_dist/models/decoder.py)",
    r"embed": "the embedding (`embed` of etc_dist/models/decoder.py)",
    r"norm|residual|eps": "the norms (`add_norm` of etc_dist/models/decoder.py)",
}
"""Where a field would have to be honoured: the first match in its name."""


@dataclass(frozen=True)
class UnsupportedField:
    """A field that is not supported. name: of the field, or what was wanted. part: of
    the model."""

    name: str
    wanted: str
    got: str

    @property
    def part(self) -> str:
        """Where it would have to be honoured."""
        for pattern, part in PARTS.items():
            if re.search(pattern, self.name):
                return part
        return "no part that is known"

    def show(self) -> str:
        """One line."""
        advice = f"wanted: {self.wanted}"
        if self.wanted == f"no unknown field {self.name}":
            advice = "a field that is not known"
        return f"{self.got}: {self.part}; {advice}"


def find_faults(fields: Mapping[str, Any], path: Path) -> list[UnsupportedField]:
    """What of these fields of the file `path` is not supported: all fields that are
    refused by name, and the first refusal of the others' values."""
    faults = []
    try:
        refuse_fields(fields, path)
    except ArgumentError as error:
        pairs = zip(error.wanted.split("; "), error.got.split("; "), strict=False)
        for wanted, got in pairs:
            faults.append(UnsupportedField(got.partition(" = ")[0], wanted, got))
    refused_names = {fault.name for fault in faults}
    other_fields = {
        name: value for name, value in fields.items() if name not in refused_names
    }
    try:
        parse_config(other_fields, path)
    except ArgumentError as error:
        faults.append(
            UnsupportedField(error.wanted.partition(":")[0], error.wanted, error.got)
        )
    return faults
