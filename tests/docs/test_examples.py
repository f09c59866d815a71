"""The documentation's examples run as they stand."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvwinnow import CompressedCache, parse
from kvwinnow.policies import POLICIES
from tests.models import tiny_model
from tests.prose import GETTYSBURG

ROOT = Path(__file__).parents[2]


def code_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.M | re.S)


@pytest.fixture
def strided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's policy, written to a file and registered as the page tells."""
    (code,) = code_blocks("docs/adding-a-policy.md")
    (tmp_path / "strided_example.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "strided_example", raising=False)
    monkeypatch.setitem(POLICIES, "strided", importlib.import_module("strided_example").Strided)


@pytest.mark.usefixtures("strided")
def test_the_example_policy_keeps_what_its_text_says() -> None:
    policy = parse("strided:budget=40,sinks=2,recent=8,stride=3")
    assert parse(str(policy)) == policy

    model = tiny_model()
    cache = CompressedCache(model, policy)
    ids = torch.arange(3, 103).unsqueeze(0)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    # 2 sinks, the 8 latest, and 30 of the multiples of 3 between, the lowest first: 3, 6, ..., 90 (0 is a sink).
    expected = sorted({0, 1} | set(range(92, 100)) | set(range(3, 91, 3)))
    for head in cache.positions(0)[0]:
        assert sorted(head[head >= 0].tolist()) == expected

    model.generate(ids, past_key_values=CompressedCache(model, policy), max_new_tokens=20, eos_token_id=None)


@pytest.mark.usefixtures("strided")
def test_the_example_policy_refuses_a_budget_it_cannot_obey() -> None:
    with pytest.raises(ValueError, match="budget=19 is under the 20 tokens"):
        parse("strided:budget=19")


def test_the_examples_of_loading_run_one_after_another(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    names = {"AutoModelForCausalLM": AutoModelForCausalLM, "CompressedCache": CompressedCache, "torch": torch}
    names |= {"folder": tmp_path, "ids": torch.arange(3, 53).unsqueeze(0)}
    mapped, quantised, adapted = code_blocks("docs/loading.md")
    exec(mapped, names)
    exec(quantised, names)
    exec(adapted, names)
    assert names["cache"].report().tokens_seen == 57
    assert names["cache"].report().tokens_kept == 50 // 4


@pytest.mark.smollm2
@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_the_examples_of_generation_run_one_after_another(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    inputs = tokenizer(["Where is Berlin?"], return_tensors="pt")
    cache = CompressedCache(model, "h2o:budget=200")
    names = {"model": model, "tokenizer": tokenizer, "inputs": inputs, "cache": cache, "torch": torch}
    beams, pipelines = code_blocks("docs/generation.md")
    exec(beams, names)
    assert cache.batch_size == 1
    exec(pipelines, names)
    assert cache.report().tokens_seen > 60


@pytest.mark.smollm2
def test_the_pipeline_in_two_turns_answers_after_the_context_was_cut(smollm2: tuple[Any, Any]) -> None:
    (code,) = code_blocks("docs/from-kvpress.md")
    model, tokenizer = smollm2
    press = dataclasses.make_dataclass("KnormPress", ["compression_ratio"])(0.25)
    names = {
        "model": model,
        "tokenizer": tokenizer,
        "press": press,
        "context": "The capital of Harlow is Ostrava. " * 8,
        "question": "What is the capital of Harlow?",
    }
    exec(code, names)
    cache, ids = names["cache"], names["ids"]
    assert isinstance(names["answer"], str)
    assert names["answer"]
    assert cache.report().tokens_seen >= ids.shape[1]
    # A quarter of context and question is gone, and nothing of the answer.
    kept, seen = cache.report().tokens_kept, cache.report().tokens_seen
    assert kept == int(ids.shape[1] * 0.75) + seen - ids.shape[1]


@pytest.mark.smollm2
def test_a_document_is_digested_once_as_the_page_tells(
    smollm2: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, tokenizer = smollm2
    digest, load = code_blocks("docs/documents.md")
    questions = ["Who brought forth a new nation?", "What shall not perish?"]
    names: dict[str, Any] = {"model": model, "tokenizer": tokenizer, "report": GETTYSBURG, "questions": questions}
    exec(digest, names)
    assert len(set(names["answers"])) == 2
    saved = names["cache"]
    exec(load, names)
    assert names["cache"] is not saved
    assert torch.equal(names["cache"].positions(3), saved.positions(3))


@pytest.mark.smollm2
def test_the_readmes_digested_document(
    smollm2: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, tokenizer = smollm2
    (code,) = [block for block in code_blocks("README.md") if "fork()" in block]
    document = tokenizer(GETTYSBURG, return_tensors="pt").input_ids
    cache = CompressedCache(model, "snapkv:budget=0.5", dtype="fp8")
    asked = torch.cat([document, document[:, :9]], dim=1)
    names: dict[str, Any] = {"model": model, "document": document, "asked": asked, "cache": cache, "torch": torch}
    exec(f"from kvwinnow import CompressedCache\n{code}", names)
    assert torch.equal(names["answer"][:, : asked.shape[1]], asked)


@pytest.mark.smollm2
def test_a_page_is_made_from_python_as_the_page_tells(
    smollm2: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, tokenizer = smollm2
    (code,) = code_blocks("docs/exploring.md")
    ids = tokenizer(GETTYSBURG, return_tensors="pt").input_ids
    names: dict[str, Any] = {"model": model, "tokenizer": tokenizer, "ids": ids}
    exec(code, names)
    assert (tmp_path / "page.html").read_text("utf-8").startswith("<!doctype html>")
    assert (names["kept"].sum(-1) == ids.shape[1] // 2).all()
