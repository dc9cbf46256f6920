"""The table of docs/models.md: the families of models.

.venv/bin/python docs/make_models.py
"""

from __future__ import annotations

import re
from pathlib import Path

from etc_dist.models.families import FAMILIES

PAGE = Path(__file__).resolve().parent / "models.md"


def table() -> str:
    """A row for each family."""
    lines = ["| `model_type` | GGUF | Layers |", "| --- | --- | --- |"]
    for family in FAMILIES.values():
        gguf = f"`{family.gguf}`" if family.gguf else "-"
        lines.append(f"| `{family.model_type}` | {gguf} | {family.layers} |")
    return "\n".join([*lines, ""])


def page() -> str:
    """The page with a fresh table."""
    return re.sub(r"^(?:\|.*\n)+", table(), PAGE.read_text(), count=1, flags=re.M)


if __name__ == "__main__":
    PAGE.write_text(page())
