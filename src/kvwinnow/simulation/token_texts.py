"""The text of each token of a sequence, such that all of them together are the sequence's text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_PART = "\ufffd"
"""What decoding gives for bytes that are no whole character."""
_LONGEST = 8
"""More tokens than any character has bytes: what is no character by then never becomes one."""


def token_texts(tokenizer: Any, ids: Sequence[int]) -> tuple[str, ...]:
    """The text that each token adds, special tokens included.

    Of a character that is made of several tokens the last one has the character, and those before it are empty.
    """

    def decode(part: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(part), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    texts, begin, before = [], 0, 0
    # Decoded after the tokens before it, since some decoders drop the space at the start of a text.
    for end in range(1, len(ids) + 1):
        earlier, text = decode(ids[before:begin]), decode(ids[before:end])
        if text.endswith(_PART) and not earlier.endswith(_PART) and end - begin < _LONGEST and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(earlier) :])
        before, begin = begin, end
    return tuple(texts)
