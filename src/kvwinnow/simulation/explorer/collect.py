"""Runs a model on one prompt with the cache of each policy, and collects what they did."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from kvwinnow.errors import KvwinnowError
from kvwinnow.evaluation.generation import greedy
from kvwinnow.integrations.transformers import CompressedCache
from kvwinnow.policies import Full, Policy
from kvwinnow.simulation.explorer.exploration import LONGEST_ANSWER, Exploration, Run
from kvwinnow.simulation.explorer.pieces import pieces
from kvwinnow.simulation.explorer.watch import Watch
from kvwinnow.textform import show_value

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_POLICIES = ("snapkv:budget=0.125", "h2o:budget=0.125", "streamingllm:budget=0.125")

Progress = Callable[[str], None]


def different(policies: Sequence[Policy]) -> list[Policy]:
    """The policies to compare with the full cache, which needs no naming.

    Raises:
        KvwinnowError: one is given twice.
    """
    chosen: list[Policy] = []
    for policy in policies:
        if policy in chosen:
            raise KvwinnowError(f"policy {str(policy)!r} is given twice; name each once, or change its parameters")
        if not isinstance(policy, Full):
            chosen.append(policy)
    return chosen


def explore(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    policies: Sequence[Policy],
    *,
    name: str,
    new_tokens: int,
    progress: Progress | None = None,
) -> Exploration:
    """Answer one prompt greedily with the full cache and with the cache of each policy.

    Args:
        model: one that ``CompressedCache`` serves.
        tokenizer: the model's.
        ids: (1, n) the prompt.
        policies: all different, see ``different``; the full cache comes first whether named or not.
        name: what the user calls the model.
        new_tokens: length of the answers at most, 1 to ``LONGEST_ANSWER``; an end token ends one before.
        progress: called with a few words at each stage.

    Raises:
        KvwinnowError: a number out of range, a policy given twice, or one that cannot obey its budget here.
        UnsupportedModelError: the model's structure is not served.
    """
    if not 1 <= new_tokens <= LONGEST_ANSWER:
        raise KvwinnowError(f"an answer of {new_tokens} tokens cannot be shown; ask for 1 to {LONGEST_ANSWER:,}")
    progress = progress or (lambda stage: None)
    runs = []
    for policy in (Full(), *different(policies)):
        progress(f"answering with {policy}")
        runs.append(_run(model, tokenizer, ids, policy, new_tokens))
    cache = CompressedCache(model, Full())
    return Exploration(
        model=name,
        tokens=pieces(tokenizer, ids[0].tolist()),
        sliding=cache.structure.sliding,
        runs=tuple(runs),
    )


def label(policy: Policy) -> str:
    """A policy's text form without the parameters that are left at their defaults, its budget aside."""
    told = [
        f"{field.name}={show_value(value)}"
        for field in dataclasses.fields(policy)
        if (value := getattr(policy, field.name)) is not None and (field.name == "budget" or value != field.default)
    ]
    return f"{policy.name}:{','.join(told)}" if told else policy.name


def _run(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: Tensor, policy: Policy, new_tokens: int
) -> Run:
    cache = CompressedCache(model, policy)
    watch = Watch(cache, tokens=ids.shape[1] + new_tokens)
    answer, nbytes = [], []
    for token in greedy(model, tokenizer, cache, ids, max_new_tokens=new_tokens):
        answer.append(token)
        nbytes.append(cache.nbytes())
        watch.step += 1  # the next forward call takes this token in
    tokens = ids.shape[1] + len(answer) - 1
    layers: Any = cache.layers
    text: Any = tokenizer.decode(answer, skip_special_tokens=True)
    return Run(
        policy=str(policy),
        label=label(policy),
        evicted=watch.evicted(tokens),
        scores=watch.scores(tokens),
        budgets=tuple(layer.budgets[0] for layer in layers),
        nbytes=np.array(nbytes, dtype=np.int64),
        answer=pieces(tokenizer, answer),
        text=text.strip(),
    )
