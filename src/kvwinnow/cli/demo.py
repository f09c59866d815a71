"""``kvwinnow demo``."""

from __future__ import annotations

import typer

from kvwinnow.cli.console import err, importing, out, stages


def demo() -> None:
    """Hide a fact in a long document and ask six caches for it.

    Exit code 0 if the full cache, SnapKV and SnapKV + int4 answer right and the last is at least 20 times smaller
    than the full bf16 cache; else 1.
    """
    with stages() as show:
        with importing(show):
            from kvwinnow.evaluation import needle_demo
            from kvwinnow.evaluation.render import outcomes_table
            from kvwinnow.integrations.loading import load

        model, tokenizer = load(progress=show)
        task = needle_demo.make_task(tokenizer)
        outcomes = list(needle_demo.run(model, tokenizer, task, show))
    console = out()
    console.print(
        f"A document of {task.tokens:,} tokens; {task.depth:.0%} into it: {needle_demo.FACT}\n"
        f"Question: {needle_demo.QUESTION}\n"
        f"Budget: 1/{1 / needle_demo.SHARE:g} of the prompt for every cache but the full one.\n",
        highlight=False,
    )
    console.print(outcomes_table(outcomes))
    console.print(
        "Tokens per head: the most that any KV head holds after the answer. Bytes: all that the cache has allocated "
        "then, and how many times smaller that is than a full bf16 cache of the same tokens. First token: seconds "
        "for the prompt. Tokens per s: speed of those after the first.",
        highlight=False,
    )
    faults = [fault for outcome in outcomes if (fault := outcome.fault())]
    for fault in faults:
        err().print(f"kvwinnow: {fault}", markup=False, highlight=False)
    if faults:
        raise typer.Exit(1)
