"""Policies as text and as parameters: what reads back, and what is refused in one sentence."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvwinnow.errors import KvwinnowError, PolicyError
from kvwinnow.policies import (
    H2O,
    POLICIES,
    TOVA,
    Compose,
    ExpectedAttention,
    Full,
    Hybrid,
    KeyDiff,
    Knorm,
    Policy,
    PyramidKV,
    SlidingWindow,
    SnapKV,
    StreamingLLM,
    WholeBlocks,
    parse,
)
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
    H2O(budget=7, normalize="age"),
    TOVA(budget=7, sinks=2, recent=0, evict_every=4),
    Knorm(budget="1GiB", recent=3),
    KeyDiff(budget=0.5, sinks=1),
    ExpectedAttention(budget=9, future=3, sinks=1, epsilon=0.02, covariance=False, values=False),
    PyramidKV(budget=100, beta=3),
    Compose(budget=0.25, prompt=PyramidKV(0.25, pool="avg"), decode=TOVA()),
    Compose(budget="64MiB", prompt=Full(), decode=H2O("64MiB", recent=64)),
    Compose(budget=4096, prompt=SnapKV(4096, window=2000), decode=StreamingLLM()),
    Compose(budget=50, prompt=ExpectedAttention(), decode=Full()),
    WholeBlocks(H2O(budget=64, recent=3), 32),
    WholeBlocks(SnapKV(budget=0.125), multiple_of=1),
    WholeBlocks(PyramidKV(budget="64MiB", beta=3)),
    WholeBlocks(Compose(budget=64, prompt=SnapKV(64, window=8), decode=TOVA(64)), 8),
    WholeBlocks(Full(), 4),
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


def test_a_policy_within_a_policy_stands_in_brackets_and_has_the_outer_budget() -> None:
    text = "compose:budget=1024,prompt=snapkv(window=32,kernel=7),decode=h2o(recent=64)"
    expected = Compose(1024, SnapKV(1024, window=32, kernel=7), H2O(1024, recent=64))
    assert parse(text) == expected
    assert str(expected) == (
        "compose:budget=1024,prompt=snapkv(window=32,kernel=7,pool=max,sinks=4),decode=h2o(evict_every=1,sinks=0,recent=64)"
    )
    assert parse("compose:decode=h2o(recent=64),prompt=snapkv(window=32,kernel=7)") == expected
    assert parse(" Compose : budget = 1024 , prompt = SnapKV ( kernel = 7 ) , decode = h2o ( recent=64 )") == expected
    assert parse("compose:prompt=snapkv(),decode=tova") == Compose(prompt=SnapKV(), decode=TOVA())
    # A window wider than the default budget is fine under a greater one, wherever that stands.
    wide = parse("compose:prompt=snapkv(window=2000),budget=4096")
    assert isinstance(wide, Compose)
    assert wide.prompt == SnapKV(4096, window=2000)
    assert parse("compose:budget=500,prompt=snapkv(budget=500)") == parse("compose:budget=500,prompt=snapkv")


def test_the_policy_within_blocks_has_a_budget_of_its_own() -> None:
    expected = WholeBlocks(H2O(64, recent=8), 16)
    assert parse("blocks:multiple_of=16,policy=h2o(budget=64,recent=8)") == expected
    assert str(expected) == "blocks:policy=h2o(budget=64,evict_every=1,sinks=0,recent=8),multiple_of=16"
    assert parse("blocks:policy=compose(budget=64,prompt=knorm,decode=tova)").policy == Compose(64, Knorm(64), TOVA(64))  # type: ignore[attr-defined]
    assert parse("blocks") == WholeBlocks(SnapKV(1024), 16)
    # Without one it takes what the caller gives, as any policy does, however deep it stands.
    assert parse("blocks:policy=compose(prompt=knorm,decode=tova)", budget=64) == WholeBlocks(
        Compose(64, Knorm(64), TOVA(64))
    )
    assert parse("blocks:policy=h2o(budget=64,recent=8)", budget=99) == expected
    assert parse("h2o:recent=2000", budget=4096) == H2O(4096, recent=2000)


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
    ("h2o:normalize=yes", ["normalize='yes'", "age", "none"]),
    ("h2o:normalize=true", ["normalize=True", "age"]),
    ("hybrid:normalize=raw", ["normalize='raw'", "age"]),
    ("tova:recent=-1", ["recent=-1", "0"]),
    ("tova:budget=3,sinks=2,recent=2", ["budget=3", "4"]),
    ("knorm:sinks=1.5", ["sinks=1.5", "whole"]),
    ("keydiff:evict_every=0", ["evict_every=0", "1"]),
    ("expectedattention:future=0", ["future=0", "1"]),
    ("expectedattention:budget=4", ["budget=4", "5"]),
    ("expectedattention:epsilon=-1", ["epsilon=-1", "0 or more"]),
    ("expectedattention:epsilon=nan", ["epsilon=nan", "0 or more"]),
    ("expectedattention:epsilon=little", ["epsilon='little'", "number"]),
    ("expectedattention:covariance=1", ["covariance=1", "true or false"]),
    ("expectedattention:values=none", ["values=None", "true or false"]),
    ("pyramidkv:beta=0", ["beta=0", "1"]),
    ("pyramidkv:beta=2.5", ["beta=2.5", "whole"]),
    ("pyramidkv:kernel=2", ["pyramidkv", "kernel=2", "1 or 3"]),
    ("pyramidkv:pool=mean", ["pyramidkv", "mean", "max"]),
    ("compose:prompt=snap", ["'snap'", "snapkv"]),
    ("compose:prompt=5", ["'5'", "snapkv"]),
    ("compose:prompt=none", ["'none'", "snapkv"]),
    ("compose:prompt=compose", ["prompt=", "compose", "itself"]),
    ("compose:budget=60,decode=compose(decode=h2o)", ["decode=", "compose", "itself"]),
    ("compose:decode=snapkv", ["decode=snapkv", "h2o", "full"]),
    ("compose:decode=expectedattention(future=3)", ["decode=expectedattention", "h2o"]),
    ("compose:budget=60,decode=h2o(budget=70)", ["decode=h2o", "budget=70", "budget=60", "one budget"]),
    ("compose:budget=10", ["budget=10", "36"]),
    ("compose:budget=40,prompt=full,decode=h2o(recent=50)", ["budget=40", "50"]),
    ("compose:prompt=snapkv(window=0)", ["window=0", "1"]),
    ("compose:prompt=snapkv(windows=3)", ["windows", "window"]),
    ("compose:prompt=snapkv(window=3", ["bracket", "NAME(PARAMETER=VALUE"]),
    ("compose:prompt=snapkv)window=3(", ["bracket"]),
    ("compose:prompt=snapkv,prompt=h2o", ["prompt", "twice", "snapkv", "h2o"]),
    ("h2o:recent=snapkv(window=3)", ["recent=", "whole"]),
    ("blocks:multiple_of=0", ["multiple_of=0", "1 or more", "16"]),
    ("blocks:multiple_of=2.5", ["multiple_of=2.5", "whole"]),
    ("blocks:multiple_of=none", ["multiple_of=None", "whole"]),
    ("blocks:policy=5", ["'5'", "snapkv"]),
    ("blocks:policy=blocks(multiple_of=8)", ["blocks of 8", "within"]),
    ("blocks:policy=h2o(budget=0)", ["budget=0", "1"]),
    ("blocks:budget=64", ["budget", "policy", "multiple_of"]),
    ("compose:prompt=blocks", ["prompt=", "blocks of 16", "blocks:multiple_of=16,policy=compose"]),
    ("compose:decode=blocks(multiple_of=8,policy=h2o)", ["decode=", "blocks:multiple_of=8,policy=compose"]),
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
        (PyramidKV(window=5), 9),
        (TOVA(), 1),
        (TOVA(sinks=2, recent=3), 5),
        (Knorm(), 1),
        (KeyDiff(sinks=1), 1),
        (ExpectedAttention(), 5),
        (Compose(), 36),
        (Compose(prompt=Full(), decode=TOVA(recent=7)), 7),
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
