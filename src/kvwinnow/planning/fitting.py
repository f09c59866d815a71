"""What fits: the longest context, the number of requests, the budget that is left for a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvwinnow.cache.memory import largest
from kvwinnow.codecs import parse_codec
from kvwinnow.errors import CodecError, KvwinnowError, PolicyError
from kvwinnow.planning.architecture import Architecture
from kvwinnow.planning.caches import Cache, CompressedCachePlan, FullCache, with_budget
from kvwinnow.policies import Full, Policy, SnapKV

LONGEST = 2**30
"""Tokens beyond which no context is tried: a cache that fits this fits any."""

STORED = (("fp8", "fp8"), ("int8", "int8"), ("int8", "int4"), ("int4", "int4"))
"""How keys and values may be stored, beside the model's own dtype, from the safest to the smallest."""

_COUNTS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Load:
    """What a cache is asked to hold.

    Attributes:
        batch: rows that are read together.
        new: tokens decoded after each row's prompt.
        chunk: tokens of each row that are read at once; None: the whole prompt.
    """

    batch: int = 1
    new: int = 0
    chunk: int | None = None

    def needed(self, cache: Cache, context: int) -> int:
        """The most bytes of one GPU that the cache takes, from the prompt's first token to the last decoded one."""
        peak = cache.peak(context, batch=self.batch, chunk=self.chunk)
        return max(peak, cache.held(context, batch=self.batch, new=self.new))


@dataclass(frozen=True)
class Option:
    """A way to make a context fit.

    Attributes:
        k_dtype: how keys are stored.
        v_dtype: how values are stored.
        policy: its text form.
        tokens: the largest budget that fits, in tokens per KV head; None: every token that layers see fits.
        share: the same as a share of all tokens, prompt and new ones; 1 for every token.
        nbytes: that the cache takes of one GPU at most.
    """

    k_dtype: str
    v_dtype: str
    policy: str
    tokens: int | None
    share: float
    nbytes: int


def requests(cache: Cache, context: int, load: Load, free: int) -> int:
    """How many requests of one row each fit at once, if their prompts are read one after another."""
    one = Load(1, load.new, load.chunk)
    after = max(cache.held(context), cache.held(context, new=load.new))
    left = free - one.needed(cache, context)
    return 0 if left < 0 else 1 + left // max(1, after)


def longest_context(cache: Cache, load: Load, free: int) -> int | None:
    """The largest context that fits; 0: none; None: any, since the cache does not grow with it."""

    def fits(context: int) -> bool:
        try:
            return load.needed(cache, context) <= free
        except PolicyError:  # a budget in bytes that cannot hold this many rows
            return False

    if fits(LONGEST):
        return None
    return largest(fits, 0, LONGEST)


def options(cache: Cache, context: int, load: Load, free: int) -> Iterator[Option]:
    """For each way to store keys and values, the largest budget with which the context fits; none where nothing does.

    Args:
        cache: whose architecture, GPUs and policy count; a policy that keeps everything stands for SnapKV.
        context: tokens of each prompt.
        load: what else is asked.
        free: bytes of one GPU.
    """
    given = cache.policy if isinstance(cache, CompressedCachePlan) else Full()
    own = cache.architecture.dtype
    for k_dtype, v_dtype in ((own, own), *STORED):
        codecs = (parse_codec(k_dtype), parse_codec(v_dtype))

        def with_policy(policy: Policy, codecs: tuple = codecs) -> CompressedCachePlan:  # type: ignore[type-arg]
            return CompressedCachePlan(cache.architecture, policy, codecs, cache.gpus)

        try:
            with_policy(given).check()
            whole = load.needed(with_policy(Full()), context)
        except CodecError:  # such as int4 for an odd head dimension
            continue
        if whole <= free:
            yield Option(k_dtype, v_dtype, str(Full()), None, 1.0, whole)
            continue
        found = _largest_budget(SnapKV() if given.limit is None else given, with_policy, context, load, free)
        if found is not None:
            policy, tokens, nbytes = found
            yield Option(k_dtype, v_dtype, policy, tokens, tokens / (context + load.new), nbytes)


def gpus_for(full: FullCache, context: int, load: Load, free: Callable[[int], int]) -> int | None:
    """The least number of GPUs, among the powers of two, on which the full cache fits beside the weights.

    Args:
        full: the cache.
        context: tokens of each prompt.
        load: what else is asked.
        free: bytes left of one GPU, by the number of GPUs.
    """
    for gpus in _COUNTS:
        try:
            if load.needed(FullCache(full.architecture, gpus, full.block), context) <= free(gpus):
                return gpus
        except KvwinnowError:  # the heads cannot be shared so
            continue
    return None


def gpus_for_weights(architecture: Architecture, weights: int, usable: int) -> int | None:
    """The least number of GPUs, among the powers of two, on which the weights fit and leave something.

    Args:
        architecture: whose heads the GPUs share.
        weights: bytes of all of them.
        usable: bytes of one GPU.
    """
    for gpus in _COUNTS:
        try:
            architecture.shard(gpus)
        except KvwinnowError:  # the heads cannot be shared so
            continue
        if -(-weights // gpus) < usable:
            return gpus
    return None


def _largest_budget(
    policy: Policy, with_policy: Callable[[Policy], CompressedCachePlan], context: int, load: Load, free: int
) -> tuple[str, int, int] | None:
    """The policy's text form with the largest budget that fits, its tokens and its bytes."""
    most = context + load.new
    least = with_budget(policy, max(policy.minimum(), most)).minimum()
    if least > most:
        return None

    def fits(tokens: int) -> bool:
        return load.needed(with_policy(with_budget(policy, tokens)), context) <= free

    if not fits(least):
        return None
    tokens = largest(fits, least, most)
    best = with_budget(policy, tokens)
    return str(best), tokens, load.needed(with_policy(best), context)
