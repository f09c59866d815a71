"""The text of each token alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_LONGEST = 8  # tokens that one character may be made of, and a few more that such characters may overlap in
_ANCHOR = "a"


def pieces(tokenizer: Any, ids: Sequence[int]) -> tuple[str, ...]:
    """The text of each token; together they are the text of all.

    Where a character is made of several tokens, the first one gets it and the others are empty.

    Args:
        tokenizer: of transformers.
        ids: the tokens.
    """
    # Tokenizers that put a space before a word drop the first one of a text, so that no token may be decoded first.
    anchor = tokenizer(_ANCHOR, add_special_tokens=False)["input_ids"][-1:]
    known: dict[tuple[int, ...], str] = {}

    def text(*tokens: int) -> str:
        if tokens not in known:
            known[tokens] = _decoded(tokenizer, [*anchor, *tokens]).removeprefix(start)
        return known[tokens]

    start = _decoded(tokenizer, anchor)
    made: list[str] = []
    while len(made) < len(ids):
        made += _next(text, ids[len(made) : len(made) + _LONGEST])
    return tuple(made)


def _next(text: Any, ids: Sequence[int]) -> list[str]:
    """The next token's text, or those of the tokens that make a character together."""
    first: str = text(ids[0])
    if _BROKEN in first:
        for count in range(2, len(ids) + 1):
            whole = text(*ids[:count])
            if _BROKEN not in whole:
                return [whole, *[""] * (count - 1)]
    return [first]


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
