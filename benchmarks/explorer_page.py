"""Size of an explorer page, and how long a browser takes to open it and to move its slider.

The page is made with the default model, its three default policies and the full cache, of a prompt of that many
tokens. It is then opened anew several times in headless Chromium. Milliseconds from the start of the navigation:

  text      the text is painted (the browser's own "first contentful paint")
  drawn     shading, strips, maps and answers are painted too, and everything can be used
  chart     the memory chart is drawn, whose library is started after that, once the chart is in sight: the page is
            scrolled there as soon as all else is drawn; and how long nothing else can be done meanwhile (busy)

and the time from a move of the slider until the next frame is painted, for every step.

    python benchmarks/explorer_page.py
    python benchmarks/explorer_page.py --text emma.txt --tokens 4000 --page page.html
    python benchmarks/explorer_page.py --page page.html --measure
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import machine
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

QUESTION = "Who is the text about, and what is she like?"
OPENED = """
const at = (name) => performance.getEntriesByName(name)[0].startTime;
return [at("first-contentful-paint"), at("drawn"), at("chart"), longest];
"""
WATCH = """
window.longest = 0;
const note = (list) => list.getEntries().forEach((task) => {
  if (performance.getEntriesByName("drawn").length) longest = Math.max(longest, task.duration);
});
new PerformanceObserver(note).observe({ type: "longtask" });
"""
TO_CHART = "document.getElementById('memory').scrollIntoView({ block: 'center' })"
MOVED = """
const done = arguments[0], slider = document.getElementById("step"), taken = [];
const next = () => {
  if (Number(slider.value) >= Number(slider.max)) return done(taken);
  const start = performance.now();
  slider.value = Number(slider.value) + 1;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  requestAnimationFrame(() => setTimeout(() => { taken.push(performance.now() - start); next(); }));
};
next();
"""


@dataclass(frozen=True)
class Figures:
    """What was measured, in bytes and milliseconds."""

    size: int
    text: list[float]
    drawn: list[float]
    chart: list[float]
    busy: list[float]
    moved: list[float]


def make(page: Path, text: str, tokens: int, new: int) -> None:
    from kvwinnow.evaluation.generation import encode
    from kvwinnow.integrations.default_model import NAME
    from kvwinnow.integrations.loading import load
    from kvwinnow.policies import parse
    from kvwinnow.simulation.explorer.collect import DEFAULT_POLICIES, explore
    from kvwinnow.simulation.explorer.page import write

    model, tokenizer = load(device="cpu", progress=machine.progress)
    low, high = 0, len(text)  # characters: as many as give no more tokens than asked for
    while low < high:
        middle = (low + high + 1) // 2
        fits = encode(tokenizer, f"{text[:middle]}\n\n{QUESTION}").shape[1] <= tokens
        low, high = (middle, high) if fits else (low, middle - 1)
    ids = encode(tokenizer, f"{text[:low]}\n\n{QUESTION}")
    policies = [parse(policy) for policy in DEFAULT_POLICIES]
    made = explore(model, tokenizer, ids, policies, name=NAME, new_tokens=new, progress=machine.progress)
    write(page, made)


def _is_drawn(window: webdriver.Chrome) -> bool:
    return bool(window.execute_script("return document.documentElement.dataset.ready"))


def _has_chart(window: webdriver.Chrome) -> bool:
    return bool(window.execute_script("return performance.getEntriesByName('chart').length"))


def measure(page: Path, runs: int) -> Figures:
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        raise SystemExit("chromium and chromedriver are needed on PATH; on Debian: apt-get install chromium-driver")
    opened, moved = [], []
    for _ in range(runs):
        options = webdriver.ChromeOptions()
        options.binary_location = browser
        for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,1000"):
            options.add_argument(flag)
        with webdriver.Chrome(options=options, service=Service(driver)) as window:
            window.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": WATCH})
            window.get(page.resolve().as_uri())
            WebDriverWait(window, 60).until(_is_drawn)
            window.execute_script(TO_CHART)
            WebDriverWait(window, 60).until(_has_chart)
            opened.append(window.execute_script(OPENED))
            moved += window.execute_async_script(MOVED)
    text, drawn, chart, busy = (list(times) for times in zip(*opened, strict=True))
    return Figures(page.stat().st_size, text, drawn, chart, busy, moved)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text; left out: Python's own help")
    parser.add_argument("--tokens", type=machine.whole, default=4000, help="of the prompt, at most (default 4000)")
    parser.add_argument("--new", type=machine.whole, default=64, help="tokens of the answers (default 64)")
    parser.add_argument("--page", type=Path, metavar="FILE", help="keep the page there")
    parser.add_argument("--measure", action="store_true", help="the page is there already: measure it alone")
    parser.add_argument(
        "--runs", type=machine.whole, default=7, help="times it is opened, each in a new browser (default 7)"
    )
    machine.add_json_option(parser)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    told = machine.facts()
    with tempfile.TemporaryDirectory() as folder:
        page = given.page or Path(folder) / "page.html"
        if not given.measure:
            import texts

            text = texts.help_text() if given.text is None else given.text.read_text(encoding="utf-8")
            make(page, text, given.tokens, given.new)
        found = measure(page, given.runs)
    rows = [
        (name, f"{statistics.median(times):,.0f}", f"{max(times):,.0f}", f"{len(times)}")
        for name, times in asdict(found).items()
        if name != "size"
    ]
    title = f"A page of {found.size / 1e6:.2f} MB in headless Chromium, milliseconds"
    machine.show(title, ("until", "median", "most", "times"), rows, [], told)
    machine.write_json(given.json, {"machine": told, "page": asdict(found)})


if __name__ == "__main__":
    main()
