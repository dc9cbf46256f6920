"""Errors of several ranks that differ in the device they name."""

import re


def of_rank_zero(text: str) -> str:
    """The error `text` as rank 0 alone gives it: where ranks have a device each, every
    part has one line for each of them."""
    return re.sub(r"\n +rank [1-9]\d*: .*", "", text).replace("rank 0: ", "")
