"""The tables of docs/model_files.md, from those of the code: what each field does.

.venv/bin/python docs/make_model_files.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from etc_dist.models import fields, gguf_keys, tokenizer_config, tokenizer_gguf

PAGE = Path(__file__).resolve().parent / "model_files.md"
OF_NEUTRAL = "Refused unless absent, null, or a value in parentheses"


def table(rows: Mapping[str, Iterable[str]], fallback: str) -> str:
    """The names of each row, sorted; those of a mapping with their neutral values.
    fallback: what any other name does."""
    lines = ["| | |", "| --- | --- |"]
    for title, names in rows.items():
        values = names if isinstance(names, Mapping) else {}
        texts = (f"`{name}`{_neutral(values.get(name))}" for name in sorted(names))
        lines.append(f"| {title} | {', '.join(texts)} |")
    return "\n".join([*lines, f"| Any other | {fallback} |", ""])


def _neutral(values: Any) -> str:
    items = values if isinstance(values, tuple) else (values,)
    words = [f"`{json.dumps(value)}`" for value in items if value is not None]
    return f" ({' or '.join(words)})" if words else ""


def tables() -> list[str]:
    """In the order of the page."""
    unused = (key.removeprefix("tokenizer.") for key in tokenizer_gguf.UNUSED)
    templates = {"chat_template", "chat_template.NAME"}
    return [
        table(
            {
                "Honoured": fields.HONOURED,
                OF_NEUTRAL: fields.NEUTRAL,
                "Not applied": fields.DECODING,
                "Without influence": fields.UNUSED,
            },
            "refused unless null, false or empty",
        ),
        table(
            {
                "Honoured": gguf_keys.HONOURED,
                "Honoured of mixtures, else refused unless neutral": [
                    *gguf_keys.OF_MIXTURES
                ],
                OF_NEUTRAL: gguf_keys.NEUTRAL,
                "Refused unless the value follows from others": [*gguf_keys.OWN_SIZES],
                "Without influence": gguf_keys.UNUSED,
            },
            "refused",
        ),
        table(
            {
                "Honoured": {*tokenizer_config.HONOURED, "NAME_token"},
                OF_NEUTRAL: tokenizer_config.NEUTRAL,
                "Without influence": tokenizer_config.UNUSED,
            },
            "without influence",
        ),
        table(
            {
                "Honoured": {*tokenizer_gguf.HONOURED, *tokenizer_gguf.ENDS}
                | templates,
                OF_NEUTRAL: tokenizer_gguf.NEUTRAL,
                "Without influence": {key.removeprefix("ggml.") for key in unused},
            },
            "refused",
        ),
    ]


def page() -> str:
    """The page with fresh tables."""
    texts = re.split(r"^(?:\|.*\n)+", PAGE.read_text(), flags=re.M)
    return "".join(
        part for pair in zip_longest(texts, tables(), fillvalue="") for part in pair
    )


if __name__ == "__main__":
    PAGE.write_text(page())
