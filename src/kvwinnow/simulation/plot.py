"""A sweep as one HTML page that needs no network: the plot, and the same figures as a table."""

from __future__ import annotations

import html
from typing import Any

from kvwinnow.errors import TraceError
from kvwinnow.simulation.render import budget_text, size_text
from kvwinnow.simulation.retained import few_queries
from kvwinnow.simulation.sweep import Point, Sweep
from kvwinnow.simulation.trace import Trace
from kvwinnow.simulation.whole_file import StrPath, replacing

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Retained attention against memory</title>
<style>body{{font-family:system-ui,sans-serif;margin:1rem;max-width:75rem}}
table{{border-collapse:collapse}}td,th{{padding:.2rem .6rem;text-align:right;border-bottom:1px solid #ccc}}
th:first-child,td:first-child{{text-align:left}}</style></head><body>
<h1>Retained attention against memory</h1>
<p>{said}</p>
{warned}{figure}
<table><thead><tr><th>policy</th><th>budget</th><th>tokens held</th><th>memory</th><th>retained</th></tr></thead>
<tbody>{rows}</tbody></table>
</body></html>
"""


def check_plotly() -> Any:
    """plotly's graph objects.

    Raises:
        TraceError: it is not installed.
    """
    try:
        import plotly.graph_objects
    except ImportError as error:
        raise TraceError("plots need plotly, which is not installed; run: pip install 'kvwinnow[tools]'") from error
    return plotly.graph_objects


def write(found: Sweep, trace: Trace, path: StrPath) -> None:
    """Write the page, as a whole or not at all.

    Raises:
        TraceError: the file cannot be written, or plotly is missing.
    """
    graph = check_plotly()
    shapes = (
        "circle",
        "square",
        "diamond",
        "triangle-up",
        "triangle-down",
        "x",
        "cross",
        "star",
        "hexagon",
        "pentagon",
    )
    colours = _colours()
    in_bytes = trace.model is not None
    figure = graph.Figure()
    for place, name in enumerate(dict.fromkeys(point.name for point in found.points)):
        own = sorted((point for point in found.points if point.name == name), key=lambda point: point.tokens)
        figure.add_scatter(
            x=[point.nbytes if in_bytes else point.tokens for point in own],
            y=[100 * point.retained for point in own],
            name=name,
            mode="lines+markers",
            marker={"symbol": shapes[place % len(shapes)], "size": 9, "color": colours[place % len(colours)]},
            text=[_told(point) for point in own],
            hovertemplate="%{text}<extra></extra>",
        )
    figure.update_xaxes(type="log", title="bytes of the whole cache in the end" if in_bytes else "tokens per KV head")
    figure.update_yaxes(title="attention retained, %")
    figure.update_layout(template="plotly_white", height=600, legend_title="policy")
    if in_bytes:
        figure.update_layout(updatemenus=[_switch(found)])
    drawn = figure.to_html(full_html=False, include_plotlyjs=True, config={"displaylogo": False, "responsive": True})
    few = few_queries(trace)
    page = _PAGE.format(
        said=html.escape(_said(trace)),
        warned="" if few is None else f"<p><strong>Note:</strong> {html.escape(few)}.</p>\n",
        figure=drawn,
        rows="\n".join(map(_row, found.points)),
    )
    with replacing(path) as draft:
        draft.write_text(page, encoding="utf-8")


def _colours() -> list[str]:
    from plotly.colors import qualitative

    colours: list[str] = qualitative.Dark24
    return colours


def _switch(found: Sweep) -> dict[str, Any]:
    """A menu that changes between bytes and tokens."""
    names = list(dict.fromkeys(point.name for point in found.points))
    lines = [
        sorted((point for point in found.points if point.name == name), key=lambda point: point.tokens)
        for name in names
    ]
    choices = (
        ("bytes", "bytes of the whole cache in the end", [[point.nbytes for point in line] for line in lines]),
        ("tokens", "tokens per KV head in the end", [[point.tokens for point in line] for line in lines]),
    )
    buttons = [
        {"label": label, "method": "update", "args": [{"x": x}, {"xaxis.title.text": title}]}
        for label, title, x in choices
    ]
    return {"type": "buttons", "direction": "right", "x": 0, "y": 1.12, "buttons": buttons}


def _said(trace: Trace) -> str:
    of = "" if trace.model is None else f" of {trace.model.name}"
    return (
        f"A trace{of}: {trace.prompt:,} tokens of prompt and {len(trace.tokens) - trace.prompt:,} more. Retained: the "
        "share of the attention paid by the full cache's queries after the prompt that lies on tokens still held when "
        "these queries come, mean over layers and KV heads."
    )


def _told(point: Point) -> str:
    memory = "" if point.nbytes is None else f", {size_text(point.nbytes)}"
    budget = "" if point.budget is None else f", budget {budget_text(point.budget)}"
    return f"{html.escape(point.name)}{budget}<br>{point.tokens:,.1f} tokens{memory}<br>{point.retained:.2%} retained"


def _row(point: Point) -> str:
    budget = "" if point.budget is None else budget_text(point.budget)
    memory = "" if point.nbytes is None else size_text(point.nbytes)
    cells = (html.escape(point.name), budget, f"{point.tokens:,.1f}", memory, f"{point.retained:.2%}")
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
