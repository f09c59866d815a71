"""Texts that every Python carries, as token ids of the model that is measured."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvwinnow.evaluation.document import help_chapters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHARACTERS_PER_TOKEN = 6
"""More than any stretch of these texts needs, so that a cut of n times this many characters has n tokens."""


def help_text() -> str:
    """Python's own help, prose for the most part."""
    return "\n\n".join(help_chapters().values())


def library_code() -> str:
    """The top-level modules of the standard library, joined in the order of their names."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)


def tokens(tokenizer: PreTrainedTokenizerBase, text: str, count: int, *, start: int = 0) -> Tensor:
    """(1, count) token ids of ``text`` from character ``start`` on.

    Raises:
        SystemExit: the text is too short; the message says by how much.
    """
    encode: Any = tokenizer
    ids: Tensor = encode(text[start : start + count * CHARACTERS_PER_TOKEN], return_tensors="pt").input_ids
    if ids.shape[1] < count:
        raise SystemExit(f"the text gives {ids.shape[1]:,} tokens from character {start:,} on; {count:,} are needed")
    return ids[:, :count]
