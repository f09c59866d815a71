"""``kvwinnow explore``."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kvwinnow.cli.console import err, importing, stages
from kvwinnow.cli.prompts import check_length, joined, model_and_question, read_prompt


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
    name, asked = model_and_question(model, question, prompt_file, system)
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
            from kvwinnow.simulation.writing import check_target

        # Before the model is loaded, which takes time.
        chosen = different([parse(text) for text in policy or DEFAULT_POLICIES])
        check_package()
        check_target(output)
        loaded, tokenizer = load(name, progress=show)
        ids = encode(tokenizer, joined(text, asked), system=system)
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
    count = len(exploration.runs)
    under = "1 policy" if count == 1 else f"{count} policies"
    err().print(
        f"{output}: {size / 1e6:.1f} MB, {ids.shape[1]:,} tokens under {under}; open it in a browser",
        markup=False,
        highlight=False,
    )
