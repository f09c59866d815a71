"""Traces in files: what is read is what was written, and anything else is refused in one sentence."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvwinnow.errors import TraceError
from kvwinnow.simulation import parquet
from kvwinnow.simulation.reading import read_trace
from kvwinnow.simulation.record import record
from kvwinnow.simulation.trace import Trace, demo, demo_rows
from kvwinnow.simulation.writing import check_target, replacing
from tests.models import tiny_model, tiny_tokens


def written(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_bytes(text.encode())
    return str(path)


def refusal(name: str, **options: Any) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(name, **options)
    said = str(caught.value)
    assert "\n" not in said
    return said


def same(one: Any, other: Any) -> None:
    """Every field equal, to the bit."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    elif hasattr(one, "__dataclass_fields__"):
        for field in one.__dataclass_fields__:
            same(getattr(one, field), getattr(other, field))
    else:
        assert one == other


# -- text ------------------------------------------------------------------------------------------


def test_csv_of_numbers(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "a.csv", 'token,attention\nThe,0.5\n"a, ""b""",1e-3\n\n last,2\n'))
    assert trace.tokens == ("The", 'a, "b"', " last")
    assert trace.fixed
    assert trace.mass[0, 0, 0].tolist() == [np.float32(0.5), np.float32(1e-3), 2.0]
    assert trace.prompt == 0


def test_csv_of_rows(tmp_path: Path) -> None:
    text = "\ufeffattention,note,Token\r\n1,x,a\r\n0.25 0.75,y,b\r\n0.5 0.25 0.25,z,c\r\n"
    trace = read_trace(written(tmp_path, "A.CSV", text), prompt=2)
    assert trace.tokens == ("a", "b", "c")
    assert not trace.fixed
    assert trace.mass[:, 0, 0].tolist() == [[1, 0, 0], [0.25, 0.75, 0], [0.5, 0.25, 0.25]]
    assert trace.prompt == 2


def test_jsonl_of_numbers_and_rows(tmp_path: Path) -> None:
    numbers = "\n".join(json.dumps({"token": t, "attention": a}) for t, a in (("a", 1), ("b", 0.5)))
    assert read_trace(written(tmp_path, "a.jsonl", numbers)).mass[0, 0, 0].tolist() == [1.0, 0.5]
    matrix = [[1.0, 0, 0], [0.25, 0.75, 0], [0.5, 0.25, 0.25]]  # with zeros for what is to come
    rows = "\n".join(json.dumps({"token": "x", "attention": row}) for row in matrix)
    assert read_trace(written(tmp_path, "b.ndjson", rows)).mass[:, 0, 0].tolist() == matrix


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "line 1: the header is ''"),
        ("word,score\na,1\n", "line 1: the header is 'word,score'"),
        ("Word, Score\na,1\n", "line 1: the header is 'Word, Score'"),
        (
            "token,attention\na,1\nb,0.6 0.42\n",
            "line 3: the weights add up to 1.02, and attention weights of one query",
        ),
        (
            "token,attention\na,2\nb,0.5 0.5\n",
            "line 2: the weights add up to 2, and attention weights of one query sum to 1",
        ),
        ("token,attention\na,1\nb,1.5 -0.5\n", "line 3: attention '-0.5' is no number of 0 or more"),
        ("token,attention\n", "has no tokens"),
        ("token,token,attention\na,b,1\n", "line 1: two columns are named token"),
        ("token,attention,ATTENTION\na,1,2\n", "line 1: two columns are named attention"),
        ("token,attention\na,1\nb,c,2\n", "line 3: 3 fields under a header of 2"),
        ("token,attention\na,1\nb,\n", "line 3: no attention"),
        ("token,attention\na,1\nb,much\n", "line 3: attention 'much' is no number"),
        ("token,attention\na,1\nb,-1\n", "line 3: attention '-1' is no number of 0 or more"),
        ("token,attention\na,nan\n", "line 2: attention 'nan'"),
        ("token,attention\na,inf\n", "line 2: attention 'inf'"),
        ('token,attention\n"a,1\n', "this is no CSV"),
        ('token,attention\n"a\nb",1\nc,x\n', "line 4: attention 'x'"),
        ("token,attention\na,1\nb,1\nc,1 2 3\n", "line 4: a row of weights after 2 lines of one number"),
        ("token,attention\na,1\nb,0.5 0.5\nc,1\n", "line 4: 1 weights for token 3, whose query sees 3"),
        ("token,attention\na,1 0\nb,0.5 0.5\nc,1 0 0\n", "line 2: 2 weights for token 1"),
        ("token,attention\na,0.5 0.5\nb,0.5 0.5\n", "line 2: token 1 gives weight to a token that comes after"),
        ("token,attention\na,1\nb,0 0\n", "line 3: all weights are 0"),
    ],
)
def test_bad_csv_is_refused_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    assert sentence in refusal(written(tmp_path, "a.csv", text))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 2: this is no JSON"),
        ("[1, 2]", "line 2: '[1, 2]' is no token"),
        ('{"token": 3, "attention": 1}', "is no token with its attention"),
        ('{"token": "a"}', "is no token with its attention"),
        ('{"token": "a", "attention": true}', "attention 'True' is no number"),
        ('{"token": "a", "attention": []}', "empty list"),
        ('{"token": "a", "attention": [1, null]}', "attention 'None'"),
        ('{"token": "a", "attention": NaN}', "attention 'nan'"),
        ('{"token": "a", "attention": ' + "1" * 400 + "}", "is no number of 0 or more"),
        ("[" * 100_000, "line 2: this is no JSON (too deep)"),
        ('{"token": "a", "attention": ' + "1" * 5000 + "}", "line 2: this is no JSON (too long a number)"),
    ],
)
def test_bad_jsonl_is_refused_with_its_line(tmp_path: Path, line: str, sentence: str) -> None:
    text = '{"token": "first", "attention": 1}\n' + line
    assert sentence in refusal(written(tmp_path, "a.jsonl", text))


def test_rows_may_be_rounded_and_single_numbers_may_be_any(tmp_path: Path) -> None:
    assert not read_trace(written(tmp_path, "a.csv", "token,attention\na,1\nb,0.505 0.505\n")).fixed
    assert read_trace(written(tmp_path, "a.csv", "token,attention\na,5\nb,7\n")).fixed


def test_bad_names_are_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(str(tmp_path / "none.csv"))
    assert "does not exist" in refusal(str(tmp_path / "none.parquet"))
    assert "neither demo nor demo-rows" in refusal(written(tmp_path, "a.txt", "x"))
    assert "is no path" in refusal("a\0.csv")
    (tmp_path / "folder.csv").mkdir()
    assert "is a folder" in refusal(str(tmp_path / "folder.csv"))
    (tmp_path / "latin.csv").write_bytes(b"token,attention\n\xe9,1\n")
    assert "not UTF-8" in refusal(str(tmp_path / "latin.csv"))
    assert "the prompt is to have 9 tokens" in refusal(written(tmp_path, "p.csv", "token,attention\na,1\n"), prompt=9)


# -- Parquet ---------------------------------------------------------------------------------------


def full_trace() -> Trace:
    return record(tiny_model("gemma3", layers=4), tiny_tokens(30)[0], new_tokens=3, vectors=True)


@pytest.mark.parametrize("make", [demo, demo_rows, full_trace])
def test_a_trace_is_read_as_it_was_written(make: Any, tmp_path: Path) -> None:
    path, trace = tmp_path / "t.parquet", make()
    parquet.write(trace, path)
    same(parquet.read(path), trace)
    assert os.listdir(tmp_path) == ["t.parquet"]


def test_a_trace_without_decoded_tokens_and_in_two_bytes(tmp_path: Path) -> None:
    import torch

    trace = record(tiny_model("gpt2").to(torch.bfloat16), tiny_tokens(9)[0], new_tokens=0, vectors=True)
    parquet.write(trace, tmp_path / "t.parquet")
    same(parquet.read(tmp_path / "t.parquet"), trace)


def test_the_columns_are_as_documented(tmp_path: Path) -> None:
    trace = full_trace()
    parquet.write(trace, tmp_path / "t.parquet")
    table = pq.read_table(tmp_path / "t.parquet")
    assert table.num_rows == 33
    steps, layers, heads = len(trace.steps), 2, 2
    mass = table["mass"][5].as_py()
    assert mass[(2 * layers + 1) * heads + 0] == trace.mass[2, 1, 0, 5]
    assert len(mass) == steps * layers * heads
    assert table["position"].to_pylist() == list(range(33))
    assert table["keys"][7].as_py()[(1 * heads + 1) * 16 + 3] == trace.vectors.keys[1, 1, 7, 3]  # type: ignore[union-attr]


def test_damage_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    parquet.write(full_trace(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "damaged" in refusal(str(path))
    for place in (100, len(whole) // 2):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        assert "damaged" in refusal(str(path))
    path.write_bytes(b"")
    assert "no Parquet file" in refusal(str(path))
    path.write_text("token,attention\n")
    assert "no Parquet file" in refusal(str(path))


def test_other_parquet_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"a": [1]}), path)
    assert "no trace" in refusal(str(path))


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"prompt": 99},
        {"prompt": "x"},
        {"steps": [[0, 8]]},
        {"layers": 2},
        {"kv_heads": 0},
        {"layers": float("inf")},
        {"prompt": float("inf")},
        {"steps": 2**31},
        {"fixed": 1},
        {"fixed": True},
        {
            "model": {
                "name": "x",
                "heads": 1,
                "kv_heads": 1,
                "dim": 4,
                "itemsize": 4,
                "windows": [None],
                "softmax_sinks": 3,
            }
        },
        {"model": {"name": "x"}},
        {"model": {"name": "x", "heads": 1, "kv_heads": 2, "dim": 4, "itemsize": 4, "windows": [None]}},
        {"steps": None},
        {"model": {"name": "x", "heads": 1, "kv_heads": 1, "dim": 4, "itemsize": 4, "windows": ["wide"]}},
        {"model": {"name": "x", "heads": "1", "kv_heads": 1, "dim": 4, "itemsize": 4, "windows": [None]}},
        {"model": {"name": "x", "heads": 1, "kv_heads": 1, "dim": 4, "itemsize": 3, "windows": [None]}},
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    parquet.write(demo_rows(), path)
    table = pq.read_table(path)
    told = json.loads(table.schema.metadata[parquet.KEY]) | change
    pq.write_table(table.replace_schema_metadata({parquet.KEY: json.dumps(told)}), path)
    assert "no trace that this version" in refusal(str(path))


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("position", pa.array(range(1, 17), pa.int32())),
        ("token", pa.array([None] * 16, pa.string())),
        ("mass", pa.array([[0.0] * 16] * 16, pa.list_(pa.float64(), 16))),
        ("mass", pa.array([[0.0] * 15] * 16, pa.list_(pa.float32(), 15))),
        ("mass", pa.array([[0.0] * 16] * 15 + [None], pa.list_(pa.float32(), 16))),
        ("mass", pa.array([[-1.0] * 16] * 16, pa.list_(pa.float32(), 16))),
        ("mass", pa.array([[float("nan")] * 16] * 16, pa.list_(pa.float32(), 16))),
        ("mass", pa.array(range(16), pa.int32())),
    ],
)
def test_columns_that_do_not_fit_are_refused(name: str, column: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    parquet.write(demo_rows(), path)
    table = pq.read_table(path)
    metadata = table.schema.metadata
    table = table.set_column(table.column_names.index(name), name, column).replace_schema_metadata(metadata)
    pq.write_table(table, path)
    assert "no trace that this version" in refusal(str(path))
    pq.write_table(table.drop_columns(["mass"]), path)
    assert "no trace that this version" in refusal(str(path))


@pytest.mark.parametrize(
    "change",
    [
        {"count": np.int64(-1)},
        {"lead": np.zeros((2, 4, 16, 3), dtype=np.float32)},
        {"lead": np.full((2, 4, 16, 16), "a")},
        {"mean": np.zeros((2, 4, 16))},
        {"scale": np.ones(2, dtype=np.int64)},
        {"angles0": np.zeros((2, 1024, 1), dtype=np.float32)},
        {"tables": np.ones((2, 2), dtype=np.int64)},
        None,
    ],
    ids=lambda change: "torn" if change is None else next(iter(change)),
)
def test_queries_that_do_not_fit_are_refused(change: dict[str, Any] | None, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    parquet.write(record(tiny_model(), tiny_tokens(20)[0], new_tokens=2, vectors=True), path)
    table = pq.read_table(path)
    packed = table["queries"][0].as_py()
    if change is None:
        packed = packed[: len(packed) // 2]
    else:
        stream = io.BytesIO()
        np.savez(stream, **{**np.load(io.BytesIO(packed)), **change})
        packed = stream.getvalue()
    column = pa.array([packed, *[None] * (table.num_rows - 1)], pa.binary())
    changed = table.set_column(table.column_names.index("queries"), "queries", column)
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), path)
    assert "no trace that this version" in refusal(str(path))


def test_a_header_too_deep_and_a_table_without_rows_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    parquet.write(record(tiny_model(), tiny_tokens(20)[0], new_tokens=2, vectors=True), path)
    table = pq.read_table(path)
    pq.write_table(table.slice(0, 0), path)
    assert "no trace that this version" in refusal(str(path))
    pq.write_table(table.replace_schema_metadata({parquet.KEY: b"[" * 100_000}), path)
    assert "no trace that this version" in refusal(str(path))


def test_another_prompt_than_the_recorded_one_is_refused(tmp_path: Path) -> None:
    parquet.write(full_trace(), tmp_path / "t.parquet")
    assert read_trace(str(tmp_path / "t.parquet"), prompt=30).prompt == 30
    assert "recorded with a prompt of 30 tokens" in refusal(str(tmp_path / "t.parquet"), prompt=3)


# -- whole files -----------------------------------------------------------------------------------


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as draft:
            draft.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    with replacing(path) as draft:
        draft.write_text("new")
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.html"]


def test_bad_targets_are_refused_beforehand(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not exist; make it"):
        check_target(tmp_path / "none" / "a.html")
    with pytest.raises(TraceError, match="no file that could be replaced"):
        check_target(tmp_path)
    with pytest.raises(TraceError, match="is no path"):
        check_target("a\0b")


def test_a_full_disk_leaves_what_was_there() -> None:
    with pytest.raises(TraceError, match="cannot be written"), replacing("/dev/null/x") as draft:
        draft.write_text("never")
