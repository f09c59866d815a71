"""What a trace is, and what it refuses to be."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from kvwinnow.errors import TraceError
from kvwinnow.simulation.trace import DEMOS, ModelShape, Trace, Vectors, demo, from_numbers, from_rows

VECTORS = Vectors(
    keys=np.zeros((1, 1, 3, 8), dtype=np.float32),
    values=np.zeros((1, 1, 3, 8), dtype=np.float16),
    head_mass=np.zeros((3, 1, 1, 3), dtype=np.float32),
)
"""Of three tokens, decoded by a model of one layer and one head of 8 elements."""


def recorded(prompt: int = 20, decoded: int = 2) -> Trace:
    """A trace with steps as the recorder makes them, whose query q pays token j exactly 1000 q + j."""
    n = prompt + decoded
    ends = sorted({prompt - 2**k for k in range(prompt.bit_length()) if 2**k < prompt} | set(range(prompt, n + 1)))
    steps = np.array(list(zip([0, *ends], ends, strict=False)), dtype=np.int32)
    pay = np.tril(1000.0 * np.arange(n)[:, None] + np.arange(n)[None, :])
    mass = np.stack([pay[first:last].sum(0) for first, last in steps]).astype(np.float32)
    return Trace(tuple("x" * n), prompt, steps, np.broadcast_to(mass[:, None, None], (len(steps), 2, 3, n)).copy())


def test_the_sum_over_a_window_is_that_of_its_queries() -> None:
    trace = recorded()
    for window in (1, 2, 4, 8, 16):
        expected = sum(1000.0 * query + 3 for query in range(20 - window, 20) if query >= 3)
        assert trace.prompt_mass(window)[1, 2, 3] == expected
    assert trace.prompt_mass()[0, 0, 3] == sum(1000.0 * query + 3 for query in range(3, 20))
    assert (trace.prompt_mass(20) == trace.prompt_mass()).all()
    assert (trace.prompt_mass(99) == trace.prompt_mass()).all()


def test_a_window_that_was_not_recorded_is_refused_with_those_that_were() -> None:
    with pytest.raises(TraceError, match=r"window of 5 queries.*1, 2, 4, 8, 16, 20 queries"):
        recorded().prompt_mass(5)


def test_rows_hold_each_query_for_itself() -> None:
    trace = from_rows(("a", "b", "c"), [[1.0], [0.25, 0.75], [0.5, 0.25, 0.25]])
    assert trace.mass[:, 0, 0].tolist() == [[1, 0, 0], [0.25, 0.75, 0], [0.5, 0.25, 0.25]]
    assert [trace.step_of(query) for query in range(3)] == [0, 1, 2]
    assert trace.positions.tolist() == [0, 1, 2]
    assert trace.layers == (0,)


def test_numbers_are_one_step() -> None:
    trace = demo()
    assert trace.fixed
    assert trace.mass.shape == (1, 1, 1, 8)
    assert trace.steps.tolist() == [[0, 8]]


def test_demos_are_traces() -> None:
    for make in DEMOS.values():
        trace = make()
        assert trace.prompt == 0
        if not trace.fixed:
            np.testing.assert_allclose(trace.mass.sum(3), 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tokens": ()}, "no tokens"),
        ({"prompt": 4}, "4 tokens and the whole trace 3"),
        ({"prompt": -1}, "give 0 to 3"),
        ({"prompt": 1.0}, "prompt is 1.0; give a whole number"),
        ({"prompt": True}, "prompt is True; give a whole number"),
        ({"steps": np.arange(3, dtype=np.int32)}, r"steps have shape \(3,\)"),
        ({"mass": np.tril(np.ones((3, 3)))[:, None, None]}, "mass is float64"),
        ({"mass": -np.eye(3, dtype=np.float32)[:, None, None]}, "finite, 0 or more"),
        ({"mass": np.full((3, 1, 1, 3), np.nan, dtype=np.float32)}, "finite, 0 or more"),
        ({"mass": np.ones((3, 1, 1, 3), dtype=np.float32)}, "had not come yet"),
        ({"key_norm": np.ones((1, 3), dtype=np.float32)}, r"key_norm is float32 of shape \(1, 3\); .* \(1, 1, 3\)"),
        ({"key_norm": np.full((1, 1, 3), np.inf, dtype=np.float32)}, "key_norm holds numbers"),
        ({"fixed": True}, r"one number per token has mass of shape \(1, 1, 1, 3\)"),
        ({"model": ModelShape("m", 2, 2, 8, 4, (None,))}, "are not its model's"),
        ({"model": ModelShape("m", 1, 1, 8, 4, (None, None))}, "are not its model's"),
        ({"vectors": VECTORS}, "has vectors and no model"),
        ({"mass": np.zeros((3, 1, 1, 2), dtype=np.float32)}, "shape"),
        ({"steps": np.array([[0, 1], [2, 3], [2, 3]], dtype=np.int32)}, "one after the other"),
        ({"steps": np.array([[0, 1], [1, 2], [2, 2]], dtype=np.int32)}, "one after the other"),
    ],
)
def test_what_is_no_trace_is_refused(change: dict, sentence: str) -> None:
    good = from_rows(("a", "b", "c"), [[1.0], [0.5, 0.5], [0.2, 0.3, 0.5]])
    fields = {"tokens": good.tokens, "prompt": 0, "steps": good.steps, "mass": good.mass} | change
    with pytest.raises(TraceError, match=sentence):
        Trace(**fields)


@pytest.mark.parametrize(
    "change",
    [
        {"keys": np.zeros((1, 1, 3, 4), dtype=np.float32)},
        {"values": np.zeros((1, 1, 3, 8))},
        {"head_mass": np.zeros((2, 1, 1, 3), dtype=np.float32)},
        {"head_mass": np.full((3, 1, 1, 3), np.nan, dtype=np.float32)},
    ],
)
def test_vectors_that_are_not_the_models_are_refused(change: dict) -> None:
    good = from_rows(("a", "b", "c"), [[1.0], [0.5, 0.5], [0.2, 0.3, 0.5]])
    model = ModelShape("m", 1, 1, 8, 4, (None,))
    Trace(good.tokens, 0, good.steps, good.mass, vectors=VECTORS, model=model)
    with pytest.raises(TraceError, match=r"the trace's (keys|values|head_mass)"):
        Trace(good.tokens, 0, good.steps, good.mass, vectors=dataclasses.replace(VECTORS, **change), model=model)


def test_a_prompt_may_be_a_number_of_numpy() -> None:
    assert type(from_numbers(("a", "b"), [1.0, 2.0], prompt=np.int64(1)).prompt) is int  # type: ignore[arg-type]


def test_decoded_queries_must_not_be_summed() -> None:
    steps = np.array([[0, 1], [1, 3]], dtype=np.int32)
    with pytest.raises(TraceError, match="after its prompt"):
        Trace(("a", "b", "c"), 1, steps, np.zeros((2, 1, 1, 3), dtype=np.float32))


def test_numbers_may_be_a_prompt_too() -> None:
    assert from_numbers(("a", "b"), [1.0, 2.0], prompt=2).prompt == 2


def test_traces_need_no_torch() -> None:
    modules = ("trace", "text_traces", "parquet", "reading", "retained", "writing")
    imports = ", ".join(f"kvwinnow.simulation.{name}" for name in modules)
    code = f"import sys; import {imports}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
