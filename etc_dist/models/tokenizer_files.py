"""The tokenizer in the folder of a model, by the package `tokenizers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etc_dist.errors import ArgumentError
from etc_dist.files import read_file
from etc_dist.models.config import read_config
from etc_dist.models.extras import extra_module
from etc_dist.models.gguf_file import GgufFile
from etc_dist.models.tokenizer import Tokenizer
from etc_dist.models.tokenizer_config import (
    FLAGS,
    SpecialTokens,
    content,
    expect_neutral,
    read_special,
    read_templates,
    refused,
)
from etc_dist.models.tokenizer_gguf import gguf_tokenizer

SURROUNDING = {"add_bos_token": 0, "add_eos_token": -1}
"""Where fields place tokens."""
SPACES = " ", "\u2581", "\u0120"
"""A space, as it is, and as tokens of pieces and of bytes have it."""
ADD_TOKEN = "add it to tokenizer.json, as save_pretrained of transformers does"


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of the model in `path`, as for `load`.

    Raises ArgumentError for a path without one, for files that are damaged or that
    declare what is not implemented, and for ids that the model does not have."""
    path = Path(path).expanduser()
    if not path.is_dir():
        file = GgufFile(path)
        tokenizer, vocabulary = gguf_tokenizer(file), file.config().vocabulary
    else:
        vocabulary, tokenizer = read_config(path).vocabulary, _of_folder(path)
    largest = tokenizer.largest_id()
    if largest >= vocabulary:
        wanted = f"ids of 0 .. {vocabulary - 1}, as the model has"
        raise refused(path, wanted, f"id {largest}", "use the tokenizer of this model")
    return tokenizer


def _of_folder(folder: Path) -> Tokenizer:
    tokenizers = extra_module("tokenizers")
    file = folder / "tokenizer.json"
    try:
        tokens = tokenizers.Tokenizer.from_str(read_file(file).decode())
    except Exception as error:  # the package raises Exception itself
        fix = "add the model's tokenizer.json, or use token ids"
        raise refused(file, "a readable tokenizer.json", str(error), fix) from error
    # Settings of the training: each text is encoded as a whole, and alone.
    tokens.no_truncation()
    tokens.no_padding()
    special = read_special(folder)
    expect_neutral(special)
    is_bpe = isinstance(tokens.model, tokenizers.models.BPE)
    if special.fields.get("clean_up_tokenization_spaces") and not is_bpe:
        wanted = "clean_up_tokenization_spaces: false, unless the model is BPE"
        raise refused(special.path, wanted, "true", "set it to false")
    has_space = special.fields.get("add_prefix_space")
    if has_space is not None and has_space is not _begins_with_space(tokens):
        wanted = f"add_prefix_space: {str(not has_space).lower()}, as tokenizer.json"
        raise refused(special.path, wanted, repr(has_space), "correct one of the files")
    _expect_added(tokens, special)
    _add_special(tokens, special)
    return Tokenizer(
        tokens,
        read_templates(special),
        special.texts(),
        conflict=_conflict(tokens, special),
    )


def _begins_with_space(tokens: Any) -> bool:
    """Whether a space is put before a text."""
    text = "a"
    if tokens.normalizer is not None:
        text = tokens.normalizer.normalize_str(text)
    if tokens.pre_tokenizer is not None:
        pieces = tokens.pre_tokenizer.pre_tokenize_str(text)
        text = "".join(piece for piece, _ in pieces)
    return text.startswith(SPACES)


def _expect_added(tokens: Any, special: SpecialTokens) -> None:
    """Refuse added tokens that tokenizer.json lacks or has with other flags."""
    token_by_id = {str(n): t for n, t in tokens.get_added_tokens_decoder().items()}
    for number, token in special.added_tokens.items():
        file_token = token_by_id.get(number)
        if any(
            name in FLAGS and value != getattr(file_token, name, None)
            for name, value in token.items()
        ):
            wanted = f"token {number} as in tokenizer.json"
            raise refused(special.path, wanted, f"{token}", ADD_TOKEN)


def _add_special(tokens: Any, special: SpecialTokens) -> None:
    """Make the tokens that are declared as special ones special in texts, too."""
    tokenizers = extra_module("tokenizers")
    token_by_text = {t.content: t for t in tokens.get_added_tokens_decoder().values()}
    special_texts = special.texts().values()
    for token in (*special.named_tokens.values(), *special.unnamed):
        text = content(token)
        if tokens.token_to_id(text) is None:
            raise refused(
                special.path, "tokens of tokenizer.json", repr(text), ADD_TOKEN
            )
        file_token = token_by_text.get(text)
        if file_token is not None and (file_token.special or text not in special_texts):
            continue
        if file_token is None:
            flag_fields = token if isinstance(token, dict) else {}
            flags = {
                name: flag_fields[name] for name in FLAGS[1:] if name in flag_fields
            }
            file_token = tokenizers.AddedToken(text, special=True, **flags)
        file_token.special = True
        token_by_text[text] = file_token
        tokens.add_special_tokens([file_token])


def _conflict(tokens: Any, special: SpecialTokens) -> ArgumentError | None:
    """What makes the special tokens around a text ambiguous."""
    ids, texts = tokens.encode("").ids, special.texts()
    for flag, place in SURROUNDING.items():
        number = tokens.token_to_id(texts.get(flag.removeprefix("add_"), ""))
        is_added = bool(ids) and ids[place] == number
        if is_added:
            ids.pop(place)  # the same token may be added at both places
        is_wanted = special.fields.get(flag)
        if is_wanted is not None and is_wanted is not is_added:
            return refused(
                special.path,
                f"{flag}: {str(is_added).lower()}, as tokenizer.json has it",
                f"{is_wanted!r}",
                "correct the wrong one of both files, or give add_special_tokens=False",
            )
    return None
