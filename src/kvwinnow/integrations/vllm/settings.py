"""What a user asks for: the server's policy in ``additional_config``, a request's own in ``extra_args``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvwinnow.cache.memory import share_of
from kvwinnow.errors import PolicyError
from kvwinnow.integrations.vllm.plan import Terms
from kvwinnow.policies import Phase, Policy, parse
from kvwinnow.policies.whole_blocks import WholeBlocks
from kvwinnow.statistics import Kind

KEY = "kvwinnow"
"""The entry of ``additional_config`` and of a request's ``extra_args`` (``vllm_xargs`` in the OpenAI server)."""
NONE = "none"
SERVED = (Kind.NONE, Kind.WINDOW, Kind.MASS)


@dataclass(frozen=True)
class Settings:
    """What a server was started with.

    Attributes:
        policy: text form of the policy of requests that name none; "none": they stay uncompressed.
        prefill_budget: tokens each KV head may hold between the chunks of a prompt; None: the whole prompt stays until
            its end, and the policy chooses among all of it.
    """

    policy: str = NONE
    prefill_budget: int | None = None


def read_settings(additional_config: object) -> Settings | None:
    """The settings in vLLM's ``additional_config``; None: it does not mention kvwinnow.

    Raises:
        PolicyError: they are no table, an entry is unknown, or a value is refused.
    """
    given = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise PolicyError(
            f'additional_config["{KEY}"]={given!r} is a {type(given).__name__}; give a table such as '
            '{"policy": "snapkv:budget=1024"}'
        )
    known = tuple(Settings.__dataclass_fields__)
    for name in given:
        if name not in known:
            raise PolicyError(f'additional_config["{KEY}"] has no entry {name!r}; there are {", ".join(known)}')
    settings = Settings(**given)
    policy = served(settings.policy)
    chunk = settings.prefill_budget
    if chunk is not None:
        if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
            raise PolicyError(f"prefill_budget={chunk!r} must be a whole number of tokens, 1 or more")
        if policy is not None:
            _check_prefill_budget(policy, chunk)
    return settings


def request_policy(extra_args: Mapping[str, Any] | None, settings: Settings) -> str:
    """Text form of the policy a request goes by; "none": it stays uncompressed.

    Raises:
        PolicyError: the request names something that is no policy, or one that is not served.
    """
    given = (extra_args or {}).get(KEY)
    if given is None:
        return settings.policy
    served(given)
    return str(given)


def terms_of(extra_args: Mapping[str, Any] | None, settings: Settings, prompt: int, block: int) -> Terms | None:
    """What was agreed for a request, the same in the scheduler and in every worker; None: it stays uncompressed."""
    return _terms(request_policy(extra_args, settings), settings.prefill_budget, prompt, block)


@functools.lru_cache(maxsize=4096)
def _terms(text: str, prefill_budget: int | None, prompt: int, block: int) -> Terms | None:
    policy = served(text)
    if policy is None:
        return None
    limit = policy.limit
    assert isinstance(limit, int | float), "refused by served()"
    budget = limit if isinstance(limit, int) else share_of(policy, limit, prompt)
    # A request's own policy may keep more than the server's; no chunk then keeps less than the end of the prompt.
    between = None if prefill_budget is None else max(prefill_budget, budget)
    return Terms(WholeBlocks(policy, block), budget, prompt, block, between)


def served(text: object) -> Policy | None:
    """The policy of that text form; None for "none" and "full".

    Raises:
        PolicyError: it is no policy, or one that the paged cache does not serve.
    """
    if not isinstance(text, str):
        raise PolicyError(f'{KEY}={text!r} is no text; give that of a policy, "h2o:budget=512", or "none"')
    return _served(text)


@functools.lru_cache(maxsize=256)
def _served(text: str) -> Policy | None:
    if text == NONE:
        return None
    if not text.strip():
        raise PolicyError(f'{KEY}={text!r} names no policy; leave it out, or write "none" to stay uncompressed')
    policy = parse(text)
    if policy.limit is None:
        return None
    if isinstance(policy, WholeBlocks):
        raise PolicyError(f"policy={text}: vLLM evicts whole blocks anyway; give the policy inside, {policy.policy}")
    if isinstance(policy.limit, str):
        raise PolicyError(
            f"policy={text}: budget={policy.limit} is a size, and vLLM's pool has its own; give tokens (1024) or a "
            "share of the prompt (0.125)"
        )
    if policy.layered:
        raise PolicyError(
            f"policy={text}: {policy.name} gives layers different budgets, and all layers of a block of vLLM's pool "
            "are freed together; take one with the same budget in all layers, such as snapkv"
        )
    kinds = {policy.statistics(phase).kind for phase in Phase}
    if not kinds <= set(SERVED):
        raise PolicyError(
            f"policy={text}: {policy.name} scores by {next(iter(kinds - set(SERVED))).value}, which is not measured in "
            "vLLM; take snapkv, h2o, hybrid, streamingllm, slidingwindow, tova, keydiff or compose"
        )
    return policy


def _check_prefill_budget(policy: Policy, tokens: int) -> None:
    least = policy.limit if isinstance(policy.limit, int) else policy.minimum()
    if tokens < least:
        raise PolicyError(
            f"prefill_budget={tokens} is under the {least} tokens that {policy} keeps at the end of the prompt; "
            f"raise it to {least} or more"
        )
