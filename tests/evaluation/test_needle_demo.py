"""The main job: on the real model, and what its verdict says when something is wrong."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from kvwinnow.cli import main
from kvwinnow.errors import KvwinnowError
from kvwinnow.evaluation.generation import Answer, _Text, answer, encode
from kvwinnow.evaluation.needle_demo import CONTENDERS, EXPECTED, FACT, QUESTION, Outcome, is_right, make_task
from kvwinnow.evaluation.render import outcomes_table
from kvwinnow.integrations.transformers import CacheReport, CompressedCache
from tests.cli.conftest import byte_tokenizer
from tests.models import tiny_model

FULL, INT4 = CONTENDERS[0], CONTENDERS[-1]


def given(text: str = FACT, *, ratio: float = 25.0, new_tokens: int = 17) -> Answer:
    report = CacheReport("p", "k", "v", tokens_seen=3044, tokens_kept=394, nbytes=1000, full_nbytes=int(1000 * ratio))
    return Answer(text, 3028, new_tokens, 5.0, 2.0, report)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (FACT, True),
        ("It is Rhubarb\nCustard!", True),
        ("rhubarb-custard", True),
        ("rhubarb crumble, or custard", False),
        ("", False),
    ],
)
def test_right_answers(text: str, right: bool) -> None:
    assert is_right(text) is right


def test_verdicts() -> None:
    assert Outcome(FULL, given(ratio=1.0), right=True).fault() is None
    assert Outcome(INT4, given(), right=True).fault() is None
    wrong = Outcome(FULL, given("apple pie"), right=False).fault()
    assert wrong is not None
    for part in (FULL.label, "'apple pie'", EXPECTED):
        assert part in wrong
    large = Outcome(INT4, given(ratio=19.9), right=True).fault()
    assert large is not None
    for part in (INT4.label, "19.9", "20 times"):
        assert part in large
    # The baselines may be wrong: that they fail is what the table shows.
    assert all(Outcome(c, given("no"), right=False).fault() is None for c in CONTENDERS if not c.must_answer)


def test_contenders_are_those_of_the_readme() -> None:
    assert [c.label for c in CONTENDERS if c.must_answer] == ["full cache", "SnapKV", "SnapKV + int4"]
    assert {getattr(c.policy, "budget", None) for c in CONTENDERS} == {None, 0.125}


def test_speed() -> None:
    assert given().tokens_per_second == 8.0
    assert given(new_tokens=1).tokens_per_second is None
    assert outcomes_table([Outcome(FULL, given(new_tokens=1), right=False)]).row_count == 1


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(KvwinnowError, match="no tokens"):
        encode(byte_tokenizer(), "")


def test_an_answer_ends_at_an_end_token_of_the_model_or_of_its_tokenizer() -> None:
    model, tokenizer = tiny_model(vocab_size=257, trained=128), byte_tokenizer()
    ids = encode(tokenizer, "Why?")

    def new_tokens() -> int:
        return answer(model, tokenizer, CompressedCache(model, "full"), ids, max_new_tokens=20).new_tokens

    made = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :].tolist()
    assert new_tokens() == 20
    third = made.index(made[2]) + 1
    model.generation_config.eos_token_id = [made[2], 256]
    assert new_tokens() == third
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(made[2])
    assert new_tokens() == third


def test_text_arrives_in_pieces_that_make_up_the_answer() -> None:
    model, tokenizer = tiny_model(vocab_size=257, trained=512), byte_tokenizer()
    pieces: list[str] = []
    cache = CompressedCache(model, "streamingllm:budget=30")
    ids = encode(tokenizer, "Why is the sky blue, and why not green?")
    made = answer(model, tokenizer, cache, ids, max_new_tokens=60, on_text=pieces.append)
    assert "".join(pieces).strip() == made.text
    assert made.report == cache.report()
    assert made.report.tokens_kept == 30
    assert made.first_token_seconds > 0


def test_pieces_hold_whole_letters() -> None:
    tokenizer = byte_tokenizer()
    pieces: list[str] = []
    text: Any = _Text(tokenizer, pieces.append)
    for token in tokenizer("One café, two.").input_ids:
        text.put(torch.tensor([token]))
        assert "\ufffd" not in "".join(pieces)  # é takes two tokens
    assert len(pieces) > 1  # words under transformers 5.16, single letters under 5.24
    text.end()
    assert "".join(pieces) == "One café, two."


@pytest.mark.smollm2
def test_the_task_is_the_same_every_time_and_about_3000_tokens(smollm2: tuple[Any, Any]) -> None:
    _, tokenizer = smollm2
    task = make_task(tokenizer)
    assert 2950 <= task.tokens <= 3050
    assert torch.equal(task.ids, make_task(tokenizer).ids)
    text = tokenizer.decode(task.ids[0])
    assert text.count(EXPECTED) == 1
    assert text.endswith(f"{QUESTION}<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.smollm2
@pytest.mark.slow
def test_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    # A row's figures stand on its first line, and the answer may go on below.
    figures = re.compile(r"(right|wrong) +([\d,]+) +([\d,]+) +([\d.]+)x +([\d.]+) s +([\d.]+)$")
    rows = {}
    for line in map(str.rstrip, captured.out.splitlines()):
        if found := figures.search(line):
            (label,) = (c.label for c in CONTENDERS if re.match(re.escape(c.label) + " {2,}", line))
            rows[label] = found.groups()
    assert list(rows) == [contender.label for contender in CONTENDERS]
    ratios = {label: float(cells[3]) for label, cells in rows.items()}
    assert ratios["full cache"] == pytest.approx(1.0, abs=0.05)
    assert ratios["SnapKV + int4"] >= 20
    assert all(rows[c.label][0] == "right" for c in CONTENDERS if c.must_answer)
    assert rows["sliding window"][0] == "wrong"  # the fact lies far outside of it


def test_outcomes_are_plain_data() -> None:
    assert dataclasses.is_dataclass(Outcome)
    assert dataclasses.asdict(given())["report"]["nbytes"] == 1000
