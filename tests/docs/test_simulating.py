"""The page on simulating tells what happens: its commands, its traces and its Python run as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvwinnow.cli import main
from kvwinnow.simulation import parquet
from kvwinnow.simulation.record import record
from kvwinnow.simulation.text_traces import from_csv, from_jsonl
from tests.cli.conftest import byte_tokenizer
from tests.models import tiny_model, tiny_tokens

PAGE = (Path(__file__).parents[2] / "docs" / "simulating.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.M | re.S)


def lines(text: str) -> list[str]:
    """Without the spaces at the ends, which tables are filled up with."""
    return [line.rstrip() for line in text.strip().splitlines()]


def test_the_command_prints_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = blocks("console")
    command, _, output = shown.partition("\n")
    assert main(shlex.split(command.removeprefix("$ kvwinnow "))) == 0
    assert lines(capsys.readouterr().out) == lines(output)


def test_the_traces_are_traces() -> None:
    (numbers,), (rows,) = blocks("csv"), blocks("json")
    assert from_csv(numbers, "page").tokens == ("The", " key, perhaps", " is")
    assert from_csv(numbers, "page").fixed
    matrix = from_jsonl(rows, "page")
    assert matrix.mass[2, 0, 0].tolist() == pytest.approx([0.5, 0.4, 0.1])


def test_the_commands_about_files_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_model(vocab_size=257).save_pretrained("tiny")
    byte_tokenizer().save_pretrained("tiny")
    (tmp_path / "prompt.txt").write_text("How many stars are there, and how many planets? " * 4)
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("kvwinnow ")]
    assert len(commands) == 4
    for command in commands:
        # A small model of few layers in place of the default one.
        words = [word.replace("2048", "128") for word in shlex.split(command)[1:]]
        words = ["0" if word == "12" else word for word in words]
        if words[0] == "record":
            words.insert(1, "tiny")
        assert main(words) == 0, capsys.readouterr().err
    assert (tmp_path / "sweep.html").stat().st_size > 1e6


def test_the_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parquet.write(record(tiny_model(), tiny_tokens(40)[0], new_tokens=4), "trace.parquet")
    names: dict[str, Any] = {}
    (code,) = blocks("python")
    exec(code, names)
    assert names["held"].shape == (2, 2, 44)
    assert (names["held"].sum(2) == 10).all()
    assert 0 < names["retained"] < 1


def test_the_columns_are_those_of_the_file(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    parquet.write(record(tiny_model(), tiny_tokens(40)[0], new_tokens=4, vectors=True), tmp_path / "t.parquet")
    told = re.findall(r"^\| (`.*?) \|", PAGE, flags=re.M)
    assert {name for cell in told for name in re.findall(r"`(\w+)`", cell)} == set(
        pq.read_table(tmp_path / "t.parquet").column_names
    )
