"""Texts as token ids: the tokenizer and the chat template of a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from etc_dist.errors import ArgumentError, expect_type
from etc_dist.files import read_file, read_object
from etc_dist.ir.expr import is_integer
from etc_dist.models.config import read_config
from etc_dist.models.extras import extra_module
from etc_dist.models.gguf_file import GgufFile

SPLIT = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""The pattern of words, by the name that a GGUF file has for it."""
WHOLE_WORDS = ("llama-bpe",)
"""Those in which a word that is a token is not split by merges."""
COMPOSED = ("qwen2",)
"""Those of which texts are normalised first, so that accents join their letters."""
DIGITS = "smollm"
"""The name of GPT-2's pattern, with each digit a word."""
CONTROL, USER_DEFINED = 3, 4
"""Kinds of tokens in a GGUF file that are never the result of merges."""
SPECIAL = tuple(
    f"{n}_token" for n in ["bos", "eos", "unk", "sep", "pad", "cls", "mask"]
)
"""Special tokens of tokenizer_config.json that a template may name."""
EXTRA = "extra", "additional"
"""What begins the names of further special tokens there."""
FLAGS = "content", "lstrip", "rstrip", "normalized", "single_word"
"""What decides where a text has an added token."""
MOST_IDS = 2**32
SAFE_JINJA = 3, 1, 6
"""Earlier releases let a template run any code (CVE-2025-27516)."""
INCOMPLETE = "\ufffd"
"""The end of a text whose last character needs further tokens."""
MOST_BYTES = 4
"""Of a character, and thus its tokens."""


class Tokenizer:
    """The tokenizer of a model, by the package `tokenizers`; made by `load_tokenizer`.

    chat_template: a Jinja template, or None. special: texts by the names that the
    template uses, such as bos_token."""

    def __init__(
        self, tokens: Any, chat_template: str | None, special: Mapping[str, str]
    ) -> None:
        self._tokens = tokens
        self.chat_template, self._special = chat_template, dict(special)
        added = tokens.get_added_tokens_decoder().items()
        self._invisible = {number for number, token in added if token.special}

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without a template. Names of special tokens in it become
        their ids."""
        expect_type(text, str, "text")
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates
        return list(self._tokens.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without special tokens. TypeError unless all are integers
        from 0."""
        return str(self._tokens.decode(_checked_ids(ids), skip_special_tokens=True))

    def visible(self, ids: Iterable[int]) -> list[tuple[int, str]]:
        """Ids and their tokens, without those that `decode` leaves out: special and
        unknown ones."""
        tokens = [(n, self._tokens.id_to_token(n)) for n in _checked_ids(ids)]
        return [(n, text) for n, text in tokens if text and n not in self._invisible]

    def chat(self, messages: str | Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a conversation, up to the beginning of the model's answer.
        messages: mappings with "role" and "content", or the text of one message of the
        user. Without a chat template, the ids of the contents, joined by newlines.

        Raises ArgumentError where the template refuses the conversation."""
        expect_type(messages, (str, list, tuple), "messages")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        for message in messages:
            expect_type(message, Mapping, "a message")
            for key in ("role", "content"):
                expect_type(message.get(key), str, f"{key!r} of a message")
        if self.chat_template is None:
            return self.encode("\n".join(one["content"] for one in messages))
        return self.encode(render(self.chat_template, messages, self._special))


class TextStream:
    """The text of tokens that come one by one: `print(text.add([id]), end="")` for
    each id, then `print(text.end())`. Each id costs the same, however long the text is.
    """

    # NOTE: the first words of a text, and bytes, are decoded by what is before them. So
    # ids are decoded together with those of the last complete character.

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []
        self._num_sent = 0  # characters of the context's text

    def add(self, ids: Iterable[int]) -> str:
        """The text that these ids add, up to the last complete character."""
        return "".join([self._add(*one) for one in self._tokenizer.visible(ids)])

    def end(self) -> str:
        """What is left of the text, with a mark for an incomplete character."""
        text = self._tokenizer.decode(self._context + self._pending)
        return text[self._num_sent :]

    def _add(self, number: int, token: str) -> str:
        self._pending.append(number)
        text = self._tokenizer.decode(self._context + self._pending)
        is_mark = token.endswith(INCOMPLETE)  # written by the model
        num_held = int(text.endswith(INCOMPLETE) and not is_mark)
        if num_held and len(self._pending) < MOST_BYTES:
            return ""
        new = text[self._num_sent : len(text) - num_held]
        self._context, self._pending = self._pending, []
        self._num_sent = len(self._tokenizer.decode(self._context)) - num_held
        return new


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of the model in `path`, as for `load`.

    Raises ArgumentError for a path without one, for a tokenizer of a GGUF file that is
    not implemented, and for one with ids that the model does not have."""
    expect_type(path, (str, Path), "path")
    path = Path(path).expanduser()
    if not path.is_dir():
        file = GgufFile(path)
        return _checked(_of_gguf(file), file.config().vocabulary, path)
    return _checked(_of_folder(path), read_config(path).vocabulary, path)


def _checked_ids(ids: Iterable[int]) -> list[int]:
    numbers = list(ids)
    for number in numbers:
        if not is_integer(number) or not 0 <= number < MOST_IDS:
            raise TypeError(f"ids of tokens are integers from 0, got {number!r}")
    return numbers


def render(
    template: str, messages: Sequence[Mapping[str, str]], special: Mapping[str, str]
) -> str:
    """A conversation as text, by a chat template with what transformers offers to it.

    Raises ArgumentError if the template refuses the conversation, or cannot be used."""
    sandbox, jinja2 = extra_module("jinja2.sandbox"), extra_module("jinja2")
    if tuple(map(int, jinja2.__version__.split(".")[:3])) < SAFE_JINJA:
        raise ArgumentError(
            "templates can leave the sandbox of this jinja2",
            where="the model's chat template",
            wanted=f"jinja2 {'.'.join(map(str, SAFE_JINJA))} or later",
            got=jinja2.__version__,
            fix="pip install --upgrade jinja2",
        )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        made = environment.from_string(template)
        given = {"messages": messages, "add_generation_prompt": True}
        given |= {"tools": None, "documents": None}
        return str(made.render(given, **special))
    except Exception as error:  # a template runs any expression
        raise ArgumentError(
            "the chat template cannot be used",
            where="the model's chat template",
            wanted="a conversation that it takes, and a Jinja template",
            got=f"{type(error).__name__}: {error}",
            fix="change the messages, or give encode() a text that you made",
        ) from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # NOTE: the other options of json.dumps would call what a template passes.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _checked(tokenizer: Tokenizer, vocabulary: int, path: Path) -> Tokenizer:
    largest = max(tokenizer._tokens.get_vocab().values(), default=0)
    if largest >= vocabulary:
        wanted = f"ids of 0 .. {vocabulary - 1}, as the model has"
        fix = "use the tokenizer of this model"
        raise _refused(path, wanted, f"id {largest}", fix)
    return tokenizer


def _of_folder(folder: Path) -> Tokenizer:
    tokenizers = extra_module("tokenizers")
    file = folder / "tokenizer.json"
    try:
        tokens = tokenizers.Tokenizer.from_str(read_file(file).decode())
    except Exception as error:  # the package raises Exception itself
        fix = "add the model's tokenizer.json, or use token ids"
        raise _refused(file, "a readable tokenizer.json", str(error), fix) from error
    # Settings of the training: each text is encoded as a whole, and alone.
    tokens.no_truncation()
    tokens.no_padding()
    config = folder / "tokenizer_config.json"
    given = _read_object(config)
    older = _read_object(folder / "special_tokens_map.json")
    texts = {}
    for name in SPECIAL:
        value = given[name] if name in given else older.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            texts[name] = text
        elif value is not None:
            wanted = f"{name}: a text, or an object with content"
            raise _refused(config, wanted, repr(value), "correct it")
    _check_declared(tokens, folder, given, texts)
    template = given.get("chat_template")
    separate = folder / "chat_template.jinja"
    try:
        template = read_file(separate).decode()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise _refused(separate, "a text in UTF-8", str(error), "correct it") from error
    return Tokenizer(tokens, _default_template(template, config), texts)


def _check_declared(
    tokens: Any, folder: Path, given: Mapping[str, Any], special: Mapping[str, str]
) -> None:
    """Refuse tokens that other files declare otherwise than tokenizer.json, since
    transformers adds those."""
    config, path = folder / "tokenizer_config.json", folder / "added_tokens.json"
    if given.get("split_special_tokens"):
        fix = "remove it, or give the ids of tokens"
        raise _refused(config, "no split_special_tokens", "true", fix)
    declared = {str(n): {"content": text} for text, n in _read_object(path).items()}
    decoder = given.get("added_tokens_decoder") or {}
    extra = [given.get(f"{kind}_special_tokens") or () for kind in EXTRA]
    names = [*special.values()]
    for some in extra:
        names += some.values() if isinstance(some, Mapping) else some
    if not isinstance(decoder, Mapping):
        got = repr(decoder)[:80]
        raise _refused(config, "added_tokens_decoder: an object", got, "correct it")
    known = {str(n): t for n, t in tokens.get_added_tokens_decoder().items()}
    fix = "add it to tokenizer.json, as save_pretrained of transformers does"
    for number, token in {**declared, **decoder}.items():
        own = known.get(number)
        if not isinstance(token, Mapping) or any(
            name in FLAGS and value != getattr(own, name, None)
            for name, value in token.items()
        ):
            wanted = f"token {number} as in tokenizer.json"
            raise _refused(config, wanted, f"{token}", fix)
    for name in names:
        text = name.get("content") if isinstance(name, Mapping) else name
        if not isinstance(text, str) or tokens.token_to_id(text) is None:
            raise _refused(config, "tokens of tokenizer.json", repr(text), fix)


def _read_object(path: Path) -> dict[str, Any]:
    """The object of a JSON file, empty if there is no such file."""
    try:
        return read_object(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _refused(path, "a JSON object", str(error), "correct it") from error


def _default_template(given: Any, path: Path) -> str | None:
    """The template, or of several named ones the one named "default"."""
    if isinstance(given, list):
        named = [one for one in given if isinstance(one, dict)]
        found = {one.get("name"): one.get("template") for one in named}
        given = found.get("default", given)
    if given is not None and not isinstance(given, str):
        wanted = 'chat_template: a text, or a list with one named "default"'
        raise _refused(path, wanted, repr(given)[:80], "correct it")
    return given


def _of_gguf(file: GgufFile) -> Tokenizer:
    tokenizers = extra_module("tokenizers")
    pre = tokenizers.pre_tokenizers
    kind, split = (file.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind != "gpt2" or split not in (*SPLIT, DIGITS):
        known = ", ".join((*SPLIT, DIGITS))
        wanted = f"tokenizer.ggml.model gpt2, with tokenizer.ggml.pre {known}"
        fix = "use the Hugging Face folder of this model, or token ids"
        raise _refused(file.path, wanted, f"{kind}, {split}", fix)
    texts = file.get("tokenizer.ggml.tokens", ())
    kinds = file.get("tokenizer.ggml.token_type", ())
    numbers = {
        name: file.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")
    }
    numbers = {name: number for name, number in numbers.items() if number is not None}
    if not texts or max(len(kinds), *(n + 1 for n in numbers.values()), 0) > len(texts):
        wanted = "tokenizer.ggml.tokens, one for each type, for bos and for eos"
        got = f"{len(texts)} tokens, {len(kinds)} types, {numbers}"
        raise _refused(file.path, wanted, got, "use another file")
    merges = [tuple(one.split(" ")) for one in file.get("tokenizer.ggml.merges", ())]
    vocabulary = {text: number for number, text in enumerate(texts)}
    for pair in merges:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
            wanted = "tokenizer.ggml.merges: pairs of tokens, whose texts are tokens"
            raise _refused(file.path, wanted, repr(" ".join(pair)), "use another file")
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
    for number, kind in enumerate(kinds):
        added = tokenizers.AddedToken(texts[number], normalized=False)
        if kind == CONTROL:
            tokens.add_special_tokens([added])
        elif kind == USER_DEFINED:
            tokens.add_tokens([added])
    special = {f"{name}_token": texts[n] for name, n in numbers.items()}
    return Tokenizer(tokens, file.get("tokenizer.chat_template"), special)


def _refused(path: Path, wanted: str, got: str, fix: str) -> ArgumentError:
    return ArgumentError(
        "the tokenizer cannot be used", where=str(path), wanted=wanted, got=got, fix=fix
    )
