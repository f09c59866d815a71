"""Sweeps: the budgets they name, the figures they give, the page they draw."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from kvwinnow import CompressedCache
from kvwinnow.errors import KvwinnowError, PolicyError, TraceError
from kvwinnow.policies import H2O, POLICIES, SnapKV, WholeBlocks, parse
from kvwinnow.simulation import plot
from kvwinnow.simulation.record import record
from kvwinnow.simulation.render import size_text
from kvwinnow.simulation.retained import retained_mass
from kvwinnow.simulation.run import simulate
from kvwinnow.simulation.sweep import parse_sweep, sweep, with_budget
from kvwinnow.simulation.trace import Trace, demo, demo_rows
from tests.models import tiny_model, tiny_tokens
from tests.running import logits
from tests.simulation.explorer.browser import View, start

SMALL = (
    "full",
    "h2o",
    "snapkv:window=8,kernel=3",
    "keydiff",
    "pyramidkv:window=8,kernel=3",
    "compose:prompt=snapkv(window=8),decode=tova",
)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return record(tiny_model("gemma3", layers=4), tiny_tokens(60)[0], new_tokens=12, vectors=True)


@pytest.mark.parametrize(
    ("text", "budgets"),
    [
        ("budget=64..4096", (64, 128, 256, 512, 1024, 2048, 4096)),
        ("budget=64..64", (64,)),
        ("budget=3..20", (3, 6, 12, 20)),
        (" budget = 5, 0.25 ,5,0.5", (5, 0.25, 0.5)),
    ],
)
def test_budgets_of_a_sweep(text: str, budgets: tuple[int | float, ...]) -> None:
    assert parse_sweep(text) == budgets


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("64..4096", "write budget=64..4096"),
        ("budget=", "write budget=64..4096"),
        ("window=4..8", "write budget=64..4096"),
        ("budget=0..8", "the first is 1 or more"),
        ("budget=9..8", "the last not less"),
        ("budget=1..999999999", "31 budgets, and 24 are served"),
        (
            "budget=64MiB",
            "'64MiB' is a size, and a sweep takes tokens (64) or shares of the prompt (0.25) and no sizes",
        ),
        ("budget=64,2.5 gb", "'2.5 gb' is a size"),
        ("budget=64MiX", "'64MiX' is no budget"),
        ("budget=0", "'0' is no budget"),
        ("budget=1.5", "'1.5' is no budget"),
        ("budget=4,,5", "'' is no budget"),
        ("budget=nan", "'nan' is no budget"),
    ],
)
def test_what_is_no_sweep_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(sentence)):
        parse_sweep(text)


def test_a_policy_gets_its_budget() -> None:
    assert with_budget("h2o", 5) == parse("h2o:budget=5")
    assert with_budget("compose:prompt=snapkv(window=4)", 0.5) == parse("compose:budget=0.5,prompt=snapkv(window=4)")
    assert with_budget("full", 5) == parse("full")
    assert with_budget("blocks:policy=h2o(recent=2000),multiple_of=8", "4096") == WholeBlocks(H2O(4096, recent=2000), 8)
    assert with_budget("blocks", "64MiB") == WholeBlocks(SnapKV("64MiB"))
    for bad, says in (("many", "'many'"), (0, "budget=0"), (None, "None")):
        with pytest.raises(PolicyError, match=says):
            with_budget("blocks", bad)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="given twice, there and as 5"):
        with_budget("blocks:policy=h2o(budget=4)", 5)
    with pytest.raises(PolicyError, match="given twice"):
        with_budget("h2o:budget=4", 5)


def test_figures_are_those_of_the_simulation_and_the_cache(trace: Trace) -> None:
    found = sweep(trace, (24, 0.5), SMALL)
    assert not found.left_out
    assert [(point.name, point.budget) for point in found.points] == [
        ("full", None),
        *((spec, budget) for spec in SMALL[1:] for budget in (24, 0.5)),
    ]
    model = tiny_model("gemma3", layers=4)
    ids = torch.tensor([[int(token) for token in trace.tokens]])
    for point in found.points:
        policy = parse(point.name) if point.budget is None else with_budget(point.name, point.budget)
        simulation = simulate(trace, policy)
        assert point.retained == pytest.approx(retained_mass(trace, simulation.evicted).mean())
        assert point.tokens == simulation.held().sum(2).mean()
        cache = CompressedCache(model, policy)
        logits(model, ids[:, :60], cache)
        for token in range(60, 72):
            logits(model, ids[:, token : token + 1], cache)
        assert point.nbytes == cache.nbytes()


def test_one_head_may_be_looked_at_alone(trace: Trace) -> None:
    (point,) = sweep(trace, (16,), ("h2o",), place=(1, 0)).points
    own = retained_mass(trace, simulate(trace, parse("h2o:budget=16")).evicted)
    assert point.retained == pytest.approx(own[1, 0])
    assert abs(own[1, 0] - own.mean()) > 1e-4


def test_budgets_too_small_are_missing_and_what_the_trace_lacks_is_told() -> None:
    found = sweep(demo_rows(), (3, 8, 64))
    assert [point.budget for point in found.points if point.name == "hybrid"] == [8, 64]
    assert [point.budget for point in found.points if point.name == "snapkv"] == [64]
    assert set(found.left_out) == {"knorm", "keydiff"}
    assert "--vectors" in found.left_out["keydiff"]
    assert {point.name for point in found.points} == set(POLICIES) - {"knorm", "keydiff"}
    assert all(point.nbytes is None for point in found.points)
    hidden = sweep(demo(), (8,), ("snapkv",))
    assert not hidden.points
    assert "under the 36 tokens" in hidden.left_out["snapkv"]


def test_progress_is_told() -> None:
    told: list[tuple[int, int, str]] = []
    sweep(demo_rows(), (4, 8), ("full", "h2o"), progress=lambda *now: told.append(now))
    assert told == [(0, 3, "full"), (1, 3, "h2o, budget 4"), (2, 3, "h2o, budget 8")]


def test_a_trace_without_later_queries_and_a_wrong_policy_are_refused() -> None:
    from dataclasses import replace

    with pytest.raises(TraceError, match="no query comes after"):
        sweep(replace(demo_rows(), prompt=16), (4,))
    with pytest.raises(KvwinnowError, match="unknown"):
        sweep(demo_rows(), (4,), ("h3o",))


def test_the_page_needs_no_network_and_holds_the_figures(trace: Trace, tmp_path: Path) -> None:
    found = sweep(trace, (16, 32), SMALL)
    plot.write(found, trace, tmp_path / "sweep.html")
    page = (tmp_path / "sweep.html").read_text()
    assert re.search(r'<(script|link|img)[^>]+(src|href)="?(https?:)?//', page) is None
    assert len(page) < 6e6
    for point in found.points:
        assert f"<td>{point.retained:.2%}</td>" in page
    assert "60 tokens of prompt and 12 more" in page
    assert '"displayModeBar": false' in page


def test_the_page_tells_what_was_left_out_and_why(trace: Trace, tmp_path: Path) -> None:
    rows = demo_rows()
    plot.write(sweep(rows, (8, 64), ("snapkv", "keydiff", "h2o")), rows, tmp_path / "sweep.html")
    page = (tmp_path / "sweep.html").read_text()
    assert re.search(r"<li>keydiff [^<]*--vectors", page)
    assert "<li>snapkv at 8: the budget is too small for what it protects.</li>" in page
    assert "<li>h2o" not in page
    plot.write(sweep(trace, (64,), ("h2o",)), trace, tmp_path / "sweep.html")
    assert "Left out" not in (tmp_path / "sweep.html").read_text()


@pytest.mark.parametrize(
    ("least", "most", "ticks"),
    [
        (3e6, 137e6, [5e6, 10e6, 20e6, 50e6, 100e6]),
        (64, 4096, [100, 200, 500, 1000, 2000]),
        (3.1, 8.2, [3, 4, 5, 6, 7, 8]),
        (1, 1e9, [10.0**decade for decade in range(10)]),
        (7.1, 7.2, [7.1, 7.2]),
        (6, 6, [6]),
    ],
)
def test_ticks_are_round_numbers_about_the_range(least: float, most: float, ticks: list[float]) -> None:
    assert plot.log_ticks(least, most) == pytest.approx(ticks)


def test_lines_side_by_side_differ_in_dash_mark_and_order() -> None:
    for place in range(11):
        one, other = plot._drawn(place), plot._drawn(place + 1)
        assert one["line"]["dash"] != other["line"]["dash"]
        assert one["marker"]["symbol"] != other["marker"]["symbol"]
        assert one["zorder"] != other["zorder"]


def test_the_page_in_a_browser(tmp_path: Path, trace: Trace) -> None:
    long = "compose:prompt=snapkv(window=8,kernel=3,pool=avg),decode=hybrid(heavy_ratio=0.25,normalize=age)"
    plot.write(sweep(trace, (16, 32, 64), ("full", "h2o", "hybrid", long)), trace, tmp_path / "sweep.html")
    driver = start()
    try:
        view = View(driver)
        view.open(tmp_path / "sweep.html")
        ground = "return getComputedStyle(document.body).backgroundColor"
        colours = "return document.getElementById('plot').data.map((line) => line.marker.color)"
        light = view.js(ground), view.js(colours)
        ticks = "return [...document.querySelectorAll('#plot .xtick')].map((tick) => tick.textContent)"
        assert view.js(ticks)
        assert all(re.fullmatch(r"[\d.]+ [kM]?B", tick) for tick in view.js(ticks))
        view.js("document.querySelector('[value=tokens]').click()")
        view.settle()
        assert all(re.fullmatch(r"[\d.,]+", tick) for tick in view.js(ticks))
        view.theme("dark")
        view.size(390, 800, mobile=True)
        driver.execute_async_script("setTimeout(arguments[0], 500)")
        assert view.js(ground) != light[0]
        assert all(one != other for one, other in zip(view.js(colours), light[1], strict=True))
        assert view.js("return document.documentElement.scrollWidth") <= 390
        assert view.js("return document.querySelector('.box').scrollWidth") > 390
        assert not view.many(".modebar-btn, .modebar a")
        box = "return document.querySelector('#plot {}').getBoundingClientRect().{}"
        assert view.js(box.format(".legend", "top")) >= view.js(box.format(".xtitle", "bottom"))
        assert view.js(box.format(".legend", "right")) <= 390
        assert view.errors() == []
    finally:
        driver.quit()


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_600, "1 MB"), (1_234_000, "1.23 MB"), (137e9, "137 GB")],
)
def test_sizes_are_in_powers_of_1000(nbytes: float, text: str) -> None:
    assert size_text(int(nbytes)) == text


def test_memory_falls_where_retained_attention_falls(trace: Trace) -> None:
    points = sweep(trace, (8, 16, 32, 64), ("h2o",)).points
    assert np.all(np.diff([point.nbytes for point in points]) > 0)
    assert np.all(np.diff([point.retained for point in points]) > 0)
