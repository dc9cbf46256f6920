"""The text of tokens that come one by one."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers

from etc_dist.models.tokenizer import MOST_BYTES, TextStream, Tokenizer

SPECIAL = ["<s>", "</s>"]
PIECES = [
    "a",
    " ",
    "  ",
    "é",
    "€",
    "🙂",
    "汉字",
    " hello",
    "\n",
    "<s>",
    "\ufffd",
    "👩‍👧",
]


def of_bytes():
    """Bytes, and tokens that begin and end inside characters."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet())
    for text in ("汉字", "é a", "🙂🙃"):
        ((text, _),) = words.pre_tokenize_str(text)
        vocabulary += [
            text[n : n + size] for n in range(len(text)) for size in (2, 3, 5)
        ]
    vocabulary = {
        text: token_id for token_id, text in enumerate(dict.fromkeys(vocabulary))
    }
    tokens = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokens.pre_tokenizer, tokens.decoder = words, decoders.ByteLevel()
    return tokens


def of_pieces():
    """As SentencePiece: spaces begin words, and unknown characters are bytes."""
    vocabulary = [*SPECIAL, *(f"<0x{n:02X}>" for n in range(256))]
    vocabulary += ["▁", "a", "▁a", "▁hello", "é", "\ufffd"]
    vocabulary = {text: token_id for token_id, text in enumerate(vocabulary)}
    model = tokenizers.models.BPE(vocabulary, [], byte_fallback=True)
    tokens = tokenizers.Tokenizer(model)
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokens.normalizer = normalizers.Sequence(spaces)
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    tokens.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return tokens


def of_words():
    vocabulary = {
        text: token_id for token_id, text in enumerate(["a", "##b", ".", "<s>"])
    }
    tokens = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(vocabulary, unk_token="a")
    )
    tokens.decoder = decoders.WordPiece()
    return tokens


KINDS = {"bytes": of_bytes, "pieces": of_pieces, "words": of_words}


class Counted(Tokenizer):
    """Counts the ids that are decoded."""

    num_decoded = 0

    def decode(self, ids):
        self.num_decoded += len(ids)
        return super().decode(ids)


def of(kind):
    tokens = KINDS[kind]()
    tokens.add_special_tokens(SPECIAL)
    return tokens, Counted(tokens, {}, {})


def streamed(tokenizer, ids):
    stream = TextStream(tokenizer)
    for number in ids:
        before = tokenizer.num_decoded
        yield stream.add([number])
        assert tokenizer.num_decoded - before <= 3 * MOST_BYTES
    yield stream.end()


@pytest.mark.parametrize("kind", KINDS)
def test_random_texts_are_streamed_as_they_are_decoded(kind, rng):
    tokens, tokenizer = of(kind)
    for _ in range(300):
        text = "".join(rng.choice(PIECES, rng.integers(40)))
        ids = tokens.encode(text).ids
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_random_ids_are_streamed_as_they_are_decoded(kind, rng):
    tokens, tokenizer = of(kind)
    for _ in range(300):
        ids = rng.integers(tokens.get_vocab_size() + 1, size=rng.integers(40)).tolist()
        whole, text = tokenizer.decode(ids), "".join(streamed(tokenizer, ids))
        # NOTE: one wrong byte spoils those before it, of which the text is sent.
        assert text == whole or (kind == "pieces" and "\ufffd" in whole)


def test_a_character_is_sent_with_its_last_token():
    tokens, tokenizer = of("bytes")
    ids = tokens.encode("a🙂b").ids
    assert list(streamed(tokenizer, ids)) == ["a", "", "", "", "🙂", "b", ""]


def test_the_end_of_a_text_may_be_an_incomplete_character():
    tokens, tokenizer = of("bytes")
    ids = tokens.encode("aé").ids[:-1]
    assert list(streamed(tokenizer, ids)) == ["a", "", "\ufffd"]


@pytest.mark.parametrize("number", [-1, 0.5, "a"])
def test_ids_that_are_not_tokens_are_a_type_error(number):
    with pytest.raises(TypeError, match="ids of tokens are integers from 0"):
        TextStream(of("bytes")[1]).add([number])
