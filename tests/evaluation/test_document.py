"""The document: as long as asked, the fact in it once and where it was asked for, whatever the help texts."""

from __future__ import annotations

from typing import Any

import pytest

from kvwinnow.errors import KvwinnowError
from kvwinnow.evaluation.document import help_chapters, hide, paragraphs
from tests.cli.conftest import byte_tokenizer

FACT = "The fact stands here."


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.mark.parametrize("depth", [0.0, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("tokens", [1500, 6000])
def test_length_and_depth(tokenizer: Any, tokens: int, depth: float) -> None:
    document = hide(FACT, tokenizer, tokens=tokens, depth=depth, chapters=help_chapters())
    assert document.split("\n\n").count(FACT) == 1
    assert hide(FACT, tokenizer, tokens=tokens, depth=depth, chapters=help_chapters()) == document
    # The tokenizer counts bytes.
    assert tokens - 30 <= len(document.replace(f"{FACT}\n\n", "").replace(f"\n\n{FACT}", "").encode()) <= tokens
    before = len(document.partition(FACT)[0].encode())
    longest = max(len(line.encode()) for line in document.split("\n\n"))
    assert min(depth * tokens, tokens - 30) <= before <= depth * tokens + longest + 2


def test_other_texts_give_another_document_of_the_same_length(tokenizer: Any) -> None:
    # As between two versions of Python: a sentence more here, a chapter missing there.
    chapters = help_chapters()
    newer = {**chapters, "objects": "A new sentence opens the chapter. " * 6 + "\n\n" + chapters["objects"]}
    del newer["types"]
    ours, theirs = (hide(FACT, tokenizer, tokens=9000, depth=0.5, chapters=c) for c in (chapters, newer))
    assert ours != theirs
    assert abs(len(ours.encode()) - len(theirs.encode())) <= 30


def test_paragraphs_are_prose() -> None:
    lines = list(paragraphs(help_chapters()))
    assert len(lines) > 50
    for line in lines:
        assert "\n" not in line
        assert "::=" not in line
        assert ">>>" not in line


def test_more_than_there_is_gets_refused(tokenizer: Any) -> None:
    with pytest.raises(KvwinnowError, match=r"document of [\d,]+ tokens, and 9,000,000 are asked for"):
        hide(FACT, tokenizer, tokens=9_000_000, depth=0.5, chapters=help_chapters())
    with pytest.raises(KvwinnowError, match="document of 0 tokens"):
        hide(FACT, tokenizer, tokens=10, depth=0.5, chapters={})
