"""``kvwinnow generate`` writes what the model generates, to stdout and nowhere else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvwinnow.integrations.loading import load
from tests.cli.conftest import TRAINED, Ran, program

NEW = 12


def plain(folder: Path, prompt: str) -> str:
    """What the uncompressed model answers."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    _, tokenizer = load(str(folder))
    ids = torch.tensor([tokenizer(prompt).input_ids])
    made = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    text: str = tokenizer.decode(made[0, ids.shape[1] :])
    return text


@pytest.mark.parametrize("chunk", [None, 1, 7, 1000, 1 << 63])
def test_text_of_the_uncompressed_model(run: Callable[..., Ran], tiny_folder: Path, chunk: int | None) -> None:
    chunks = [] if chunk is None else ["--prefill-chunk", chunk]
    ran = run("generate", tiny_folder, "Why is the sky blue?", "--policy", "full", "--max-new-tokens", NEW, *chunks)
    assert ran.code == 0
    assert ran.out == plain(tiny_folder, "Why is the sky blue?") + "\n"


def test_the_file_comes_before_the_question(run: Callable[..., Ran], tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "report.txt").write_bytes(b"\xef\xbb\xbfWe met.\nWe left.\n")
    ran = run("generate", tiny_folder, "Why?", "--prompt-file", tmp_path / "report.txt", "--max-new-tokens", NEW)
    assert ran.out == plain(tiny_folder, "We met.\nWe left.\n\nWhy?") + "\n"


def test_the_file_may_lie_in_the_home_folder(
    run: Callable[..., Ran], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "report.txt").write_text("We met.")
    ran = run("generate", tiny_folder, "Why?", "--prompt-file", "~/report.txt", "--max-new-tokens", NEW)
    assert ran.out == plain(tiny_folder, "We met.\n\nWhy?") + "\n"


def test_a_scaled_model_takes_its_whole_length(run: Callable[..., Ran], tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_folder, tmp_path / "scaled")
    config = json.loads((tiny_folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    (tmp_path / "scaled" / "config.json").write_text(json.dumps(config))
    args = ("generate", tmp_path / "scaled", "--policy", "streamingllm:budget=64", "--max-new-tokens", 2)
    assert run(*args, "x" * (2 * TRAINED - 2)).code == 0
    assert f"serves {2 * TRAINED:,}" in run(*args, "x" * (2 * TRAINED - 1)).complaint()


def test_the_file_may_be_stdin(tiny_folder: Path) -> None:
    ran = program("generate", tiny_folder, "Why?", "--prompt-file", "-", "--max-new-tokens", NEW, stdin="We met.")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == plain(tiny_folder, "We met.\n\nWhy?") + "\n"


def test_stats_go_to_stderr(run: Callable[..., Ran], tiny_folder: Path) -> None:
    args = ("generate", tiny_folder, "x" * 100, "--policy", "streamingllm:budget=40", "--kv-dtype", "int8")
    without, ran = run(*args, "--max-new-tokens", NEW), run(*args, "--max-new-tokens", NEW, "--stats")
    assert ran.out == without.out
    figures = dict(
        (cell.strip() for cell in line.strip("│").split("│")) for line in ran.err.splitlines() if line.startswith("│")
    )
    assert figures["policy"].startswith("streamingllm:budget=40")
    assert figures["prompt, new tokens"] == f"100, {NEW}"
    assert int(figures["tokens kept per head"]) == 40
    assert float(figures["times smaller than full bf16"].rstrip("x")) > 1
    assert figures["first token after"].endswith(" s")


@pytest.mark.smollm2
def test_the_default_model_answers_in_its_chat_template(run: Callable[..., Ran], smollm2: tuple[Any, Any]) -> None:
    ran = run("generate", "What is the capital of France?", "--system", "You answer questions.", "--kv-dtype", "bf16")
    assert ran.code == 0
    assert "Paris" in ran.out
    assert "<|im_end|>" not in ran.out
