"""Runs a model on one prompt with the cache of each policy, and collects what they did."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvwinnow.cache.memory import layers_nbytes, part_of
from kvwinnow.errors import KvwinnowError, PolicyError
from kvwinnow.evaluation.generation import greedy
from kvwinnow.integrations.transformers import CompressedCache
from kvwinnow.integrations.transformers.structure import inspect_model
from kvwinnow.integrations.transformers.unwrap import unwrap
from kvwinnow.policies import Full, Policy
from kvwinnow.simulation.explorer.exploration import LONGEST_ANSWER, NEVER, Exploration, Run
from kvwinnow.simulation.explorer.watch import Watch
from kvwinnow.simulation.record import record
from kvwinnow.simulation.retained import retained_mass
from kvwinnow.simulation.run import NEVER as NEVER_EVICTED
from kvwinnow.simulation.token_texts import token_texts
from kvwinnow.simulation.trace import Trace
from kvwinnow.textform import given_to_nested, show_value

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_POLICIES = ("snapkv:budget=0.125", "h2o:budget=0.125", "streamingllm:budget=0.125")

FORETOLD = 60
"""Lengths of a prompt at most for which the bytes are foretold."""

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
    prefill_chunk: int | None = None,
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
        prefill_chunk: feed the prompt in pieces of at most this many tokens, which takes less memory; policies that
            evict as it comes decide differently then. None: in one piece.
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
        runs.append(_run(model, tokenizer, ids, policy, new_tokens, prefill_chunk))
    sliding = inspect_model(unwrap(model)).sliding
    if None in sliding:  # else no layer follows a policy
        progress("recording what the full cache attends to")
        trace = record(model, ids, new_tokens=new_tokens, tokenizer=tokenizer, name=name)
        runs = [dataclasses.replace(run, retained=retained(trace, run, len(sliding))) for run in runs]
    return Exploration(
        model=name,
        dtype=str(model.dtype).removeprefix("torch."),
        tokens=token_texts(tokenizer, ids[0].tolist()),
        sliding=sliding,
        runs=tuple(runs),
    )


def retained(trace: Trace, run: Run, layers: int) -> NDArray[np.float32]:
    """(layers, H) float32: see ``Run.retained``.

    Args:
        trace: what the full cache attended to, of the layers that follow a policy.
        run: whose evictions count. Where its answer ended before the trace's, nothing was evicted any more.
        layers: number of all layers.
    """
    following, prompt, n = list(trace.layers), trace.prompt, len(trace.tokens)
    steps = run.evicted[following, :, :n].astype(np.int32)
    come = np.full((*steps.shape[:2], n), NEVER_EVICTED, dtype=np.int32)
    come[:, :, : steps.shape[2]] = np.where(steps == NEVER, NEVER_EVICTED, prompt + steps)
    shares = np.full((layers, steps.shape[1]), np.nan, dtype=np.float32)
    shares[following] = retained_mass(trace, come)
    return shares


def label(policy: Policy) -> str:
    """A policy's text form without the parameters that are left at their defaults, its budget aside."""
    fields = dataclasses.fields(policy)
    try:
        plain: Any = dataclasses.replace(
            policy, **{field.name: field.default for field in fields if field.name != "budget"}
        )
    except KvwinnowError:  # the defaults do not go with this budget
        plain = type(policy)
    told = [
        f"{field.name}={show_value(value, but=given_to_nested(policy))}"
        for field in fields
        if (value := getattr(policy, field.name)) is not None
        and (field.name == "budget" or value != getattr(plain, field.name, None))
    ]
    return f"{policy.name}:{','.join(told)}" if told else policy.name


def _run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    policy: Policy,
    new_tokens: int,
    prefill_chunk: int | None,
) -> Run:
    cache = CompressedCache(model, policy)
    watch = Watch(cache, tokens=ids.shape[1] + new_tokens)
    answer, nbytes = [], []
    for token in greedy(model, tokenizer, cache, ids, max_new_tokens=new_tokens, prefill_chunk=prefill_chunk):
        answer.append(token)
        nbytes.append(cache.nbytes())
        watch.step += 1  # the next forward call takes this token in
    tokens = ids.shape[1] + len(answer) - 1
    layers: Any = cache.layers
    text: Any = tokenizer.decode(answer, skip_special_tokens=True)
    evicted = watch.evicted(tokens)
    budgets = tuple(layer.budgets[0] for layer in layers)
    following = [layer for layer, window in enumerate(cache.structure.sliding) if window is None]
    idle = bool((evicted[following] == NEVER).all())
    return Run(
        policy=str(policy),
        label=label(policy),
        evicted=evicted,
        scores=watch.scores(tokens),
        budgets=budgets,
        nbytes=np.array(nbytes, dtype=np.int64),
        answer=token_texts(tokenizer, answer),
        text=text.strip(),
        foretold=foretold(cache, ids.shape[1]),
        notes=tuple(_notes(policy, [budgets[layer] for layer in following], ids.shape[1], idle)),
    )


def _notes(policy: Policy, budgets: Sequence[int | None], prompt: int, idle: bool) -> Iterator[str]:
    """Sentences on the budget, see ``Run.notes``.

    Args:
        policy: whose budget it is.
        budgets: of the layers that follow it, as resolved.
        prompt: tokens.
        idle: whether these layers evicted nothing.
    """
    limit, least = policy.limit, policy.minimum()
    given = [budget for budget in budgets if budget is not None]
    if limit is None or not given:
        return
    share = part_of(limit, prompt) if isinstance(limit, float) else least
    if share < least:
        yield (
            f"{limit:.4g} of the prompt is {share:,} tokens, under the {least:,} that the policy "
            f"protects whatever their score, so the budget is {least:,}."
        )
    if idle:
        yield f"Nothing was evicted: the budget is {max(given):,} tokens a KV head, and the prompt has {prompt:,}."


def foretold(cache: CompressedCache, prompt: int) -> tuple[tuple[int, int], ...]:
    """Pairs of tokens and bytes, see ``Run.foretold``: what the cache of one row would take after shorter prompts.

    Args:
        cache: one that has run, so that the dtypes it stores are known.
        prompt: tokens of the longest prompt, 1 or more.
    """
    shares = np.linspace(0, 1, FORETOLD) ** 1.5  # what is within a budget lies near the start
    found = []
    for tokens in sorted({int(n) for n in np.rint(1 + (prompt - 1) * shares)}):
        with contextlib.suppress(PolicyError):
            found.append((tokens, sum(layers_nbytes(cache.policy, cache.budgets.layers, batch=1, prompt=tokens))))
    return tuple(found)
