"""The page does in a real browser what it promises: compared with what was collected, token by token."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from kvwinnow.simulation.explorer.exploration import NEVER, Exploration, Run
from kvwinnow.simulation.explorer.page import write
from tests.simulation.explorer.browser import CHART, TOKENS, View
from tests.simulation.explorer.conftest import NASTY, Made

COME = "[...document.querySelectorAll('#answer .t')].filter((node) => !node.hidden)"
"""The answer's tokens that have come."""
ALL = "all but the full cache"
PROMPT = len(NASTY.encode("utf-8"))
PICTURES = str.maketrans({code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {127: "\u2421"})


def run_of(made: Made, name: str) -> Run:
    return next(run for run in made.exploration.runs if run.policy.startswith(name))


def expected(made: Made, names: list[str], *, step: int, layer: object = "all", head: object = "all") -> list[float]:
    """The share of KV heads that hold each token of the prompt, the mean over the policies."""
    rows = slice(None) if layer == "all" else slice(int(str(layer)), int(str(layer)) + 1)
    heads = slice(None) if head == "all" else slice(int(str(head)), int(str(head)) + 1)
    shares = []
    for name in names:
        run = run_of(made, name)
        kept = run.kept(min(step, run.steps))[:, :, :PROMPT]
        shares.append(kept[rows, heads].mean((0, 1)))
    mean: list[float] = np.mean(shares, axis=0).tolist()
    return mean


def token_index(exploration: Exploration, text: str) -> int:
    return exploration.tokens.index(text)


def test_the_text_is_there_token_by_token(view: View, made: Made) -> None:
    found = view.js("return [...document.querySelectorAll(arguments[0])].map((n) => n.textContent)", TOKENS)
    assert found == [token.translate(PICTURES) for token in made.exploration.tokens]
    assert "".join(found) == NASTY.translate(PICTURES)
    assert view.one("#text").is_displayed()
    assert "tiny <model>: 4 layers of 2 KV heads, stored in float32." in view.one("header").text


def test_markup_in_the_prompt_stays_text(view: View) -> None:
    assert view.js("return window.hacked") is None
    assert view.many("#text script, #text > b, #text > .t > :not(b)") == []
    assert view.js("return document.body.querySelectorAll('script:not([type])').length") == 1


def test_newlines_break_lines_and_are_shown(view: View, made: Made) -> None:
    token = token_index(made.exploration, "\n")
    mark = view.js(
        "return getComputedStyle(document.querySelectorAll(arguments[0])[arguments[1]].firstChild, '::before').content",
        TOKENS,
        token,
    )
    assert "↵" in mark
    first, later = (view.many(TOKENS)[index].rect["y"] for index in (0, token + 2))
    assert later > first + 20


def test_at_first_the_first_policy_is_shown_as_the_prompt_ended(view: View, made: Made) -> None:
    assert view.shares() == pytest.approx(expected(made, ["snapkv"], step=0))
    held = sum(share > 0 for share in view.shares())
    assert view.text("#told") == (
        f"The prompt has just ended: {held} of {PROMPT} tokens are held by at least one of 8 KV heads."
    )


@pytest.mark.parametrize("step", [0, 4, 7])
def test_every_choice_shades_what_its_heads_hold(view: View, made: Made, step: int) -> None:
    names = ["snapkv", "h2o", "streamingllm", "knorm", "compose"]
    view.choose(step=step)
    for name in ("full", *names):
        view.choose(policy=run_of(made, name).label)
        assert view.shares() == pytest.approx(expected(made, [name], step=step)), name
    for layer, head in (("all", 1), (2, "all"), (3, 0)):
        view.choose(policy="h2o:budget=40", layer=layer, head=head)
        assert view.shares() == pytest.approx(expected(made, ["h2o"], step=step, layer=layer, head=head))
        view.choose(policy=ALL)
        assert view.shares() == pytest.approx(expected(made, names, step=step, layer=layer, head=head))


def test_shades_are_really_painted(view: View, made: Made) -> None:
    view.choose(policy="h2o:budget=40", layer=1, head=0)
    kept = run_of(made, "h2o").kept(0)[1, 0]
    script = "return getComputedStyle(document.querySelectorAll(arguments[0])[arguments[1]]).backgroundColor"
    some, none = int(np.flatnonzero(kept)[0]), int(np.flatnonzero(~kept[:PROMPT])[0])
    assert view.js(script, TOKENS, some) == "rgba(240, 168, 32, 0.92)"
    assert view.js(script, TOKENS, none) == "rgba(240, 168, 32, 0)"


def test_the_slider_evicts_and_the_answer_comes(view: View, made: Made) -> None:
    run = run_of(made, "streamingllm")
    view.choose(policy=run.label)
    slider = view.one("#step")
    for step in range(1, run.steps + 1):
        slider.send_keys(Keys.ARROW_RIGHT)
        view.settle()
        assert view.text("#now") == f"{step} of {run.steps}"
        struck = view.js("return explorer.reader.nodes.filter((n) => n.classList.contains('lost')).map((n) => n.index)")
        assert struck == np.flatnonzero((run.evicted == step).any((0, 1))).tolist()
        assert len(struck) == 1
        shown = view.js(f"return {COME}.map((n) => n.textContent)")
        assert shown == [text.translate(PICTURES) for text in run.answer[: step + 1]]
        assert "1 token is evicted somewhere:" in view.text("#told")
    slider.send_keys(Keys.HOME)
    view.settle()
    assert view.text("#now") == f"0 of {run.steps}"
    assert view.many("#text .lost") == []


def test_generated_tokens_are_shaded_once_they_are_taken_in(view: View, made: Made) -> None:
    run = run_of(made, "h2o")
    view.choose(policy=run.label, step=5)
    kept = run.kept(5)[:, :, PROMPT : PROMPT + 5].mean((0, 1))
    script = f"return {COME}.map((n) => Number(n.style.getPropertyValue('--kept')))"
    assert view.js(script) == pytest.approx([*kept, 0.0])
    assert [node.text for node in view.many("#answer .t.next")] == [run.answer[5].translate(PICTURES)]


def test_the_button_plays_the_steps(view: View, made: Made) -> None:
    run = run_of(made, "h2o")
    view.one("#play").click()
    assert view.one("#play").accessible_name == "Pause"
    view.driver.set_script_timeout(20)
    view.driver.execute_async_script(
        "const [steps, done] = arguments; "
        "const wait = () => explorer.state.step >= steps ? done() : setTimeout(wait, 50); wait();",
        run.steps,
    )
    view.driver.execute_async_script("setTimeout(arguments[0], 700)")
    assert view.one("#play").accessible_name == "Play the decode steps"
    assert view.text("#now") == f"{run.steps} of {run.steps}"


# -- the tooltip -----------------------------------------------------------------------------------


def test_the_tooltip_of_a_head_tells_its_score_and_its_end(view: View, made: Made) -> None:
    run = run_of(made, "h2o")
    view.choose(policy=run.label, layer=2, head=1, step=6)
    chosen = run.evicted[2, 1]
    kinds = {
        "kept": np.flatnonzero((chosen == NEVER) & np.isfinite(run.scores[2, 1])),
        "at the prompt": np.flatnonzero(chosen == 0),
        "later": np.flatnonzero((chosen > 0) & (chosen <= 6)),
    }
    for kind, tokens in kinds.items():
        index = next(int(t) for t in tokens if t < PROMPT and made.exploration.tokens[t].isalnum())
        told = view.hover(TOKENS, index).splitlines()
        assert told[0] == made.exploration.tokens[index]
        assert told[1] == f"position {index} of the prompt's {PROMPT}"
        facts = dict(zip(told[2::2], told[3::2], strict=True))
        assert facts["kept"] == ("yes" if kind == "kept" else "no")
        assert float(facts["score"]) == pytest.approx(float(run.scores[2, 1, index]), rel=2e-3)
        if kind == "at the prompt":
            assert facts["evicted"] == "before the answer"
        if kind == "later":
            assert facts["evicted"] == f"at step {chosen[index]}"


def test_the_tooltip_of_all_heads_tells_where(view: View, made: Made) -> None:
    run = run_of(made, "snapkv")
    kept = run.kept(0)
    counts = kept[:, :, :PROMPT].sum((0, 1))
    index = next(i for i in range(PROMPT) if 1 < counts[i] < 7 and made.exploration.tokens[i].isalnum())
    told = view.hover(TOKENS, index).splitlines()
    facts = dict(zip(told[2::2], told[3::2], strict=True))
    assert facts["kept"] == f"by {counts[index]} of 8 KV heads"
    assert facts["evicted"] == f"before the answer by {8 - counts[index]}"
    held: dict[int, list[int]] = {}
    for group in facts["layer: heads"].split(" · "):
        layers, heads = group.split(": ")
        first, _, last = layers.partition("\N{EN DASH}")
        for layer in range(int(first), int(last or first) + 1):
            held[layer] = [0, 1] if heads == "all" else [int(head) for head in heads.split()]
    assert held == {
        layer: np.flatnonzero(kept[layer, :, index]).tolist() for layer in range(4) if kept[layer, :, index].any()
    }
    grid = view.js("return [...document.querySelectorAll('#tip rect')].map((r) => r.classList.contains('kept'))")
    assert grid == kept[:, :, index].flatten().tolist()
    scores = np.sort(run.scores[:, :, index].flatten())
    numbers = [float(word) for word in facts["score"].replace(",", "").split() if word[0].isdigit()]
    assert numbers == pytest.approx([float(scores[3]), float(scores[0]), float(scores[-1])], rel=2e-3)


def test_the_tooltip_of_several_policies_names_each(view: View, made: Made) -> None:
    view.choose(policy=ALL)
    told = view.hover(TOKENS, 0).splitlines()
    facts = dict(zip(told[2::2], told[3::2], strict=True))
    for run in made.exploration.runs[1:]:
        assert facts[run.label] == f"by {run.kept(0)[:, :, 0].sum()} of 8 KV heads"


def test_protected_and_unscored_tokens_say_so(view: View) -> None:
    assert "protected, whatever its score" in view.hover(TOKENS, 0)
    view.choose(policy="full")
    assert "none given" in view.hover(TOKENS, 0)


def test_spaces_newlines_and_parts_of_characters_are_told(view: View, made: Made) -> None:
    tokens = made.exploration.tokens
    assert view.hover(TOKENS, token_index(made.exploration, "\n")).startswith("↵")
    view.choose(step=0)
    smile = token_index(made.exploration, "😀")
    assert tokens[smile - 3 : smile] == ("", "", "")
    assert view.hover(TOKENS, smile).startswith("😀\n")
    view.one("#text").find_elements(By.CSS_SELECTOR, ".t")[smile - 1].click()
    view.settle()
    assert view.one("#tip").text.startswith("😀 (a part of this character)")


def test_the_tooltip_goes_when_the_pointer_does(view: View) -> None:
    view.hover(TOKENS, 3)
    assert view.one("#tip").is_displayed()
    view.hover("h1", 0)
    assert not view.one("#tip").is_displayed()


# -- keyboard --------------------------------------------------------------------------------------


def focused(view: View) -> int | None:
    index: int | None = view.js("return document.activeElement.index ?? null")
    return index


def test_the_keyboard_reaches_everything(view: View) -> None:
    view.js("document.body.focus()")
    reached = []
    for _ in range(14):
        view.press(Keys.TAB)
        reached.append(
            view.js(
                "const e = document.activeElement;"
                "return e.id || (e.index === undefined ? e.closest('[id]')?.id : 'token')"
            )
        )
    for name in ("policy", "layer", "head", "play", "step", "token", "held-map", "retained-map"):
        assert name in reached
    assert reached.index("token") > reached.index("step")
    for name in ("#policy", "#layer", "#head", "#step", "#play", "#text"):
        assert view.one(name).accessible_name


def test_arrow_keys_walk_from_token_to_token(view: View, made: Made) -> None:
    view.many(TOKENS)[0].click()
    view.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert focused(view) == 3
    assert view.one("#tip").text.splitlines()[0] == made.exploration.tokens[3]
    assert view.js("return document.activeElement.getAttribute('aria-describedby')") == "tip"
    assert view.js("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    view.press(Keys.ARROW_LEFT)
    assert focused(view) == 2
    view.press(Keys.END)
    assert focused(view) == PROMPT  # the token that the model chose next
    view.press(Keys.HOME)
    assert focused(view) == 0
    view.press(Keys.ARROW_LEFT)
    assert focused(view) == 0
    view.press(Keys.PAGE_DOWN)
    assert focused(view) == 50
    view.press(Keys.ESCAPE)
    assert not view.one("#tip").is_displayed()
    # One token alone can be reached by Tab.
    assert len(view.many("#text [tabindex]")) == 1


def test_up_and_down_go_to_the_line_above_and_below(view: View, made: Made) -> None:
    view.size(1280, 900)  # so that nothing need be scrolled
    view.many(TOKENS)[token_index(made.exploration, "W")].click()
    first = view.js("return document.activeElement.getBoundingClientRect().top")
    view.press(Keys.ARROW_DOWN)
    assert view.js("return document.activeElement.getBoundingClientRect().top") > first + 10
    view.press(Keys.ARROW_UP)
    assert focused(view) == 0


def test_a_token_that_is_gone_with_its_step_gives_the_focus_away(view: View, made: Made) -> None:
    view.choose(policy="h2o:budget=40", step=6)
    view.many(TOKENS)[0].click()
    view.press(Keys.END)
    assert focused(view) == PROMPT + 6
    view.choose(step=2)
    assert focused(view) == PROMPT + 2


# -- figures ---------------------------------------------------------------------------------------


def test_the_maps_tell_budget_held_and_retained(view: View, made: Made) -> None:
    run = run_of(made, "knorm")
    view.choose(policy=run.label, step=3)
    texts = view.js("return explorer.figures.held.texts")
    held = run.kept(3).sum(-1)
    for layer in range(4):
        for head in range(2):
            assert texts[layer][head] == f"Layer {layer}, head {head}: {held[layer, head]} tokens (budget 48)"
    assert run.retained is not None
    shares = view.js("return explorer.figures.retained.values")
    assert np.array(shares) == pytest.approx(run.retained, abs=1e-4)
    painted = [float(cell.get_attribute("fill-opacity")) for cell in view.many("#retained-map .cell")]
    assert painted == pytest.approx(run.retained.flatten().tolist(), abs=1e-4)
    view.one("summary").click()
    view.settle()
    row = [cell.text for cell in view.many("#map-table tbody tr")[2].find_elements(By.TAG_NAME, "td")]
    assert row[:4] == ["2", "48", str(held[2, 0]), str(held[2, 1])]
    assert [float(cell.rstrip(" %")) for cell in row[4:]] == pytest.approx((100 * run.retained[2]).tolist(), abs=0.06)


def test_a_field_of_the_map_chooses_its_layer_and_head(view: View) -> None:
    cell = view.one('#held-map [data-layer="2"][data-head="1"]')
    cell.click()
    view.settle()
    assert (view.one("#layer").get_property("value"), view.one("#head").get_property("value")) == ("2", "1")
    view.js("document.querySelector('#retained-map svg').focus()")
    view.press(Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    assert view.text("#retained-map .readout").startswith("Layer 1, head 1: ")
    view.press(Keys.ENTER)
    assert (view.one("#layer").get_property("value"), view.one("#head").get_property("value")) == ("1", "1")


@pytest.mark.parametrize("step", [0, 5])
def test_memory_is_told_for_every_policy(view: View, made: Made, step: int) -> None:
    view.choose(step=step)
    told = view.text("#memory .readout")
    assert told.startswith(f"{PROMPT + step} tokens: ")
    for run in made.exploration.runs:
        assert f"{run.label} {round(run.nbytes[step] / 2**20, 2):g} MiB" in told


def of_kind(traces: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [trace for trace in traces if trace["meta"] == kind]


def marks(view: View) -> list[dict[str, Any]]:
    """Where the chart marks the present step, one mark for each policy."""
    found: list[dict[str, Any]] = view.js(f"return {CHART}.layout.shapes.filter((shape) => shape.type === 'circle')")
    return found


def test_the_chart_has_what_was_measured_and_what_was_foretold(view: View, made: Made) -> None:
    traces = view.chart()
    runs = made.exploration.runs
    for trace, run in zip(of_kind(traces, "measured"), runs, strict=True):
        assert trace["x"] == list(range(PROMPT, PROMPT + run.steps + 1))
        assert np.array(trace["y"]) * 2**20 == pytest.approx(run.nbytes, rel=1e-12)
        assert trace["name"] == run.label.split(":")[0]
    for trace, run in zip(of_kind(traces, "foretold"), runs, strict=True):
        tokens, nbytes = zip(*run.foretold, strict=True)
        assert trace["x"] == list(tokens)
        assert np.array(trace["y"]) * 2**20 == pytest.approx(np.array(nbytes), rel=1e-12)
    drawn = view.js(
        f"return [...{CHART}.querySelectorAll('.js-line')].filter((line) => line.getBBox().width > 9).length"
    )
    assert drawn == 2 * len(runs)
    assert view.js(f"return {CHART}.getAttribute('aria-label')").startswith("Chart of memory against tokens. ")


def test_the_chart_marks_the_step(view: View, made: Made) -> None:
    view.chart()
    begin = view.js(f"return {CHART}.layout.xaxis2.domain[0]")
    bottom, top = view.js(f"return {CHART}.layout.yaxis.range")
    assert bottom == 0
    for step in (0, 5):
        view.choose(step=step)
        for mark, run in zip(marks(view), made.exploration.runs, strict=True):
            assert mark["yanchor"] * top == pytest.approx(run.nbytes[step] / 2**20)
            assert mark["xanchor"] == pytest.approx(begin + (1 - begin) * step / run.steps)


def test_a_click_at_the_chart_chooses_the_step_and_hovering_tells(view: View, made: Made) -> None:
    view.chart()
    spans = view.js(
        f"return [...{CHART}.querySelectorAll('.nsewdrag')].map((n) => {{"
        " const b = n.getBoundingClientRect(); return [b.left, b.width, b.top + b.height / 2]; })"
    )
    before, after = sorted(spans)
    view.point_at(after[0] + after[1] * 3 / 7, after[2])
    told = view.text("#memory .hoverlayer")
    assert told.startswith(f"{PROMPT + 3} tokens")
    for run in made.exploration.runs:
        assert f"{run.label.split(':')[0]}: {round(run.nbytes[3] / 2**20, 2):g} MiB" in told
    view.point_at(after[0] + after[1] * 3 / 7, after[2], click=True)
    assert view.text("#now") == "3 of 7"
    view.point_at(before[0] + before[1] / 2, before[2], click=True)  # where only prompts are foretold
    assert view.text("#now") == "3 of 7"
    assert f"{made.exploration.runs[0].label}: " in view.text("#memory .hoverlayer")


def test_the_chart_has_a_logarithmic_scale(view: View, made: Made) -> None:
    view.chart()
    view.one("#memory input").click()
    view.settle()
    least, most = view.js(f"return {CHART}.layout.yaxis.range")
    everything = [run.nbytes / 2**20 for run in made.exploration.runs]
    assert view.js(f"return {CHART}.layout.yaxis.type") == "log"
    assert 10**least < min(map(min, everything)) < max(map(max, everything)) < 10**most
    for mark, run in zip(marks(view), made.exploration.runs, strict=True):
        assert 10 ** (least + mark["yanchor"] * (most - least)) == pytest.approx(run.nbytes[0] / 2**20)


def test_the_chart_takes_the_colours_of_the_theme(view: View) -> None:
    view.chart()
    colours = f"return {CHART}.data.map((trace) => trace.line.color)"
    painted = f"return getComputedStyle({CHART}.querySelectorAll('.js-line')[0]).stroke"
    light = view.js(colours), view.js(painted)
    view.theme("dark")
    view.settle()
    view.settle()
    dark = view.js(colours), view.js(painted)
    assert dark[0][:6] == [
        view.js("return getComputedStyle(document.documentElement).getPropertyValue(arguments[0])", f"--run-{number}")
        for number in range(6)
    ]
    assert all(one != other for one, other in zip(light[0], dark[0], strict=True))
    assert dark[1] == "rgb(154, 164, 176)"
    assert light[1] == "rgb(91, 100, 112)"


def test_the_chart_waits_for_the_page_and_until_it_is_in_sight(browser: View, made: Made) -> None:
    browser.open(made.path, 390, 500)
    browser.driver.execute_async_script("setTimeout(arguments[0], 500)")
    assert browser.js("return typeof Plotly") == "undefined"
    assert browser.text("#memory .readout").startswith(f"{PROMPT} tokens: ")
    height = browser.one("#memory").rect["height"]
    browser.chart()
    assert browser.one("#memory").rect["height"] == height
    painted, drawn, chart = (
        browser.js("return performance.getEntriesByName(arguments[0])[0].startTime", name)
        for name in ("first-contentful-paint", "drawn", "chart")
    )
    # A frame's time is that at which it was shown, on a busy machine after the script that waited for it went on.
    assert max(painted, drawn) < chart
    assert browser.errors() == []


def test_the_chart_takes_no_stop_of_the_keyboard(view: View) -> None:
    view.chart()
    stops = view.many("#memory a, #memory button, #memory input, #memory [tabindex]")
    assert [stop.tag_name for stop in stops] == ["input"]
    assert stops[0].accessible_name == "logarithmic scale"


def test_the_answers_stand_side_by_side(view: View, made: Made) -> None:
    cards = view.many("article")
    for card, run in zip(cards, made.exploration.runs, strict=True):
        assert card.find_element(By.TAG_NAME, "h3").text == run.label
        quote = view.js("return arguments[0].querySelector('blockquote').textContent", card)
        assert quote == "".join(run.answer).translate(PICTURES)
        facts = card.find_element(By.CLASS_NAME, "figures").text
        held = run.kept(0).sum(-1)
        assert f"{held.max()} of {PROMPT} tokens a KV head" in facts
        assert f"{round(run.nbytes[0] / 2**20, 2):g} MiB" in facts
        for note in run.notes:
            assert note in card.text
    sizes = [(10, 17), (17, 10), (100, 101), (1, 8)]
    said = ["1.7 times smaller than", "1.7 times larger than", "as large as", "8.0 times smaller than"]
    for size, words in zip(sizes, said, strict=True):
        assert view.js("return explorer.compared(arguments[0], arguments[1])", *size) == f"{words} the full cache"


# -- themes and sizes ------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    parts = [float(x) / 255 for x in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def over(top: str, ground: str) -> str:
    """A translucent colour on an opaque one."""
    *parts, alpha = (float(x) for x in top[top.index("(") + 1 : -1].split(","))
    below = (float(x) for x in ground[ground.index("(") + 1 : -1].split(","))
    return f"rgb({','.join(str(a * alpha + b * (1 - alpha)) for a, b in zip(parts, below, strict=False))})"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(view: View, theme: str) -> None:
    view.theme(theme)
    view.choose(policy="streamingllm:budget=0.25", step=3)
    style = "return getComputedStyle(arguments[0])[arguments[1]]"
    ground = view.js(style, view.one("section"), "backgroundColor")
    assert (luminance(ground) > 0.5) == (theme == "light")
    for selector in ("#text .t:not(.none):not(.lost)", "#text .t.none", "#text .t.lost"):
        node = view.one(selector)
        paint = view.js(style, node, "backgroundColor")
        behind = ground if paint.startswith("rgb(") else over(paint, ground)
        assert contrast(view.js(style, node, "color"), behind) >= 4.5, selector
    for selector in ("h1", ".hint", ".figures", "#told", ".readout"):
        assert contrast(view.js(style, view.one(selector), "color"), ground) >= 4.5, selector
    view.chart()
    for selector in ("#memory .plot text", "#held-map text"):
        assert contrast(view.js(style, view.one(selector), "fill"), ground) >= 4.5, selector


def test_a_phone_needs_no_sideways_scrolling(view: View) -> None:
    view.size(390, 844, mobile=True)
    view.settle()
    view.settle()
    view.one("summary").click()
    view.settle()
    assert view.js("return [document.documentElement.scrollWidth, document.body.scrollWidth]") == [390, 390]
    view.js("explorer.reader.moveTo(60, {focus: true})")
    view.settle()
    tip, token = (
        view.one("#tip").rect,
        view.js("const r = document.activeElement.getBoundingClientRect(); return [r.top, r.bottom]"),
    )
    assert view.one("#tip").is_displayed()
    box = view.js(
        "const r = document.getElementById('tip').getBoundingClientRect(); return [r.left, r.right, r.top, r.bottom]"
    )
    assert box[0] >= 0
    assert box[1] <= 390
    assert box[3] <= 844
    assert token[1] <= box[2], tip
    for name in ("#policy", "#layer", "#head", "#step"):
        assert view.one(name).rect["height"] >= 16


# -- other pages -----------------------------------------------------------------------------------


def test_layers_with_a_window_of_their_own_are_marked(browser: View, sliding: Made) -> None:
    browser.open(sliding.path)
    options = [option.text for option in browser.many("#layer option")]
    assert options == ["all that follow the policy", "0 (window 12)", "1", "2 (window 12)", "3"]
    run = sliding.exploration.runs[1]
    assert browser.shares() == pytest.approx(run.kept(0)[[1, 3], :, :PROMPT].mean((0, 1)).tolist())
    browser.choose(layer=0)
    assert browser.shares() == pytest.approx(run.kept(0)[0, :, :PROMPT].mean(0).tolist())
    assert browser.js("return explorer.figures.held.texts[2][1]") == (
        "Layer 2, a window of its own, head 1: 11 tokens (budget 11)"
    )
    assert browser.js("return explorer.figures.retained.values[0]") == [None, None]
    assert "2 layers keep a window of their own" in browser.text("#map-told")
    assert browser.errors() == []


def test_an_answer_that_ended_early_stays_as_it_ended(browser: View, made: Made, tmp_path: Path) -> None:
    run, last = run_of(made, "h2o"), 4
    ended = dataclasses.replace(
        run,
        evicted=np.where(run.evicted > last, NEVER, run.evicted)[:, :, : PROMPT + last].astype(np.uint16),
        scores=run.scores[:, :, : PROMPT + last],
        nbytes=run.nbytes[: last + 1],
        answer=run.answer[: last + 1],
    )
    others = [other for other in made.exploration.runs if other is not run]
    exploration = dataclasses.replace(made.exploration, runs=(*others, ended))
    write(tmp_path / "page.html", exploration)
    browser.open(tmp_path / "page.html")
    browser.choose(policy=run.label, step=7)
    assert browser.shares() == pytest.approx(ended.kept(last)[:, :, :PROMPT].mean((0, 1)).tolist())
    assert browser.text("#told").startswith(f"The answer ended at step {last}: ")
    assert browser.js(f"return {COME}.length") == last + 1
    assert browser.many("#text .lost") == []
    assert f"h2o:budget=40 {round(run.nbytes[last] / 2**20, 2):g} MiB" in browser.text("#memory .readout")
    browser.choose(policy=ALL)
    shares = [one.kept(min(7, one.steps))[:, :, :PROMPT].mean((0, 1)) for one in exploration.runs[1:]]
    assert browser.shares() == pytest.approx(np.mean(shares, axis=0).tolist())
    assert browser.errors() == []


def test_the_full_cache_alone_and_one_token(browser: View, lone: Made) -> None:
    browser.open(lone.path)
    assert [option.text for option in browser.many("#policy option")] == ["full"]
    assert browser.shares() == [1.0] * PROMPT
    assert not browser.one("#step").is_enabled()
    assert browser.text("#now") == "0 of 0"
    assert len(browser.many("#answer .t")) == 1
    traces = browser.chart()
    assert [len(trace["x"]) for trace in of_kind(traces, "measured")] == [1]
    assert len(marks(browser)) == 1
    assert browser.errors() == []
