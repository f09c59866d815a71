"""``kvwinnow explore`` writes one page, whole or not at all, and refuses early what it cannot do."""

from __future__ import annotations

import base64
import io
import json
import re
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import TRAINED, Ran

TEXT = "We met. We left.\n</script><b>&amp;"
NEW = 4


def header(page: Path) -> dict[str, Any]:
    """What the page knows of its runs."""
    (blob,) = re.findall(r'id="blob-header">([^<]*)<', page.read_text("utf-8"))
    found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(blob)))
    return found


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "report.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_the_page_holds_the_prompt_and_the_policies(
    run: Callable[..., Ran], tiny_folder: Path, prompt: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    policies = ("--policy", "h2o:budget=20", "--policy", "tova:budget=0.5")
    ran = run("explore", tiny_folder, "Why?", "--prompt-file", prompt, *policies, "-o", page, "--new-tokens", NEW)
    assert ran.code == 0, ran.err
    assert ran.out == ""
    told = header(page)
    assert told["model"] == tiny_folder.name
    assert told["prompt"] == len(f"{TEXT}\n\nWhy?")
    assert [made["label"] for made in told["runs"]] == ["full", "h2o:budget=20", "tova:budget=0.5"]
    assert all(len(made["answer"]) == NEW for made in told["runs"])
    said = next(line for line in ran.err.splitlines() if "page.html" in line and "MB" in line)
    assert f"{told['prompt']} tokens under 3 policies" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "report.txt"]


def test_three_policies_are_compared_if_none_is_named(
    run: Callable[..., Ran], tiny_folder: Path, prompt: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    assert run("explore", tiny_folder, "--prompt-file", prompt, "-o", page, "--new-tokens", 1).code == 0
    told = header(page)
    assert [made["label"].partition(":")[0] for made in told["runs"]] == ["full", "snapkv", "h2o", "streamingllm"]
    assert told["prompt"] == len(TEXT)


def test_a_question_alone_will_do(run: Callable[..., Ran], tiny_folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run("explore", tiny_folder, "Why?", "-o", page, "--new-tokens", 1, "--policy", "full").code == 0
    assert [made["label"] for made in header(page)["runs"]] == ["full"]


def test_the_page_says_what_became_of_a_budget(run: Callable[..., Ran], tiny_folder: Path, tmp_path: Path) -> None:
    page, text = tmp_path / "page.html", "Why was it that we met?" * 2
    policies = ("snapkv:budget=0.25", "h2o", "tova:budget=20", "full")
    args = [word for policy in policies for word in ("--policy", policy)]
    assert run("explore", tiny_folder, text, "-o", page, "--new-tokens", 2, *args).code == 0
    assert [made["notes"] for made in header(page)["runs"]] == [
        [],
        [
            "0.25 of the prompt is 11 tokens, under the 36 that the policy protects whatever their score, "
            "so the budget is 36."
        ],
        ["Nothing was evicted: the budget is 1,024 tokens a KV head, and the prompt has 46."],
        [],
    ]
    short = run("explore", tiny_folder, "Why not?", "-o", page, "--new-tokens", 2, "--policy", "full")
    assert "tokens under 1 policy;" in short.err


@pytest.mark.smollm2
def test_a_single_question_goes_to_the_default_model(
    run: Callable[..., Ran], smollm2: tuple[Any, Any], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    assert run("explore", "Why?", "-o", page, "--new-tokens", 1, "--policy", "full").code == 0
    assert header(page)["model"] == "SmolLM2-135M-Instruct"


def test_an_older_page_is_replaced_and_a_failure_leaves_it(
    run: Callable[..., Ran], tiny_folder: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    page.write_text("old")
    too_long = "x" * TRAINED + "?"
    assert run("explore", tiny_folder, too_long, "-o", page).code == 2
    assert page.read_text() == "old"
    assert run("explore", tiny_folder, "Why?", "-o", page, "--policy", "full", "--new-tokens", 1).code == 0
    assert page.read_text("utf-8").startswith("<!doctype html>")
    assert list(tmp_path.iterdir()) == [page]


BAD: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no prompt": (("MODEL",), ("no prompt", "--prompt-file FILE", "question")),
    "no prompt but a word": (("hello",), ("'hello' was taken as the model", "--prompt-file FILE")),
    "no prompt but a file": (("TMP/report.txt",), ("taken as the model", "--prompt-file TMP/report.txt")),
    "model of several words": (("our report", "Why?"), ("'our report' is no model name", "folder or a hub id")),
    "question empty": (("MODEL", "  "), ("question is empty", "leave it out")),
    "question of stray bytes": (("MODEL", "Wh\udce9?"), ("character 3 of the question", "UTF-8")),
    "model name empty": (("", "--prompt-file", "TMP/report.txt"), ("name is empty",)),
    "file missing": (("MODEL", "--prompt-file", "TMP/none.txt"), ("none.txt", "does not exist")),
    "policy unknown": (("MODEL", "Why?", "--policy", "snapkw"), ("snapkw", "snapkv")),
    "policy twice": (("MODEL", "Why?", "--policy", "tova", "--policy", "tova"), ("tova", "given twice", "once")),
    "no new tokens": (("MODEL", "Why?", "--new-tokens", "0"), ("--new-tokens", "1")),
    "chunk of none": (("MODEL", "Why?", "--prefill-chunk", "0"), ("--prefill-chunk", "1")),
    "too many new tokens": (("MODEL", "Why?", "--new-tokens", "5000"), ("--new-tokens", "4096")),
    "prompt too long": (("MODEL", "x" * TRAINED + "?"), (f"{TRAINED + 1} tokens", "--new-tokens", f"{TRAINED}")),
    "page a folder": (("MODEL", "Why?", "-o", "TMP"), ("no file that could be replaced",)),
    "page in no folder": (("MODEL", "Why?", "-o", "TMP/none/page.html"), ("none", "does not exist")),
    "budget too small for the rows": (("MODEL", "Why?", "--policy", "h2o:budget=10B"), ("10B", "too small")),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_a_sentence(
    run: Callable[..., Ran],
    tiny_folder: Path,
    prompt: Path,
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    args, parts = BAD[name]
    given = [arg.replace("MODEL", str(tiny_folder)).replace("TMP", str(tmp_path)) for arg in args]
    ran = run("explore", *given)
    assert ran.code == 2
    assert ran.out == ""
    complaint = ran.complaint()
    for part in parts:
        assert part.replace("TMP", str(tmp_path)) in complaint
    assert "hf download" not in complaint
    assert [path.name for path in tmp_path.iterdir()] == [prompt.name]


def test_a_prompt_may_be_fed_in_pieces(run: Callable[..., Ran], tiny_folder: Path, tmp_path: Path) -> None:
    page, question = tmp_path / "page.html", "What was it that we met, and where?"
    options = ("--policy", "h2o:budget=20", "--prefill-chunk", 9)
    assert run("explore", tiny_folder, question, *options, "-o", page, "--new-tokens", NEW).code == 0
    generated = run("generate", tiny_folder, question, *options, "--max-new-tokens", NEW)
    assert header(page)["runs"][1]["text"] == generated.out.strip()


def test_what_can_be_told_before_is_told_before_the_model_is_loaded(
    run: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = tmp_path / "no-model"
    assert "snapkw" in run("explore", nothing, "Why?", "--policy", "snapkw").complaint()
    assert "does not exist; make it" in run("explore", nothing, "Why?", "-o", tmp_path / "a/b.html").complaint()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "pip install 'kvwinnow[tools]'" in run("explore", nothing, "Why?").complaint()


def test_the_text_may_come_from_stdin(
    run: Callable[..., Ran], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"We met.")))
    page = tmp_path / "page.html"
    args = ("--prompt-file", "-", "-o", page, "--new-tokens", 1, "--policy", "full")
    assert run("explore", tiny_folder, *args).code == 0
    assert header(page)["prompt"] == len("We met.")
