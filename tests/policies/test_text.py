"""Policies as text and as parameters: what reads back, and what is refused in one sentence."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvwinnow.errors import KvwinnowError, PolicyError
from kvwinnow.policies import H2O, POLICIES, Full, Hybrid, Policy, SlidingWindow, SnapKV, StreamingLLM, parse
from kvwinnow.policies.budget import parse_size

VARIANTS: list[Policy] = [
    *(policy() for policy in POLICIES.values()),
    SlidingWindow(budget=1),
    SlidingWindow(budget=0.125, evict_every=8),
    StreamingLLM(budget="64MiB", sinks=0),
    StreamingLLM(budget=1.0),
    H2O(budget=7, recent=0),
    H2O(budget=100, recent=13, sinks=5, evict_every=3),
    H2O(budget=1e-05),
    Hybrid(budget="1.5 GB", heavy_ratio=1),
    Hybrid(budget=6, sinks=2, heavy_ratio=0.25),
    SnapKV(budget=40, window=32, kernel=7, pool="avg", sinks=8),
]


@pytest.mark.parametrize("policy", VARIANTS, ids=str)
def test_the_text_form_reads_back(policy: Policy) -> None:
    assert parse(str(policy)) == policy


def test_the_text_form_of_the_design() -> None:
    expected = SnapKV(budget=1024, window=32, kernel=7, pool="max")
    assert parse("snapkv:budget=1024,window=32,kernel=7,pool=max") == expected
    assert parse(" SnapKV : budget = 1024 , kernel = 7 ") == expected
    assert parse("full") == Full()
    assert parse("h2o:budget=0.5,recent=none") == H2O(budget=0.5)


def test_defaults_are_those_of_the_papers_or_said_to_differ() -> None:
    assert H2O() == H2O(evict_every=1, sinks=0, recent=None)
    assert StreamingLLM().sinks == Hybrid().sinks == SnapKV().sinks == 4
    assert Hybrid().heavy_ratio == 0.5
    assert SnapKV() == SnapKV(window=32, kernel=15, pool="max")


@pytest.mark.parametrize(("name", "policy"), POLICIES.items())
def test_every_policy_is_registered_under_its_name_and_tells_its_source(name: str, policy: type[Policy]) -> None:
    assert policy.name == name
    assert policy.__doc__
    assert name == "full" or (policy.paper and policy.url.startswith("https://"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy().budget = 3  # type: ignore[attr-defined]


REFUSED: list[tuple[str, list[str]]] = [
    ("", ["unknown", "snapkv"]),
    ("snap", ["'snap'", "snapkv"]),
    ("snapkv:", ["snapkv:"]),
    ("snapkv:budgets=3", ["budgets", "budget", "window"]),
    ("full:budget=3", ["budget", "none"]),
    ("snapkv:budget", ["budget=VALUE"]),
    ("snapkv:budget=1024,budget=512", ["1024", "512", "twice"]),
    ("h2o:budget=0", ["budget=0", "1"]),
    ("h2o:budget=-5", ["-5"]),
    ("h2o:budget=0.0", ["0.0", "(0, 1]"]),
    ("h2o:budget=1.5", ["1.5", "(0, 1]", "whole"]),
    ("h2o:budget=nan", ["nan", "(0, 1]"]),
    ("h2o:budget=inf", ["inf", "(0, 1]"]),
    ("h2o:budget=true", ["True", "bool"]),
    ("h2o:budget=none", ["None", "1024"]),
    ("h2o:budget=64XB", ["64XB", "MiB"]),
    ("h2o:budget=MiB", ["MiB", "GB"]),
    ("h2o:budget=0MiB", ["0MiB", "1B"]),
    ("h2o:budget=many", ["many", "MiB"]),
    ("h2o:recent=-1", ["recent=-1", "0"]),
    ("h2o:recent=2.5", ["recent=2.5", "whole"]),
    ("h2o:budget=10,recent=8,sinks=3", ["budget=10", "11"]),
    ("streamingllm:sinks=-1", ["sinks=-1", "0"]),
    ("streamingllm:sinks=none", ["sinks=None"]),
    ("streamingllm:budget=4", ["budget=4", "5"]),
    ("slidingwindow:evict_every=0", ["evict_every=0", "1"]),
    ("slidingwindow:evict_every=none", ["evict_every=None"]),
    ("slidingwindow:evict_every=true", ["evict_every=True"]),
    ("slidingwindow:sinks=4", ["sinks"]),
    ("hybrid:heavy_ratio=1.5", ["1.5", "[0, 1]"]),
    ("hybrid:heavy_ratio=-0.1", ["-0.1", "[0, 1]"]),
    ("hybrid:heavy_ratio=half", ["half", "[0, 1]"]),
    ("hybrid:heavy_ratio=nan", ["nan", "[0, 1]"]),
    ("hybrid:heavy_ratio=none", ["None", "[0, 1]"]),
    ("hybrid:budget=4,sinks=4", ["budget=4", "5"]),
    ("snapkv:window=0", ["window=0", "1"]),
    ("snapkv:window=none", ["window=None"]),
    ("snapkv:kernel=4", ["kernel=4", "3", "5"]),
    ("snapkv:kernel=0", ["kernel=0", "1"]),
    ("snapkv:kernel=-3", ["kernel=-3", "1"]),
    ("snapkv:pool=mean", ["mean", "max", "avg"]),
    ("snapkv:pool=none", ["None", "max", "avg"]),
    ("snapkv:budget=32", ["budget=32", "36"]),
]


@pytest.mark.parametrize(("text", "says"), REFUSED, ids=[text for text, _ in REFUSED])
def test_bad_policies_are_refused_in_a_sentence(text: str, says: list[str]) -> None:
    with pytest.raises(PolicyError) as error:
        parse(text)
    message = str(error.value)
    assert all(word in message for word in says), message
    assert "\n" not in message
    assert len(message) > 20


@pytest.mark.parametrize("text", [None, 3, b"full", ["full"]])
def test_what_is_no_text_is_no_policy(text: Any) -> None:
    with pytest.raises(KvwinnowError, match="known are"):
        parse(text)


@pytest.mark.parametrize(
    ("policy", "least"),
    [
        (SlidingWindow(), 1),
        (StreamingLLM(sinks=4), 5),
        (StreamingLLM(sinks=0), 1),
        (H2O(), 1),
        (H2O(sinks=2, recent=3), 5),
        (Hybrid(sinks=2), 3),
        (SnapKV(), 36),
        (SnapKV(window=1, sinks=0), 1),
    ],
    ids=str,
)
def test_the_least_budget_is_taken_and_one_token_less_is_not(policy: Policy, least: int) -> None:
    assert policy.minimum() == least
    assert dataclasses.replace(policy, budget=least).limit == least  # type: ignore[call-arg]
    with pytest.raises(PolicyError):
        dataclasses.replace(policy, budget=least - 1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64MiB", 64 * 2**20),
        ("64MB", 64_000_000),
        ("1.5GB", 1_500_000_000),
        ("1 GiB", 2**30),
        ("2kib", 2048),
        ("10kb", 10_000),
        ("7B", 7),
        (" 1TiB ", 2**40),
        ("1TB", 10**12),
    ],
)
def test_sizes_tell_binary_from_decimal_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "64", "MiB", "-1MiB", "1e3MB", "64 MiB s", "0.1B", "0GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(PolicyError):
        parse_size(text)
