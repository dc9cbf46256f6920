"""The tables of docs/models.md have the fields of tokenizers that the code has."""

from __future__ import annotations

import json
import re
from pathlib import Path

from etc_dist.models import tokenizer_config as folder
from etc_dist.models import tokenizer_gguf as gguf

PAGE = Path(__file__).parents[2].joinpath("docs/models.md").read_text()
ROWS = re.findall(
    r"^\| (Honoured|Refused unless [a-z]+,.*?|Without influence) \| (.*) \|$",
    PAGE.partition("## Fields of a tokenizer")[2],
    re.M,
)
HONOURED, NEUTRAL, UNUSED, *OF_GGUF = [text for _, text in ROWS]


def names(text):
    return set(re.findall(r"`([^`]+)`", re.sub(r"\(.*?\)", "", text)))


def values(text):
    """The names, and the values in parentheses."""
    pairs = re.findall(r"`(\w+)`(?: \((.*?)\))?", text)
    return {name: set(re.findall(r"`(.*?)`", found)) for name, found in pairs}


def test_the_table_of_folders_is_complete():
    assert names(HONOURED) == {*folder.HONOURED, "NAME_token"}
    assert names(UNUSED) == folder.UNUSED
    shown = {
        n: {json.dumps(v) for v in vs} - {"null"} for n, vs in folder.NEUTRAL.items()
    }
    assert values(NEUTRAL) == shown


def test_the_table_of_gguf_files_is_complete():
    honoured, neutral, unused = OF_GGUF
    templates = {"chat_template", "chat_template.NAME"}
    assert names(honoured) == {*gguf.HONOURED, *gguf.ENDS} | templates
    keys = [key.removeprefix("tokenizer.") for key in gguf.UNUSED]
    assert names(unused) == {key.removeprefix("ggml.") for key in keys}
    shown = {name: {json.dumps(value)} for name, value in gguf.NEUTRAL.items()}
    assert values(neutral) == shown
