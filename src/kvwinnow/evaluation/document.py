"""A long document of plain prose with one fact hidden in it, made of what every Python carries."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvwinnow.errors import KvwinnowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Chapters of Python's own help, in reading order; their texts differ a little from version to version.
CHAPTERS = ("objects", "execmodel", "types", "customization", "import", "assignment")

_SHORTEST_PARAGRAPH = 160  # characters; shorter ones are headings, signatures and items of lists
_CODE = ("::=", ">>>")


def help_chapters() -> dict[str, str]:
    """The texts behind Python's ``help()``.

    Raises:
        KvwinnowError: this Python was built without them.
    """
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise KvwinnowError(
            "this Python lacks pydoc_data.topics, the text that the document is made of; install the full standard "
            "library, or run under another Python"
        ) from error
    return topics


def paragraphs(chapters: Mapping[str, str]) -> Iterator[str]:
    """The prose of ``CHAPTERS``, one paragraph a string, each on one line."""
    for name in CHAPTERS:
        for block in chapters.get(name, "").split("\n\n"):
            line = " ".join(block.split())
            if len(line) >= _SHORTEST_PARAGRAPH and not any(mark in line for mark in _CODE):
                yield line


def hide(
    fact: str, tokenizer: PreTrainedTokenizerBase, *, tokens: int, depth: float, chapters: Mapping[str, str]
) -> str:
    """A document of ``tokens`` tokens with ``fact`` as a paragraph of its own.

    Args:
        fact: one sentence.
        tokenizer: counts the tokens.
        tokens: length of the document, the fact not counted. It is met within one word, whatever the texts, so that
            documents of several Python versions compare.
        depth: where the fact lies: the share of the tokens after which its paragraph may begin, in [0, 1).
        chapters: what ``help_chapters()`` returns.

    Raises:
        KvwinnowError: the chapters are shorter than ``tokens``.
    """
    tool: Any = tokenizer
    lines: list[str] = []
    used, place = 0, None
    for paragraph in paragraphs(chapters):
        if place is None and used >= depth * tokens:
            place = len(lines)
        ids = tool(paragraph + "\n\n", add_special_tokens=False)["input_ids"]
        if used + len(ids) >= tokens:
            lines.append(_whole_words(tool.decode(ids[: tokens - used])))
            lines.insert(len(lines) if place is None else place, fact)
            return "\n\n".join(filter(None, lines))
        lines.append(paragraph)
        used += len(ids)
    raise KvwinnowError(
        f"Python's help gives a document of {used:,} tokens, and {tokens:,} are asked for; ask for less"
    )


def _whole_words(text: str) -> str:
    """``text`` without the last word, which a cut may have left in halves."""
    return text.rpartition(" ")[0]
