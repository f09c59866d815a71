"""``kvwinnow explore``."""

from __future__ import annotations

import os
import re
from typing import Annotated

import typer

from kvwinnow.cli.console import err, importing, stages
from kvwinnow.cli.prompts import check_characters, check_length, read_prompt
from kvwinnow.errors import KvwinnowError

_MODEL = re.compile(r"[~.]?[\w.\-/\\:~]+")
"""What a hub id or a path may look like; a question has spaces or a question mark."""


def explore(
    model: Annotated[
        str | None,
        typer.Argument(help="A folder or a cached hub id; left out: the default model.", show_default=False),
    ] = None,
    question: Annotated[
        str | None, typer.Argument(help="In quotes; comes after the file's text.", show_default=False)
    ] = None,
    prompt_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="UTF-8 text to look at; - reads stdin.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Which tokens stay; may be given several times. Left out: SnapKV, H2O and StreamingLLM at an eighth "
            "of the prompt. The full cache is always shown beside them.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[str, typer.Option("--output", "-o", metavar="PAGE", help="The page to write.")] = "page.html",
    new_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Length of the answers at most.")] = 64,
    prefill_chunk: Annotated[
        int | None, typer.Option(min=1, help="Feed the prompt in pieces of this many tokens, which takes less memory.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message for the chat template.")] = None,
) -> None:
    """Show what policies did to a prompt, token by token, as one HTML page that needs no network."""
    name, asked = _model_and_question(model, question)
    for what, given in (("question", asked), ("system message", system)):
        check_characters(what, given or "")
    if asked is not None and not asked.strip():
        raise KvwinnowError("the question is empty; give some text, or leave it out")
    if prompt_file is None and asked is None:
        raise KvwinnowError(
            "there is no prompt; name a text file with --prompt-file FILE, give a question in quotes, or both"
        )
    text = None if prompt_file is None else read_prompt(prompt_file)
    with stages() as show:
        with importing(show):
            from kvwinnow.evaluation.generation import encode
            from kvwinnow.integrations.default_model import NAME
            from kvwinnow.integrations.loading import load
            from kvwinnow.policies import parse
            from kvwinnow.simulation.explorer.collect import DEFAULT_POLICIES, different
            from kvwinnow.simulation.explorer.collect import explore as collect
            from kvwinnow.simulation.explorer.page import check_package, write
            from kvwinnow.simulation.whole_file import check_target

        # Before the model is loaded, which takes time.
        chosen = different([parse(text) for text in policy or DEFAULT_POLICIES])
        check_package()
        check_target(output)
        loaded, tokenizer = load(name, progress=show)
        ids = encode(tokenizer, "\n\n".join(filter(None, (text, asked))), system=system)
        check_length(loaded, ids.shape[1], new_tokens, option="--new-tokens")
        shown = NAME if name is None else os.path.basename(os.path.normpath(name)) if os.path.isdir(name) else name
        exploration = collect(
            loaded,
            tokenizer,
            ids,
            chosen,
            name=shown,
            new_tokens=new_tokens,
            prefill_chunk=prefill_chunk,
            progress=show,
        )
        show("writing the page")
        size = write(output, exploration)
    err().print(
        f"{output}: {size / 1e6:.1f} MB, {ids.shape[1]:,} tokens under {len(exploration.runs)} policies; open it in a "
        "browser",
        markup=False,
        highlight=False,
    )


def _model_and_question(first: str | None, second: str | None) -> tuple[str | None, str | None]:
    """The two arguments by meaning: a single one is the model, unless it can only be a question."""
    if second is not None or first is None:
        return first, second
    is_model = os.path.isdir(first) or _MODEL.fullmatch(first) or not first.strip()
    return (first, None) if is_model else (None, first)
