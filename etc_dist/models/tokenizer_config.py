"""What tokenizer_config.json and the files that belong to it declare.

Where files disagree, the precedence is that of transformers: tokenizer.json decides how
texts are split, special_tokens_map.json names special tokens unless
tokenizer_config.json has added_tokens_decoder, and templates in files of their own
replace all others. docs/model_files.md is made of these tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etc_dist.errors import ArgumentError
from etc_dist.files import read_file, read_object
from etc_dist.models.fields import names

SPECIAL = tuple(
    f"{n}_token" for n in ["bos", "eos", "unk", "sep", "pad", "cls", "mask"]
)
"""Special tokens that every tokenizer may have."""
EXTRA = "extra_special_tokens"
FURTHER = "model_specific_special_tokens", "additional_special_tokens", EXTRA
"""Further special tokens: objects of those with names, or lists."""


HONOURED = frozenset((*SPECIAL, *FURTHER)) | names(
    """
    add_bos_token add_eos_token add_prefix_space added_tokens_decoder chat_template
    clean_up_tokenization_spaces
    """
)
CLEANS_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "auto_map": (None, {}),
    CLEANS_BPE: (None, False),
    "fast_tokenizer_files": (None, [], ["tokenizer.json"]),
    "fix_mistral_regex": (None, False),
    "split_special_tokens": (None, False),
}
"""Refused unless absent or one of these values."""
UNUSED = names(
    """
    _json_padding _json_truncation _spm_precompiled_charsmap backend
    chat_control_tokens device_map errors extra_ids files_loaded from_slow gguf_file
    init_inputs is_local legacy local_files_only max_len max_length merges merges_file
    model_input_names model_max_length name_or_path pad_to_multiple_of
    pad_token_type_id padding_side post_processor processor_class response_schema
    response_template sp_model_kwargs spaces_between_special_tokens stride
    tokenizer tokenizer_class tokenizer_file tokenizer_object tokenizer_padding
    tokenizer_truncation tokenizer_type transformers_version truncation
    truncation_side truncation_strategy unk_id use_default_system_prompt use_fast
    verbose vocab vocab_file
    """
)
"""Without influence: tokenizer.json decides, texts are not cut or padded, or notes."""
FLAGS = "content", "lstrip", "rstrip", "normalized", "single_word"
"""What decides where a text has an added token."""
DEFAULT = "default"
TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True)
class SpecialTokens:
    """fields: of tokenizer_config.json. named_tokens: special tokens by the names
    that templates use. unnamed: other special tokens. Each is a text or an object.
    added_tokens: by their ids."""

    path: Path
    fields: Mapping[str, Any]
    named_tokens: Mapping[str, str | Mapping[str, Any]]
    unnamed: tuple[str | Mapping[str, Any], ...]
    added_tokens: Mapping[str, Mapping[str, Any]]

    def texts(self) -> dict[str, str]:
        """The texts of the tokens, by name."""
        return {name: content(token) for name, token in self.named_tokens.items()}


def read_special(folder: Path) -> SpecialTokens:
    """What the JSON files in `folder`, except tokenizer.json, declare.

    Raises ArgumentError for a damaged file."""
    path, older = (
        folder / f"{name}.json" for name in ("tokenizer_config", "special_tokens_map")
    )
    fields, declared = read_optional(path), read_optional(older)
    _expect_special(fields, path)
    _expect_special(declared, older)
    tokens = fields.get("added_tokens_decoder")
    declared = fields if tokens is not None else _merged(fields, declared)
    tokens = {} if tokens is None else tokens
    if not isinstance(tokens, dict) or not all(map(is_token, tokens.values())):
        wanted = "added_tokens_decoder: an object of tokens"
        raise refused(path, wanted, repr(tokens)[:80], "correct it")
    old_items = read_optional(folder / "added_tokens.json").items()
    return SpecialTokens(
        path,
        fields,
        dict(_named(declared)),
        tuple(_unnamed(declared)),
        {
            **{str(number): {"content": text} for text, number in old_items},
            **tokens,
        },
    )


def expect_neutral(special: SpecialTokens) -> None:
    """Refuse fields of tokenizer_config.json that are not implemented."""
    for name, values in NEUTRAL.items():
        if special.fields.get(name) not in values:
            fix = "remove it, if tokenizer.json has the whole tokenizer"
            got = repr(special.fields[name])[:80]
            raise refused(
                special.path, f"no {name}, which is not implemented", got, fix
            )


def end_tokens(folder: Path) -> tuple[int, ...]:
    """The id of the eos_token, as far as the files in `folder` have it."""
    special = read_special(folder)
    text = special.texts().get("eos_token")
    if text is None:
        return ()
    ids = {
        t["content"]: int(n) for n, t in special.added_tokens.items() if n.isdecimal()
    }
    path = folder / "tokenizer.json"
    if text not in ids and path.exists():
        ids = _ids(read_optional(path), path)
        if text not in ids:
            fix = "add it to tokenizer.json, or correct it"
            raise refused(special.path, "eos_token: in tokenizer.json", text, fix)
    return (ids[text],) if text in ids else ()


def read_templates(special: SpecialTokens) -> dict[str, str]:
    """Chat templates by name, "default" for that without one."""
    folder = special.path.parent
    files = {p.stem: p for p in sorted((folder / TEMPLATES).glob("*.jinja"))}
    single = folder / "chat_template.jinja"
    if single.exists():
        files = {DEFAULT: single, **files}
    if files:
        return {name: _read_text(path) for name, path in files.items()}
    template = special.fields.get("chat_template")
    if isinstance(template, str):
        return {DEFAULT: template}
    entries = [] if template is None else template
    if isinstance(entries, list) and all(isinstance(t, dict) for t in entries):
        templates = {t.get("name"): t.get("template") for t in entries}
        pairs = (*templates, *templates.values())
        if len(templates) == len(entries) and all(isinstance(x, str) for x in pairs):
            return templates
    wanted = "chat_template: a text, or a list of templates with different names"
    raise refused(special.path, wanted, repr(template)[:80], "correct it")


def is_token(value: Any) -> bool:
    """Whether a value of a JSON file is a token."""
    if isinstance(value, dict):
        flags = (value[name] for name in FLAGS[1:] if name in value)
        value = value.get("content") if all(type(f) is bool for f in flags) else None
    return isinstance(value, str)


def content(token: str | Mapping[str, Any]) -> str:
    """The text of a token, which may be an object with flags."""
    return token if isinstance(token, str) else str(token["content"])


def read_optional(path: Path) -> dict[str, Any]:
    """The object of a JSON file, empty if there is no such file."""
    try:
        return read_object(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise refused(path, "a JSON object", str(error), "correct it") from error


def refused(path: Path, wanted: str, got: str, fix: str) -> ArgumentError:
    """The error for the file `path` of a tokenizer."""
    return ArgumentError(
        "the tokenizer cannot be used", where=str(path), wanted=wanted, got=got, fix=fix
    )


def _expect_special(fields: Mapping[str, Any], path: Path) -> None:
    """Refuse special tokens that are neither texts nor objects with content."""
    for name in SPECIAL:
        if fields.get(name) is not None and not is_token(fields[name]):
            wanted = f"{name}: a text, or an object with content"
            raise refused(path, wanted, repr(fields[name])[:80], "correct it")
    for name in FURTHER:
        tokens = fields.get(name) or []
        some = tokens.values() if isinstance(tokens, dict) else tokens
        if not isinstance(tokens, (dict, list)) or not all(map(is_token, some)):
            wanted = f"{name}: texts, or objects with content"
            raise refused(path, wanted, repr(tokens)[:80], "correct it")


def _merged(fields: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of both files: those of the older one, and both lists."""
    all_fields = {**fields, **older}
    first, second = fields.get(EXTRA), older.get(EXTRA)
    if isinstance(first, list) and isinstance(second, list):
        all_fields[EXTRA] = first + second
    return all_fields


def _named(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, token in fields.items():
        if name.endswith("_token") and is_token(token):
            yield name, token
    for name in FURTHER:
        if isinstance(fields.get(name), dict):
            yield from fields[name].items()


def _unnamed(fields: Mapping[str, Any]) -> Iterator[Any]:
    for name in FURTHER:
        if isinstance(fields.get(name), list):
            yield from fields[name]


def _read_text(path: Path) -> str:
    try:
        return read_file(path).decode()
    except (OSError, ValueError) as error:
        raise refused(path, "a text in UTF-8", str(error), "correct it") from error


def _ids(fields: Mapping[str, Any], path: Path) -> dict[str, int]:
    """The ids of tokens in tokenizer.json, by their texts."""
    try:
        tokens = fields["model"]["vocab"]
        if not isinstance(tokens, dict):  # with scores
            tokens = {token[0]: token_id for token_id, token in enumerate(tokens)}
        added_ids = {token["content"]: token["id"] for token in fields["added_tokens"]}
        return {
            text: int(token_id) for text, token_id in {**tokens, **added_ids}.items()
        }
    except (KeyError, IndexError, TypeError, ValueError) as error:
        wanted = "a tokenizer.json with model.vocab and added_tokens"
        raise refused(path, wanted, repr(error), "correct it") from error
