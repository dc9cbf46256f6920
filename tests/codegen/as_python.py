"""Index expressions and conditions of generated CUDA text, as Python text."""

from __future__ import annotations

import re


def as_python(cuda: str) -> str:
    """`cuda` with Python's conditional and boolean operators. A choice `a ? b : c` has
    its own parentheses."""
    text = re.sub(r"!(?=\()", "not ", cuda).replace("||", "or")
    return _choices(text)


def _choices(text: str) -> str:
    parts, depth, begin = [], 0, 0
    for char_idx, sign in enumerate(text):
        if sign == "(":
            depth += 1
            if depth == 1:
                parts.append(text[begin:char_idx])
                begin = char_idx + 1
        elif sign == ")":
            depth -= 1
            if depth == 0:
                parts.append(f"({_choices(text[begin:char_idx])})")
                begin = char_idx + 1
    return _choice([*parts, text[begin:]])


def _choice(parts: list[str]) -> str:
    """Texts, every second one of which is in parentheses."""
    tokens = [re.split(r" ([?:]) ", part) if n % 2 == 0 else [part]
              for n, part in enumerate(parts)]  # fmt: skip
    pieces, signs = [""], []
    for split in tokens:
        pieces[-1] += split[0]
        for sign, piece in zip(split[1::2], split[2::2], strict=True):
            signs.append(sign)
            pieces.append(piece)
    if not signs:
        return pieces[0]
    assert signs == ["?", ":"], signs
    condition, then, alternative = pieces
    return f"{then} if {condition} else {alternative}"
