"""The tokenizer in a GGUF file, by the package `tokenizers`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from etc_dist.models.extras import extra_module
from etc_dist.models.fields import names
from etc_dist.models.gguf_file import GgufFile
from etc_dist.models.tokenizer import Tokenizer
from etc_dist.models.tokenizer_config import DEFAULT, refused

SPLIT = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""The pattern of words, by the name that a GGUF file has for it."""
WHOLE_WORDS = ("llama-bpe",)
"""Those in which a word that is a token is not split by merges."""
BEGINNING = ("llama-bpe",)
"""Those of which a text begins with a token, unless add_bos_token is false."""
COMPOSED = ("qwen2",)
"""Those of which texts are normalised first, so that accents join their letters."""
DIGITS = "smollm"
"""The name of GPT-2's pattern, with each digit a word."""
CONTROL, USER_DEFINED = 3, 4
"""Kinds of tokens in a GGUF file that are never the result of merges."""
PREFIX, TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template"
SPECIAL = {
    "bos_token_id": "bos_token",
    "eos_token_id": "eos_token",
    "unknown_token_id": "unk_token",
    "seperator_token_id": "sep_token",
    "padding_token_id": "pad_token",
    "cls_token_id": "cls_token",
    "mask_token_id": "mask_token",
}
"""The names that templates use for special tokens, by those of the file."""
HONOURED: Mapping[str, type] = {
    "model": str,
    "pre": str,
    "tokens": list,
    "token_type": list,
    "merges": list,
    "add_bos_token": bool,
    "add_eos_token": bool,
    **dict.fromkeys(SPECIAL, int),
}
"""Keys and their types."""
ENDS = frozenset(
    f"{name}_token_id" for name in ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")
)
"""Tokens that end a text, as eos does."""
NEUTRAL: Mapping[str, Any] = {
    "add_sep_token": False,
    "add_space_prefix": False,
    "remove_extra_whitespaces": False,
    "precompiled_charsmap": [],
}
"""Refused unless absent or of this value."""
UNUSED = names(
    """
    tokenizer.chat_templates tokenizer.huggingface.json tokenizer.rwkv.world
    tokenizer.ggml.scores tokenizer.ggml.token_type_count
    tokenizer.ggml.fim_pre_token_id tokenizer.ggml.fim_suf_token_id
    tokenizer.ggml.fim_mid_token_id tokenizer.ggml.prefix_token_id
    tokenizer.ggml.suffix_token_id tokenizer.ggml.middle_token_id
    """
)
"""Without influence on how a text is split by merges."""


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer of a file.

    Raises ArgumentError for keys that are damaged or not implemented."""
    fields = dict(_read_keys(file))
    kind, split = fields.get("model"), fields.get("pre")
    if kind != "gpt2" or split not in (*SPLIT, DIGITS):
        split_names = ", ".join((*SPLIT, DIGITS))
        wanted = f"tokenizer.ggml.model gpt2, with tokenizer.ggml.pre {split_names}"
        fix = "use the Hugging Face folder of this model, or token ids"
        raise refused(file.path, wanted, f"{kind}, {split}", fix)
    texts, kinds = fields.get("tokens", []), fields.get("token_type", [])
    ids = {name: fields[name] for name in SPECIAL if name in fields}
    if (
        not all(isinstance(text, str) for text in texts)
        or not all(0 <= number < len(texts) for number in ids.values())
        or not 0 < len(texts) >= len(kinds)
    ):
        wanted = "tokenizer.ggml.tokens, one for each type and special token"
        got = f"{len(texts)} tokens, {len(kinds)} types, {ids}"
        raise refused(file.path, wanted, got, "use another file")
    tokens = _split_by_merges(file, fields)
    added_token = extra_module("tokenizers").AddedToken
    for text, kind in zip(texts, kinds, strict=False):
        token = added_token(text, normalized=False)
        if kind == CONTROL:
            tokens.add_special_tokens([token])
        elif kind == USER_DEFINED:
            tokens.add_tokens([token])
    tokens.post_processor = _surrounding(file, fields)
    special_texts = {SPECIAL[name]: texts[number] for name, number in ids.items()}
    return Tokenizer(tokens, dict(_templates(file)), special_texts)


def _read_keys(file: GgufFile) -> Iterator[tuple[str, Any]]:
    """The keys that are honoured, checked."""
    fix = "use another file, or the Hugging Face folder of this model"
    for key in file.key_names():
        if not key.startswith("tokenizer.") or key in UNUSED:
            continue
        name, value = key.removeprefix(PREFIX), file.get(key)
        if name in HONOURED:
            if type(value) is not HONOURED[name]:
                wanted = f"{key}: a value of type {HONOURED[name].__name__}"
                raise refused(file.path, wanted, repr(value)[:80], fix)
            yield name, value
        elif name in NEUTRAL:
            if value != NEUTRAL[name]:
                wanted = f"{key}: {NEUTRAL[name]!r}"
                raise refused(file.path, wanted, repr(value)[:80], fix)
        elif name not in ENDS and not _is_template(key):
            wanted = f"no {key}, which is not implemented"
            raise refused(file.path, wanted, repr(value)[:80], fix)


def _split_by_merges(file: GgufFile, fields: Mapping[str, Any]) -> Any:
    """A tokenizer of the package, without added tokens."""
    tokenizers = extra_module("tokenizers")
    pre, split = tokenizers.pre_tokenizers, fields["pre"]
    vocabulary = {text: token_id for token_id, text in enumerate(fields["tokens"])}
    merges = [tuple(str(merge).split(" ")) for merge in fields.get("merges", [])]
    for pair in merges:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
            wanted = "tokenizer.ggml.merges: pairs of tokens, whose texts are tokens"
            raise refused(file.path, wanted, repr(" ".join(pair)), "use another file")
    model = tokenizers.models.BPE(
        vocabulary, merges, ignore_merges=split in WHOLE_WORDS
    )
    tokens = tokenizers.Tokenizer(model)
    if split in COMPOSED:
        tokens.normalizer = tokenizers.normalizers.NFC()
    if split == DIGITS:
        first = pre.Digits(individual_digits=True)
    else:
        pattern = tokenizers.Regex(SPLIT[split])
        first = pre.Split(pattern, behavior="isolated")
    words = pre.ByteLevel(add_prefix_space=False, use_regex=split == DIGITS)
    tokens.pre_tokenizer = pre.Sequence([first, words])
    tokens.decoder = tokenizers.decoders.ByteLevel()
    return tokens


def _surrounding(file: GgufFile, fields: Mapping[str, Any]) -> Any:
    """What puts the special tokens before and after a text."""
    has_beginning = fields["pre"] in BEGINNING and "bos_token_id" in fields
    template, special = ["$A"], []
    for name, default in (("bos", has_beginning), ("eos", False)):
        if not fields.get(f"add_{name}_token", default):
            continue
        number = fields.get(f"{name}_token_id")
        if number is None:
            wanted = f"{PREFIX}{name}_token_id, since add_{name}_token is true"
            raise refused(file.path, wanted, "none", "use another file")
        template = [name, *template] if name == "bos" else [*template, name]
        text = fields["tokens"][number]
        special.append({"id": name, "ids": [number], "tokens": [text]})
    processors = extra_module("tokenizers").processors
    return processors.TemplateProcessing(single=template, special_tokens=special)


def _templates(file: GgufFile) -> Iterator[tuple[str, str]]:
    """Chat templates by name."""
    for key in file.key_names():
        if _is_template(key):
            text = file.get(key)
            if not isinstance(text, str):
                raise refused(
                    file.path, f"{key}: a text", repr(text)[:80], "correct it"
                )
            yield key.removeprefix(TEMPLATE).removeprefix(".") or DEFAULT, text


def _is_template(key: str) -> bool:
    return f"{key}.".startswith(f"{TEMPLATE}.")
