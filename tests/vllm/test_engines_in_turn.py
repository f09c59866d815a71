"""Engines with and without kvwinnow, one after another in one process: each gets the parts that belong to it."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.vllm.engines import Ask, Engines


def test_engines_with_and_without_follow_one_another(engines: Engines, document: list[int]) -> None:
    ask = Ask(document[:300], tokens=8)
    compressed = Ask(document[:300], "snapkv:budget=96", tokens=8)
    plain = engines(additional_config={}).text(ask)
    assert engines().text(ask) == plain
    evicted = engines().text(compressed)
    assert engines(additional_config={}).text(ask) == plain
    assert engines().text(compressed) == evicted
