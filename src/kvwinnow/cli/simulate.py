"""``kvwinnow simulate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvwinnow.cli.console import importing, note, out, progress_bar, stages
from kvwinnow.errors import KvwinnowError

if TYPE_CHECKING:
    from kvwinnow.simulation.trace import Trace

DEMO_BUDGET = 6


def simulate(
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Which tokens stay; see kvwinnow policies; hybrid:sinks=2 unless told. A sweep takes several, all of "
            "them unless told.",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="demo, demo-rows, or a file: .csv or .jsonl of tokens and attention, .parquet."
        ),
    ] = "demo",
    budget: Annotated[
        str | None,
        typer.Option(help="Tokens, share of the prompt or size, if the policy does not name it; 6 for the demos"),
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option(min=0, help="How many of a .csv's or .jsonl's tokens are a prompt; the others are decoded."),
    ] = None,
    layer: Annotated[int | None, typer.Option(help="Which layer of a recorded trace; the first unless told.")] = None,
    head: Annotated[int | None, typer.Option(help="Which KV head; the first unless told.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only what is held in the end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="budget=...",
            help="Attention retained against memory, for all policies or those named: budget=64..4096, or a list.",
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Write a sweep's plot: a page ending in .html.")
    ] = None,
) -> None:
    """Replay a trace of attention under a policy, token by token, without a model."""
    if sweep is not None:
        if budget is not None or quiet:
            raise KvwinnowError(
                f"{'--quiet' if budget is None else '--budget'} contradicts --sweep, which prints one table over the "
                "budgets it names; leave one of them out"
            )
        _sweep(trace, prompt, sweep, policy, layer, head, output, as_json)
        return
    if output is not None:
        raise KvwinnowError(f"-o {output} is for the plot of a sweep; add --sweep budget=64..4096, or leave it out")
    if policy is not None and len(policy) > 1:
        raise KvwinnowError(f"{len(policy)} policies are given, and only a sweep takes several; give one --policy")
    _one(trace, prompt, policy[0] if policy else "hybrid:sinks=2", budget, (layer, head), quiet, as_json)


def _one(
    name: str,
    prompt: int | None,
    spec: str,
    budget: str | None,
    place: tuple[int | None, int | None],
    quiet: bool,
    as_json: bool,
) -> None:
    with stages() as show:
        with importing(show, "torch"):
            from kvwinnow.policies import parse
            from kvwinnow.simulation import render
            from kvwinnow.simulation.reading import read_trace
            from kvwinnow.simulation.run import simulate as replay
            from kvwinnow.simulation.states import Head
            from kvwinnow.simulation.sweep import with_budget
            from kvwinnow.simulation.trace import DEMOS

        chosen = parse(spec)
        given = read_trace(name, prompt=prompt)
        if budget is None and chosen.limit is not None and "budget" not in spec:
            if name not in DEMOS:
                raise KvwinnowError(
                    f"--policy {spec} names no budget; add --budget, such as 64, or 0.25 for a share of the prompt"
                )
            budget = str(DEMO_BUDGET)
        if budget is not None and chosen.limit is None:
            raise KvwinnowError(
                f"--budget {budget} is of no use to --policy {spec}, which keeps every token; leave it out"
            )
        if budget is not None:
            chosen = with_budget(spec, budget)
        show(f"replaying {len(given.tokens):,} tokens")
        simulation = replay(given, chosen, scores=True)
        shown = Head(simulation, given.layers[0] if place[0] is None else place[0], place[1] or 0)
    if as_json:
        _write_json(shown.as_json(quiet=quiet))
        return
    console = out()
    if not quiet:
        console.print(render.arrivals(shown))
        console.print()
        console.print(render.legend(shown))
    for line in render.final(shown):
        console.print(line, highlight=False)


def _sweep(
    name: str,
    prompt: int | None,
    budgets: str,
    specs: list[str] | None,
    layer: int | None,
    head: int | None,
    output: str | None,
    as_json: bool,
) -> None:
    with stages() as show, importing(show, "torch"):
        from kvwinnow.policies import POLICIES
        from kvwinnow.simulation import plot, render
        from kvwinnow.simulation.reading import read_trace
        from kvwinnow.simulation.retained import few_queries
        from kvwinnow.simulation.sweep import parse_sweep
        from kvwinnow.simulation.sweep import sweep as run
        from kvwinnow.simulation.writing import check_target

    wanted = parse_sweep(budgets)
    if output is not None:
        if Path(output).suffix.lower() not in (".html", ".htm"):
            raise KvwinnowError(f"-o {output} is no page; the plot is written as HTML, so name a file ending in .html")
        check_target(output)
        plot.check_plotly()
    given = read_trace(name, prompt=prompt)
    place = _place(given, layer, head)
    with progress_bar("replaying") as progress:
        found = run(given, wanted, specs or tuple(POLICIES), place=place, progress=progress)
    note(few_queries(given))
    if output is not None:
        plot.write(found, given, output)
    if as_json:
        _write_json(found.as_json())
        return
    console = out()
    console.print(render.sweep_table(found))
    console.print(
        "Above: the share of the attention paid by the full cache's queries after the prompt that lies on tokens still "
        f"held when they come. Below: {'tokens per KV head' if given.model is None else 'bytes of the whole cache'} in "
        "the end (1 MB = 10^6 bytes). -: the budget is too small for what the policy protects.",
        highlight=False,
        markup=False,
    )
    for spec, reason in found.left_out.items():
        named = "" if reason.startswith(spec.partition(":")[0]) else f"{spec}: "
        console.print(f"Left out: {named}{reason}.", highlight=False, markup=False)
    if output is not None:
        console.print(f"The plot is in {output}.", highlight=False, markup=False)


def _place(trace: Trace, layer: int | None, head: int | None) -> tuple[int | None, int | None]:
    """The index of the layer in the trace, and the head, once they are known to be there."""
    if layer is None and head is None:
        return None, None
    from kvwinnow.policies import Full
    from kvwinnow.simulation.run import simulate as replay
    from kvwinnow.simulation.states import Head

    Head(replay(trace, Full()), trace.layers[0] if layer is None else layer, head or 0)
    return None if layer is None else trace.layers.index(layer), head


def _write_json(told: dict[str, Any]) -> None:
    typer.echo(json.dumps(told))
