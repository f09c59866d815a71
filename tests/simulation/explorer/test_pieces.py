"""Each token's text, whatever the tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvwinnow.simulation.explorer.pieces import pieces
from tests.cli.conftest import byte_tokenizer

BYTES = byte_tokenizer()


def words_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama's: a space before a word belongs to it, the first one of a text is dropped, bytes stand for the rest."""
    vocabulary = ["<unk>", "a", "▁", "▁We", "▁met", ".", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(
        models.BPE(
            vocab={text: i for i, text in enumerate(vocabulary)}, merges=[], byte_fallback=True, unk_token="<unk>"
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@settings(max_examples=60)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="�")))
def test_pieces_are_the_text(text: str) -> None:
    assert "".join(pieces(BYTES, BYTES(text).input_ids)) == text


def test_a_character_of_several_tokens_goes_to_the_first() -> None:
    assert pieces(BYTES, BYTES("né 😀!").input_ids) == ("n", "é", "", " ", "😀", "", "", "", "!")


def test_bytes_that_are_no_character_do_not_spread() -> None:
    half = BYTES("😀").input_ids[:2]
    made = pieces(BYTES, [*half, *BYTES("ab é").input_ids])
    assert made[:2] == ("�", "�")
    assert made[2:] == ("a", "b", " ", "é", "")


def test_spaces_before_words_stay() -> None:
    tokenizer = words_tokenizer()
    names = ["▁We", "▁met", ".", "▁", "<0xC3>", "<0xA9>", "<0x0A>"]
    ids = [tokenizer.convert_tokens_to_ids(name) for name in names]
    assert pieces(tokenizer, ids) == (" We", " met", ".", " ", "é", "", "\n")


@pytest.mark.smollm2
def test_the_default_models_tokens(smollm2: tuple[Any, Any]) -> None:
    _, tokenizer = smollm2
    text = "<|im_start|>Hello 😀 wörld\n\n  </script>"
    made = pieces(tokenizer, tokenizer(text).input_ids)
    assert "".join(made) == text
    assert made[:3] == ("<|im_start|>", "Hello", " 😀")
