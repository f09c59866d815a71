"""The main job: one long prompt with a fact hidden in it, one question, and what each kind of cache answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwinnow.evaluation.document import help_chapters, hide
from kvwinnow.evaluation.generation import Answer, answer, encode
from kvwinnow.integrations.transformers import CompressedCache
from kvwinnow.policies import H2O, Full, Policy, SlidingWindow, SnapKV, StreamingLLM

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Chosen once among some dozen facts by the full cache's answers alone: at depths of 30, 45 and 60 per cent each token
# of this answer's two words beats the next best by more than 3 in logits. Most others the small default model answers
# with a narrow margin or not at all, whatever the cache.
FACT = "The favourite dessert of the mayor of Harlow is rhubarb custard."
QUESTION = "What is the favourite dessert of the mayor of Harlow?"
EXPECTED = "rhubarb custard"
DOCUMENT_TOKENS = 2930  # about 3,000 with the fact, the question and the chat template
DEPTH = 0.45
SHARE = 0.125
MAX_NEW_TOKENS = 24
SMALLEST_RATIO = 20.0

_WARM_UP_TOKENS = 256


@dataclass(frozen=True)
class Contender:
    """A kind of cache that takes the test.

    Attributes:
        label: what the table calls it.
        policy: which tokens stay.
        dtype: how keys and values are stored.
        must_answer: whether the test fails if its answer is wrong.
        smallest_ratio: how many times smaller than a full bf16 cache it must be.
    """

    label: str
    policy: Policy
    dtype: str = "bf16"
    must_answer: bool = False
    smallest_ratio: float = 0.0


CONTENDERS = (
    Contender("full cache", Full(), must_answer=True),
    Contender("sliding window", SlidingWindow(budget=SHARE)),
    Contender("StreamingLLM", StreamingLLM(budget=SHARE)),
    Contender("H2O", H2O(budget=SHARE)),
    Contender("SnapKV", SnapKV(budget=SHARE), must_answer=True),
    Contender("SnapKV + int4", SnapKV(budget=SHARE), "int4:group=64", must_answer=True, smallest_ratio=SMALLEST_RATIO),
)


@dataclass(frozen=True)
class Outcome:
    """What one contender answered."""

    contender: Contender
    answer: Answer
    right: bool

    def fault(self) -> str | None:
        """Why the demo fails because of it; None: it does not."""
        if self.contender.must_answer and not self.right:
            return f"{self.contender.label} answered {self.answer.text!r}, and the right answer is {EXPECTED!r}"
        if self.answer.report.ratio < self.contender.smallest_ratio:
            return (
                f"{self.contender.label} is {self.answer.report.ratio:.1f} times smaller than the full bf16 cache, and "
                f"at least {self.contender.smallest_ratio:g} times is promised"
            )
        return None


@dataclass(frozen=True)
class Task:
    """The prompt of the test and its figures."""

    ids: Tensor
    depth: float

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]


def is_right(text: str) -> bool:
    """Whether an answer names the expected words, whatever its case, line breaks and punctuation."""
    return EXPECTED in " ".join(re.findall(r"\w+", text.lower()))


def make_task(tokenizer: PreTrainedTokenizerBase) -> Task:
    """The test's prompt in the model's chat template; the same on every run.

    Raises:
        KvwinnowError: Python's help texts, of which the document is made, are not there.
    """
    document = hide(FACT, tokenizer, tokens=DOCUMENT_TOKENS, depth=DEPTH, chapters=help_chapters())
    return Task(encode(tokenizer, f"{document}\n\n{QUESTION}"), DEPTH)


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Iterator[Outcome]:
    """Let every contender answer, one after the other; each outcome is yielded as soon as it is known.

    One short run comes first and is not counted, so that what torch sets up once burdens no contender.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        task: what ``make_task`` returned.
        on_stage: called with a few words when a stage begins.
    """
    on_stage("warming up")
    warm_up = CompressedCache(model, CONTENDERS[-1].policy, dtype=CONTENDERS[-1].dtype)
    answer(model, tokenizer, warm_up, task.ids[:, :_WARM_UP_TOKENS], max_new_tokens=4)
    for contender in CONTENDERS:
        yield _outcome(model, tokenizer, task, contender, on_stage)


def _outcome(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    contender: Contender,
    on_stage: Callable[[str], None],
) -> Outcome:
    on_stage(f"{contender.label}: reading {task.tokens:,} tokens")
    given = answer(
        model,
        tokenizer,
        CompressedCache(model, contender.policy, dtype=contender.dtype),
        task.ids,
        max_new_tokens=MAX_NEW_TOKENS,
        on_text=lambda piece: on_stage(f"{contender.label}: answering"),
    )
    return Outcome(contender, given, is_right(given.text))
