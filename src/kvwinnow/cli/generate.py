"""``kvwinnow generate``."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from kvwinnow.cli.console import err, importing, stages
from kvwinnow.cli.prompts import check_length, read_prompt
from kvwinnow.errors import KvwinnowError


def generate(
    model: Annotated[
        str | None,
        typer.Argument(help="A folder or a cached hub id; left out: the default model.", show_default=False),
    ] = None,
    question: Annotated[str | None, typer.Argument(help="In quotes.", show_default=False)] = None,
    policy: Annotated[str, typer.Option(help="Which tokens stay; see kvwinnow policies.")] = "snapkv:budget=1024",
    kv_dtype: Annotated[
        str | None,
        typer.Option(help="How keys and values are stored: fp32, bf16, fp16, fp8, int8, int4, int4:group=32, fp4."),
    ] = None,
    k_dtype: Annotated[str | None, typer.Option(help="The same for keys alone.")] = None,
    v_dtype: Annotated[str | None, typer.Option(help="The same for values alone.")] = None,
    prompt_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="UTF-8 text to put before the question; - reads stdin.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message for the chat template.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after this many tokens.")] = 128,
    prefill_chunk: Annotated[
        int | None, typer.Option(min=1, help="Feed the prompt in pieces of this many tokens, which takes less memory.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print what the answer cost on stderr.")] = False,
) -> None:
    """Answer a question about a text, greedily, with a compressed KV cache."""
    model_name, question = _model_and_question(model, question)
    _check_characters("question", question)
    _check_characters("system message", system or "")
    text = None if prompt_file is None else read_prompt(prompt_file)
    with stages() as show:
        with importing(show):
            from kvwinnow.codecs import parse_codec
            from kvwinnow.evaluation.generation import answer, encode
            from kvwinnow.evaluation.render import answer_table
            from kvwinnow.integrations.loading import load
            from kvwinnow.integrations.transformers import CompressedCache
            from kvwinnow.policies import parse

        # Before the model is loaded, which takes time.
        if kv_dtype is not None and (k_dtype is not None or v_dtype is not None):
            raise KvwinnowError(
                f"--kv-dtype {kv_dtype} names both dtypes, and {k_dtype or v_dtype} is beside it; give it alone, or "
                "--k-dtype and --v-dtype"
            )
        chosen = parse(policy)
        for dtype in filter(None, (kv_dtype, k_dtype, v_dtype)):
            parse_codec(dtype)
        loaded, tokenizer = load(model_name, progress=show)
        cache = CompressedCache(loaded, chosen, dtype=kv_dtype, k_dtype=k_dtype, v_dtype=v_dtype)
        ids = encode(tokenizer, question if text is None else f"{text}\n\n{question}", system=system)
        check_length(loaded, ids.shape[1], max_new_tokens, "--max-new-tokens")
    given = answer(
        loaded, tokenizer, cache, ids, max_new_tokens=max_new_tokens, prefill_chunk=prefill_chunk, on_text=_write
    )
    _write("\n")
    if stats:
        err().print(answer_table(given))


def _model_and_question(first: str | None, second: str | None) -> tuple[str | None, str]:
    """The two arguments by meaning: a single one is the question."""
    model, question = (None, first) if second is None else (first, second)
    if question is None or (second is None and os.path.isdir(question)):
        found = f"; {question!r} is a folder" if question else ""
        raise KvwinnowError(f'the question is missing{found}; give it last, in quotes: kvwinnow generate "QUESTION"')
    if not question.strip():
        raise KvwinnowError('the question is empty; give some text: kvwinnow generate "QUESTION"')
    return model, question


def _check_characters(what: str, text: str) -> None:
    """Bytes of the command line that are no text in its encoding arrive as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise KvwinnowError(
            f"character {error.start + 1} of the {what} is {text[error.start]!r}, which UTF-8 does not have: a byte "
            "that is no text in this terminal's encoding; write it in UTF-8"
        ) from error


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()
