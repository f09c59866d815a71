"""A sweep as one HTML page that needs no network: the plot, and the same figures as a table."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from kvwinnow.errors import TraceError
from kvwinnow.simulation.render import budget_text, size_text
from kvwinnow.simulation.retained import few_queries
from kvwinnow.simulation.sweep import Point, Sweep
from kvwinnow.simulation.trace import Trace
from kvwinnow.simulation.writing import StrPath, replacing

_STYLE = """
:root{color-scheme:light dark;--ground:#fff;--ink:#1c2126;--soft:#5b6470;--line:#d9d6cc}
@media (prefers-color-scheme:dark){:root{--ground:#13161a;--ink:#eceae4;--soft:#9aa4b0;--line:#353c45}}
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;padding:1rem;max-width:75rem;box-sizing:border-box;
background:var(--ground);color:var(--ink);overflow-wrap:break-word}
h1{font-size:1.4rem;line-height:1.2}label{margin-right:1rem}
.figure{overflow:hidden}.box{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.2rem .6rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left}
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Retained attention against memory</title>
<style>{style}</style></head><body>
<h1>Retained attention against memory</h1>
<p>{said}</p>
{few}{switch}<div class="figure">{figure}</div>
{missing}<div class="box" tabindex="0"><table>
<thead><tr><th>policy</th><th>budget</th><th>tokens held</th><th>memory</th><th>retained</th></tr></thead>
<tbody>{rows}</tbody></table></div>
</body></html>
"""

_SWITCH = """<p>Memory as <label><input type="radio" name="axis" value="bytes" checked> bytes of the whole cache</label>
<label><input type="radio" name="axis" value="tokens"> tokens per KV head</label></p>
"""

# Colours follow the theme and the legend the width; the markers' colours are one of two sets.
_SCRIPT = """
const plot = document.getElementById("plot"), axes = AXES, colours = COLOURS;
const dark = window.matchMedia("(prefers-color-scheme: dark)"), narrow = window.matchMedia("(max-width: 700px)");
const own = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let axis = Object.keys(axes)[0];
async function look() {
  const set = colours[dark.matches ? "dark" : "light"];
  const each = plot.data.map((_, place) => set[place % set.length]);
  const lines = { color: own("--soft"), gridcolor: own("--line"), linecolor: own("--line"), zeroline: false };
  const { title, ticks, texts } = axes[axis];
  const columns = plot.data.some(({ name }) => name.length > 17) ? 1 : 2;
  const below = 75 + 20 * Math.ceil(plot.data.length / columns);
  await Plotly.update(plot,
    { x: plot.data.map((_, place) => axes[axis].x[place]), "marker.color": each, "line.color": each },
    {
      paper_bgcolor: own("--ground"), plot_bgcolor: own("--ground"), "font.color": own("--ink"),
      width: plot.clientWidth, height: narrow.matches ? 430 + below : 600,
      margin: { l: 55, r: 15, t: 15, b: narrow.matches ? below : 50 },
      legend: narrow.matches
        ? { orientation: "h", x: 0, xref: "container", y: 0, yref: "container", yanchor: "bottom" }
        : { title: { text: "policy" } },
      xaxis: { ...lines, type: "log", title: { text: title }, tickvals: ticks, ticktext: texts },
      yaxis: { ...lines, title: { text: "attention retained, %" } },
      hoverlabel: { bgcolor: own("--ground"), font: { color: own("--ink") } },
    });
  document.documentElement.dataset.ready = "yes";
}
let width = plot.clientWidth;
new ResizeObserver(() => {
  if (plot.clientWidth === width) return;
  width = plot.clientWidth;
  look();
}).observe(plot.parentElement);
for (const media of [dark, narrow]) media.addEventListener("change", look);
for (const button of document.querySelectorAll("[name=axis]")) {
  button.addEventListener("change", () => { axis = button.value; look(); });
}
look();
"""

# fmt: off
_COLOURS = {
    "light": [
        "#5b6470", "#0b63b0", "#c24e00", "#0a7d55", "#a2457f", "#8a6a00",
        "#4b4fc4", "#00798c", "#b3261e", "#5f7a1f", "#7a4fa0", "#85532f",
    ],
    "dark": [
        "#9aa4b0", "#62b0f5", "#ff9455", "#46c795", "#e59ac8", "#d9b93f",
        "#a5a8ff", "#4fc6d8", "#ff8a80", "#a9cc5c", "#c9a2ef", "#d3a078",
    ],
}
# fmt: on
_SHAPES = ["circle", "square", "diamond", "triangle-up", "triangle-down", "x", "cross", "star", "hexagon", "pentagon"]
_MOST_TICKS = 8

CONFIG = {"displayModeBar": False, "displaylogo": False}
"""No bar of buttons, some of which send the figures to a server."""


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
    lines = _lines(found)
    figure = graph.Figure()
    for place, own in enumerate(lines):
        figure.add_scatter(
            y=[100 * point.retained for point in own],
            name=html.escape(_short(own[0].name)),
            mode="lines+markers",
            text=[_told(point) for point in own],
            hovertemplate="%{text}<extra></extra>",
            **_drawn(place),
        )
    figure.update_layout(template="none")
    axes = _axes(lines, in_bytes=trace.model is not None)
    script = _SCRIPT.replace("AXES", _script_text(axes)).replace("COLOURS", _script_text(_COLOURS))
    drawn = figure.to_html(
        full_html=False, include_plotlyjs=True, config=CONFIG, div_id="plot", post_script=script, default_height="auto"
    )
    few = few_queries(trace)
    missing = "".join(f"<li>{html.escape(reason)}.</li>" for reason in left_out(found))
    page = _PAGE.format(
        style=_STYLE,
        said=html.escape(_said(trace)),
        few="" if few is None else f"<p><strong>Note:</strong> {html.escape(few)}.</p>\n",
        missing=f"<p>Left out:</p>\n<ul>{missing}</ul>\n" if missing else "",
        switch=_SWITCH if len(axes) > 1 else "",
        figure=drawn,
        rows="\n".join(map(_row, found.points)),
    )
    with replacing(path) as draft:
        draft.write_text(page, encoding="utf-8")


def _lines(found: Sweep) -> list[list[Point]]:
    names = dict.fromkeys(point.name for point in found.points)
    return [
        sorted((point for point in found.points if point.name == name), key=lambda point: point.tokens)
        for name in names
    ]


def _drawn(place: int) -> dict[str, Any]:
    """How a line looks: every second one is dashed with small open marks and lies above, so that of two lines in one
    place (H2O and its hybrid) both are seen."""
    shape = _SHAPES[place % len(_SHAPES)]
    if place % 2:
        marker = {"symbol": f"{shape}-open", "size": 14, "line": {"width": 2}}
        return {"line": {"dash": "dash", "width": 1.5}, "marker": marker, "zorder": 1}
    return {"line": {"dash": "solid", "width": 3}, "marker": {"symbol": shape, "size": 8}, "zorder": 0}


def _axes(lines: Sequence[Sequence[Point]], *, in_bytes: bool) -> dict[str, Any]:
    """What the x axis can count, the first of which it counts at first."""
    tokens = [[point.tokens for point in line] for line in lines]
    axes = {"tokens": _axis("tokens per KV head in the end", tokens, lambda x: f"{x:,.4g}")}
    if in_bytes:
        nbytes = [[float(point.nbytes or 0) for point in line] for line in lines]
        axes = {"bytes": _axis("bytes of the whole cache in the end", nbytes, lambda x: size_text(round(x)))} | axes
    return axes


def _axis(title: str, x: list[list[float]], text: Any) -> dict[str, Any]:
    every = [one for line in x for one in line if one > 0]
    ticks = log_ticks(min(every), max(every)) if every else []
    return {"title": title, "x": x, "ticks": ticks, "texts": [text(tick) for tick in ticks]}


def log_ticks(least: float, most: float) -> list[float]:
    """Round numbers for a logarithmic axis over this range: 2, 5, 10, 20, ...; more of them where it is short."""
    few: list[float] = []
    for mantissas in ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)):
        decades = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
        ticks = [mantissa * 10.0**decade for decade in decades for mantissa in mantissas]
        ticks = [tick for tick in ticks if least * 0.95 <= tick <= most * 1.05]
        if few and len(ticks) > _MOST_TICKS:
            break
        few = ticks
        if len(few) >= 4:
            break
    return few if len(few) > 1 else list(dict.fromkeys([least, most]))


def _script_text(data: Any) -> str:
    return json.dumps(data).replace("<", "\\u003c")


def _short(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:39]}…"


def left_out(found: Sweep) -> Iterator[str]:
    """What has no point, and why: policies, and budgets of those that have some."""
    for spec, reason in found.left_out.items():
        yield reason if reason.startswith(spec.partition(":")[0]) else f"{spec}: {reason}"
    for line in _lines(found):
        there = {point.budget for point in line}
        missing = [] if None in there else [budget_text(budget) for budget in found.budgets if budget not in there]
        if missing:
            yield f"{line[0].name} at {', '.join(missing)}: the budget is too small for what it protects"


def _said(trace: Trace) -> str:
    of = "" if trace.model is None else f" of {trace.model.name}"
    return (
        f"A trace{of}: {trace.prompt:,} tokens of prompt and {len(trace.tokens) - trace.prompt:,} more. Retained: the "
        "share of the attention paid by the full cache's queries after the prompt that lies on tokens still held when "
        "these queries come, mean over layers and KV heads. 1 MB = 10^6 bytes."
    )


def _told(point: Point) -> str:
    memory = "" if point.nbytes is None else f", {size_text(point.nbytes)}"
    budget = "" if point.budget is None else f", budget {budget_text(point.budget)}"
    name = html.escape(_short(point.name))
    return f"{name}{budget}<br>{point.tokens:,.1f} tokens{memory}<br>{point.retained:.2%} retained"


def _row(point: Point) -> str:
    budget = "" if point.budget is None else budget_text(point.budget)
    memory = "" if point.nbytes is None else size_text(point.nbytes)
    cells = (html.escape(point.name), budget, f"{point.tokens:,.1f}", memory, f"{point.retained:.2%}")
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
