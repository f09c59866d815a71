"""From the presses of kvpress (github.com/NVIDIA/kvpress) to policies, without importing kvpress.

A press is known by its class's name and read by its fields, as kvpress 0.5.5 has them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from kvwinnow.errors import PolicyError
from kvwinnow.policies import (
    H2O,
    TOVA,
    Compose,
    ExpectedAttention,
    Full,
    KeyDiff,
    Knorm,
    Policy,
    PyramidKV,
    Rolling,
    SnapKV,
    StreamingLLM,
)
from kvwinnow.policies.budget import Budget

Translation = Callable[[Any, Budget], Policy]

# What cuts prompts only, as all presses do that are in no DecodingPress.
_PROMPTS: dict[str, Translation] = {
    "SnapKVPress": lambda press, budget: SnapKV(budget, press.window_size, press.kernel_size, pool="avg", sinks=0),
    "PyramidKVPress": lambda press, budget: PyramidKV(
        budget, press.window_size, press.kernel_size, pool="avg", sinks=0, beta=press.beta
    ),
    "ExpectedAttentionPress": lambda press, budget: ExpectedAttention(
        budget,
        future=press.n_future_positions,
        sinks=press.n_sink,
        epsilon=press.epsilon,
        covariance=press.use_covariance,
        values=press.use_vnorm,
    ),
    "ObservedAttentionPress": lambda press, budget: _cutting(H2O(budget, recent=0, normalize="age")),
}

# What can evict while decoding too.
_ROLLING: dict[str, Callable[[Any, Budget], Rolling]] = {
    "KnormPress": lambda press, budget: Knorm(budget),
    "KeyDiffPress": lambda press, budget: KeyDiff(budget),
    "TOVAPress": lambda press, budget: TOVA(budget),
    "StreamingLLMPress": lambda press, budget: StreamingLLM(budget, sinks=press.n_sink),
}

_INSTEAD = {
    "AdaKVPress": "budgets differ by layer here, not by head; take SnapKV or PyramidKV",
    "CriticalAdaKVPress": "budgets differ by layer here, not by head; take SnapKV or PyramidKV",
    "BlockPress": "feed the prompt in chunks inside `with cache.prompt(length=n):` under the policy of its inner press",
    "ChunkPress": "feed the prompt in chunks inside `with cache.prompt(length=n):` under the policy of its inner press",
    "CompressionRatioDecodingPress": "a share is taken when a prompt ends; take a budget in tokens or bytes",
    "ComposedPress": "one policy cuts a prompt; to cut by one and decode by another take Compose",
    "KeyRerotationPress": "tokens keep their positions here; take the policy of its inner press",
    "PerLayerCompressionPress": "layers share one budget; take PyramidKV, whose layers differ",
    "ThinKPress": "no channels are dropped here; store keys in fewer bits with k_dtype='int4'",
}


def from_press(press: object, budget: Budget | None = None) -> Policy:
    """The policy that does what a press of kvpress does.

    A press for prompts keeps ``1 - compression_ratio`` of the prompt in each layer and evicts nothing while decoding;
    so does the policy, for all that differs otherwise see docs/from-kvpress.md.

    Args:
        press: a press of kvpress 0.5.5 or of the same fields.
        budget: in place of the press's own, see ``Policy.limit``; a PrefillDecodingPress that has two needs it.

    Returns:
        The policy, for ``CompressedCache(model, from_press(press))``; ``Full`` for a press that compresses nothing.

    Raises:
        PolicyError: not a press, one that no policy stands for, or one with two budgets.
    """
    name = type(press).__name__
    if not name.endswith("Press"):
        raise PolicyError(f"{press!r} is a {name} and no press; give one, such as SnapKVPress(compression_ratio=0.5)")
    try:
        return _from_press(name, press, budget)
    except AttributeError as error:
        raise PolicyError(
            f"{name} has no field {error.name!r}, which kvpress 0.5.5 gives it; make the policy by hand, see "
            "docs/from-kvpress.md"
        ) from error


def _from_press(name: str, press: Any, budget: Budget | None) -> Policy:
    if name == "PrefillDecodingPress":
        return _prefill_and_decoding(press, budget)
    if name == "DecodingPress":
        size = press.target_size if budget is None else budget
        return Compose(size, Full(), _decoding(press, size))
    if name not in _PROMPTS and name not in _ROLLING:
        instead = _INSTEAD.get(name, f"these are: {', '.join([*_PROMPTS, *_ROLLING, 'DecodingPress'])}")
        raise PolicyError(f"{name} is no press that a policy stands for; {instead}")
    ratio = press.compression_ratio
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio < 1:
        raise PolicyError(f"{name}: compression_ratio={ratio!r} must be a number in [0, 1), the share that is dropped")
    if ratio == 0 and budget is None:
        return Full()
    return _prompts(name, press, 1 - ratio if budget is None else budget)


def _prompts(name: str, press: Any, budget: Budget) -> Policy:
    return _PROMPTS[name](press, budget) if name in _PROMPTS else _cutting(_ROLLING[name](press, budget))


def _cutting(policy: Rolling) -> Policy:
    """The policy for prompts alone."""
    return Compose(policy.budget, policy, Full())


def _decoding(press: Any, budget: Budget) -> Rolling:
    base = press.base_press
    name = type(base).__name__
    if name not in _ROLLING:
        raise PolicyError(
            f"DecodingPress with {name} is no press that a policy stands for; while decoding take "
            f"{', '.join(_ROLLING)}, or Compose with decode=H2O(...)"
        )
    return dataclasses.replace(_ROLLING[name](base, budget), evict_every=press.compression_interval)


def _prefill_and_decoding(press: Any, budget: Budget | None) -> Policy:
    prompt, decoding = press.prefilling_press, press.decoding_press
    if prompt is None or decoding is None:
        only = decoding if prompt is None else prompt
        return Full() if only is None else from_press(only, budget)
    if budget is None:
        share = 1 - getattr(prompt, "compression_ratio", 0.0)
        raise PolicyError(
            f"PrefillDecodingPress keeps {share:.3g} of the prompt and {decoding.target_size} tokens while decoding, "
            f"and a policy has one budget for both; say which, as in from_press(press, budget={decoding.target_size})"
        )
    cutting = from_press(prompt, budget)
    inner = cutting.prompt if isinstance(cutting, Compose) else cutting
    return Compose(budget, inner, _decoding(decoding, budget))
