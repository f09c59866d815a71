"""``kvwinnow record``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kvwinnow.cli.console import importing, note, out, progress_bar, stages
from kvwinnow.cli.prompts import check_length, joined, model_and_question, read_prompt
from kvwinnow.errors import KvwinnowError

_COPIES = 3
"""How often a trace lies in memory while it is written: as recorded, as laid out in the file, and its pages."""


def record(
    model: Annotated[
        str | None,
        typer.Argument(help="A folder or a cached hub id; left out: the default model.", show_default=False),
    ] = None,
    question: Annotated[
        str | None, typer.Argument(help="In quotes; comes after the file's text.", show_default=False)
    ] = None,
    prompt_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="UTF-8 text, put before the question; - reads stdin.")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="The trace to write, ending in .parquet.")
    ] = None,
    new_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens to generate, whose attention tells what the prompt's tokens were worth.")
    ] = 64,
    vectors: Annotated[
        bool,
        typer.Option("--vectors", help="Record keys, values and queries too, which some policies look at."),
    ] = False,
    system: Annotated[str | None, typer.Option(help="A system message for the chat template.")] = None,
) -> None:
    """Record the attention of a real run with the full cache, for kvwinnow simulate.

    The prompt is put into the model's chat template, as kvwinnow generate does, and answered greedily.
    """
    model, question = model_and_question(model, question, prompt_file, system)
    if output is None:
        raise KvwinnowError("the trace has no name; give one that ends in .parquet: -o trace.parquet")
    if Path(output).suffix.lower() != ".parquet":
        raise KvwinnowError(f"-o {output} does not end in .parquet, which tells kvwinnow simulate what it is; add it")
    from kvwinnow.simulation import parquet
    from kvwinnow.simulation.retained import few_queries
    from kvwinnow.simulation.writing import check_target

    check_target(output)
    parquet.check_pyarrow()
    text = None if prompt_file is None else read_prompt(prompt_file, instead=" first" if question is None else None)
    with stages() as show:
        with importing(show):
            from kvwinnow.evaluation.generation import encode
            from kvwinnow.integrations.default_model import NAME
            from kvwinnow.integrations.loading import load
            from kvwinnow.simulation.record import record as run

        loaded, tokenizer = load(model, progress=show)
        ids = encode(tokenizer, joined(text, question), system=system)
        check_length(loaded, ids.shape[1], new_tokens, "--new-tokens")
        _check_memory(loaded, ids.shape[1], new_tokens, vectors, show)
    with progress_bar("recording") as progress:
        trace = run(
            loaded,
            ids,
            new_tokens=new_tokens,
            tokenizer=tokenizer,
            name=NAME if model is None else model,
            vectors=vectors,
            progress=lambda done, total: progress(done, total, "recording"),
        )
    with stages() as show:
        show(f"writing {output}")
        parquet.write(trace, output)
    size = os.path.getsize(os.path.expanduser(output))
    out().print(
        f"{output}: {trace.prompt:,} tokens of prompt and {len(trace.tokens) - trace.prompt:,} generated, "
        f"{len(trace.layers)} layers of {trace.kv_heads} KV heads in {len(trace.steps)} steps"
        f"{' with vectors' if vectors else ''}, {size / 1e6:,.1f} MB.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    note(few_queries(trace))


def _check_memory(model: Any, prompt: int, new: int, vectors: bool, show: Callable[[str], None]) -> None:
    """Say what the trace will take, and refuse what would not fit."""
    from kvwinnow.integrations.transformers.structure import inspect_model
    from kvwinnow.integrations.transformers.unwrap import unwrap
    from kvwinnow.simulation.record import nbytes

    plain = unwrap(model)
    trace, cache = nbytes(inspect_model(plain), prompt, new, itemsize=plain.dtype.itemsize, vectors=vectors)
    needed, free = _COPIES * trace + cache, _available()
    show(f"the trace takes up to {trace / 1e6:,.0f} MB, and recording it {needed / 1e6:,.0f} MB beside the model")
    if free is not None and needed > free:
        raise KvwinnowError(
            f"recording {prompt:,} tokens and {new:,} new ones takes {needed / 1e9:,.1f} GB of memory beside the "
            f"model, and {free / 1e9:,.1f} GB are free; shorten the prompt, lower --new-tokens"
            f"{', or leave --vectors out' if vectors else ''}"
        )


def _available() -> int | None:
    """Bytes of memory that can be had, where the system tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
