"""The page as a file: everything in it, nothing outside it, and what its arrays say."""

from __future__ import annotations

import base64
import json
import re
import sys
import zlib
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plotly.offline import get_plotlyjs

from kvwinnow.errors import KvwinnowError
from kvwinnow.simulation.explorer.exploration import NEVER, Exploration, Run
from kvwinnow.simulation.explorer.page import SCRIPTS, page, rounded, write
from tests.simulation.explorer.conftest import Made


def blob(html: str, name: str) -> bytes:
    (found,) = re.findall(rf'id="blob-{name}">([^<]*)<', html)
    return zlib.decompress(base64.b64decode(found))


def array(html: str, name: str, kind: str) -> np.ndarray:
    """An array of the page, whose bytes lie in planes."""
    planes = np.frombuffer(blob(html, name), dtype=np.uint8).reshape(np.dtype(kind).itemsize, -1)
    return np.ascontiguousarray(planes.T).view(kind).reshape(-1)


def test_the_page_holds_what_was_collected(made: Made) -> None:
    html = made.path.read_text("utf-8")
    for number, run in enumerate(made.exploration.runs):
        assert (array(html, f"evicted-{number}", "<u2") == run.evicted.reshape(-1)).all()
        scores = array(html, f"scores-{number}", "<f4")
        np.testing.assert_allclose(scores, run.scores.reshape(-1), rtol=2**-11)
    header = json.loads(blob(html, "header"))
    for told, run in zip(header["runs"], made.exploration.runs, strict=True):
        assert told["nbytes"] == run.nbytes.tolist()
        assert told["foretold"] == [list(pair) for pair in run.foretold]
        assert told["policy"] == run.policy
        assert told["budgets"] == list(run.budgets)


class Links(HTMLParser):
    """Collects what a page refers to, and its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        self.scripts += tag == "script" and not any(name == "type" for name, _ in attrs)


def test_the_page_refers_to_nothing_outside_it(made: Made) -> None:
    html = made.path.read_text("utf-8")
    links = Links()
    links.feed(html)
    assert links.found == ["data:,", "#text"]
    assert links.scripts == 1
    code = re.sub(r'<script type="text/plain".*?</script>', "", html, flags=re.S)
    own = code.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"https?://|//cdn|@import|url\(|fetch\(|import\(", own)
    assert "</script><script>window.hacked" not in html


def test_the_chart_library_is_in_the_page_as_its_package_has_it(made: Made) -> None:
    assert blob(made.path.read_text("utf-8"), "plotly") == get_plotlyjs().encode("utf-8")


@pytest.mark.parametrize("package", ["jinja2", "plotly"])
def test_without_its_packages_the_way_out_is_named(
    made: Made, tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(KvwinnowError, match=rf"made with {package}, which .*pip install 'kvwinnow\[tools\]'"):
        write(tmp_path / "page.html", made.exploration)
    assert list(tmp_path.iterdir()) == []


def test_every_script_and_style_is_a_file_of_the_package() -> None:
    assets = files("kvwinnow.simulation.explorer").joinpath("assets")
    names = {entry.name for entry in assets.iterdir()}
    assert names == {*SCRIPTS, "page.css", "page.html.j2"}


@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_scores_keep_three_digits(values: list[float]) -> None:
    scores = np.array(values, dtype=np.float32)
    kept = rounded(scores)
    special = ~np.isfinite(scores)
    np.testing.assert_array_equal(kept[special], scores[special])
    assert np.isfinite(kept[~special]).all()
    normal = ~special & (np.abs(scores) >= np.finfo(np.float32).tiny)
    with np.errstate(over="ignore"):
        assert (np.abs(kept[normal] / scores[normal] - 1) <= 2**-11).all()


def large(policies: int) -> Exploration:
    """4,000 tokens in the shape of SmolLM2-135M, with scores and evictions that nothing compresses well."""
    generator = np.random.default_rng(0)
    shape, prompt, steps = (30, 3, 4063), 4000, 63
    runs = []
    for number in range(policies):
        evicted = generator.choice(np.array([0, NEVER, *range(1, steps + 1)], dtype=np.uint16), shape)
        runs.append(
            Run(
                policy=f"policy-{number}",
                label=f"policy-{number}",
                evicted=evicted,
                scores=generator.lognormal(0, 3, shape).astype(np.float32),
                budgets=(500,) * 30,
                nbytes=np.arange(steps + 1) + 10**7,
                answer=("word ",) * (steps + 1),
                text="word",
                retained=generator.random((30, 3), dtype=np.float32),
                foretold=tuple((n, 10**5 * n + number) for n in range(1, prompt, 67)),
            )
        )
    return Exploration("large", "bfloat16", tuple(f" token{i}" for i in range(prompt)), (None,) * 30, tuple(runs))


def test_a_page_of_4000_tokens_stays_under_10_mb() -> None:
    assert len(page(large(5)).encode("utf-8")) < 10_000_000


def test_a_page_is_written_whole_or_not_at_all(made: Made, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    size = write(target, made.exploration)
    assert target.stat().st_size == size
    assert target.read_text("utf-8") == made.path.read_text("utf-8")
    with pytest.raises(KvwinnowError, match="does not exist"):
        write(tmp_path / "none" / "page.html", made.exploration)
    assert list(tmp_path.iterdir()) == [target]
