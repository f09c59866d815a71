"""Pages of tiny models, and the browser that looks at them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvwinnow import parse
from kvwinnow.simulation.explorer.collect import explore
from kvwinnow.simulation.explorer.exploration import Exploration
from kvwinnow.simulation.explorer.page import write
from tests.cli.conftest import byte_tokenizer
from tests.models import tiny_model
from tests.simulation.explorer.browser import View, start

NASTY = (
    "We met.\n\nWe  left </script><script>window.hacked = 1</script> & <b>bold</b> <!-- -->\t\"quoted\" 'too' n\u00e9 "
    "\U0001f600 {{ braces }} {% raw %} \x00\x1b\r \u202eturned\u202c ${x} `ticks` \\n end"
)
"""A prompt of everything that a page may stumble over."""
POLICIES = (
    "snapkv:budget=40,window=8,kernel=3",
    "h2o:budget=40",
    "streamingllm:budget=0.25",
    "knorm:budget=48,sinks=2",
    # A name that is longer than a phone is wide.
    "compose:budget=40,prompt=snapkv(window=8,kernel=3,pool=avg),decode=hybrid(heavy_ratio=0.25,normalize=age)",
)


@dataclass(frozen=True)
class Made:
    """A page and what it was made of."""

    path: Path
    exploration: Exploration


def make(
    path: Path, kind: str = "llama", *, policies: tuple[str, ...] = POLICIES, new: int = 8, text: str = NASTY
) -> Made:
    model = tiny_model(kind, layers=4, vocab_size=257)
    tokenizer = byte_tokenizer()
    ids = torch.tensor([tokenizer(text).input_ids])
    made = explore(model, tokenizer, ids, [parse(policy) for policy in policies], name="tiny <model>", new_tokens=new)
    write(path, made)
    return Made(path, made)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A page of five policies."""
    return make(tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture(scope="session")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A page of a model of which every other layer keeps a window of its own."""
    return make(tmp_path_factory.mktemp("sliding") / "page.html", "gemma3", policies=("h2o:budget=40",))


@pytest.fixture(scope="session")
def lone(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The full cache alone, and an answer of one token."""
    return make(tmp_path_factory.mktemp("lone") / "page.html", policies=(), new=1)


@pytest.fixture(scope="module")
def browser() -> Iterator[View]:
    """One browser for the tests of a module."""
    driver = start()
    try:
        yield View(driver)
    finally:
        driver.quit()


@pytest.fixture
def view(browser: View, made: Made) -> Iterator[View]:
    """The page of five policies, just opened; in the end nothing was asked of a network and nothing complained."""
    browser.open(made.path)
    yield browser
    assert browser.errors() == []
    assert set(browser.requests()) <= {made.path.as_uri()}
