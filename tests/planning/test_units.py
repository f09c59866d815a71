"""Tokens, parameters, overheads and GPUs as people write them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwinnow.errors import KvwinnowError
from kvwinnow.planning.gpus import GPU, GPUS, parse_gpu
from kvwinnow.planning.units import parse_count, parse_overhead, parse_parameters, parse_tokens, show_tokens


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("4096", 4096),
        (4096, 4096),
        ("128k", 131072),
        ("1M", 1048576),
        ("1.5K", 1536),
        ("1,000,000", 1_000_000),
        ("8 k", 8192),
    ],
)
def test_tokens(text: int | str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["0", 0, -1, "-4k", "k", "", "1.0001k", "4kb", "1G", True, 4.5])
def test_what_is_no_number_of_tokens(text: object) -> None:
    with pytest.raises(KvwinnowError, match="a whole number of tokens, 1 or more"):
        parse_tokens(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["9" * 5000, 10**400, 10**5000], ids=["digits", "number", "huge"])
@pytest.mark.parametrize("read", [parse_tokens, parse_parameters, partial(parse_count, "batch")])
def test_numbers_without_end_are_refused_in_short(read: Callable[[str | int], int], text: str | int) -> None:
    with pytest.raises(KvwinnowError, match="more than 1,000,000,000,000,000,000, the most that is planned") as raised:
        read(text)
    assert len(str(raised.value)) < 200


def test_a_unit_counts_before_the_limit() -> None:
    assert parse_tokens("900000000000000k") == 900_000_000_000_000 * 1024
    with pytest.raises(KvwinnowError, match="the most that is planned"):
        parse_tokens("9" * 15 + "M")


def test_numbers_of_numpy_are_numbers() -> None:
    assert parse_tokens(np.int64(7)) == parse_count("batch", np.int32(7)) == 7  # type: ignore[arg-type]
    assert type(parse_tokens(np.int64(7))) is int  # type: ignore[arg-type]
    assert parse_overhead(np.float32(0.25), 1000) == 250


def test_none_of_something_may_be_asked_for() -> None:
    assert parse_tokens("0", least=0) == parse_tokens("00", least=0) == parse_tokens(0, least=0) == 0
    with pytest.raises(KvwinnowError, match="new tokens -1 is none; give a whole number of tokens, 0 or more"):
        parse_tokens(-1, "new tokens", least=0)


@given(st.integers(1, 2**40))
def test_shown_tokens_are_read_back(tokens: int) -> None:
    assert parse_tokens(show_tokens(tokens)) == tokens


def test_parameters() -> None:
    assert parse_parameters("70B") == 70 * 10**9
    assert parse_parameters("135M") == 135 * 10**6
    assert parse_parameters("70.6b") == 70_600_000_000
    assert parse_parameters(8_030_261_248) == 8_030_261_248
    with pytest.raises(KvwinnowError, match="parameters '70GB'"):
        parse_parameters("70GB")


def test_overhead() -> None:
    assert parse_overhead("10%", 1000) == 100
    assert parse_overhead(0.25, 1000) == 250
    assert parse_overhead("1KiB", 10_000) == 1024
    assert parse_overhead("0", 1000) == parse_overhead("0%", 1000) == 0
    for wrong in ("much", "-1%", "100%", 1.5, "x%", float("nan"), None, [], True, 10**400, "9" * 5000 + "GB"):
        with pytest.raises(KvwinnowError, match="overhead"):
            parse_overhead(wrong, 1000)  # type: ignore[arg-type]
    with pytest.raises(KvwinnowError, match="give less"):
        parse_overhead("2GiB", 2**30)


@pytest.mark.parametrize(
    ("text", "name", "count", "memory"),
    [
        ("H100-80GB", "H100-80GB", 1, 81559 * 2**20),
        ("h100", "H100-80GB", 1, 81559 * 2**20),
        ("NVIDIA H100 80GB x8", "H100-80GB", 8, 81559 * 2**20),
        ("8xH100-80GB", "H100-80GB", 8, 81559 * 2**20),
        ("4 x rtx3090", "RTX-3090", 4, 24576 * 2**20),
        ("RTX3090", "RTX-3090", 1, 24576 * 2**20),
        ("RTX 4090x2", "RTX-4090", 2, 24564 * 2**20),
        ("MI300X", "MI300X", 1, 206_141_652_992),
        ("MI300Xx8", "MI300X", 8, 206_141_652_992),
        ("24GB", "24GB", 1, 24 * 10**9),
        ("2x48GiB", "48GiB", 2, 48 * 2**30),
        ("48GiBx2", "48GiB", 2, 48 * 2**30),
        ("1.5TB", "1.5TB", 1, 1_500_000_000_000),
    ],
)
def test_gpus(text: str, name: str, count: int, memory: int) -> None:
    gpu = parse_gpu(text)
    assert (gpu.name, gpu.count, gpu.memory) == (name, count, memory)


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_of_the_table_is_found_by_its_name_and_number(name: str) -> None:
    assert parse_gpu(name) == GPUS[name]
    assert parse_gpu(f"{name}x4").count == parse_gpu(f"4x{name}").count == 4
    assert parse_gpu(str(parse_gpu(f"{name}x4"))) == parse_gpu(f"{name}x4")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("H10O", "H100"),
        ("RTX-2090", "RTX-"),
        ("A100", "A100-40GB or A100-80GB"),
        ("", "write a name or a size"),
        ("0xH100", "1 or more"),
        ("H100x0", "1 or more"),
        ("0GB", "known are"),
        ("2xH100x2", "xN"),
        ("80", "known are"),
    ],
)
def test_what_is_no_gpu(text: str, part: str) -> None:
    with pytest.raises(KvwinnowError, match=part):
        parse_gpu(text)


@pytest.mark.parametrize("text", ["9" * 5000 + "xH100", "H100x" + "9" * 5000, "9" * 5000 + "GB", "1000xH100"])
def test_gpus_without_end(text: str) -> None:
    with pytest.raises(KvwinnowError, match="GPU"):
        parse_gpu(text)


@pytest.mark.parametrize(
    "fields", [{"memory": 0}, {"memory": 1e9}, {"memory": 10, "count": 0}, {"memory": 10, "count": True}]
)
def test_a_gpu_made_by_hand_has_memory_and_a_number(fields: dict[str, Any]) -> None:
    with pytest.raises(KvwinnowError, match="a whole number, 1 or more"):
        GPU("mine", **fields)
