"""How many slots a cache allocates and how many bytes it takes, known before anything is allocated; without torch."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvwinnow.codecs import Codec
from kvwinnow.errors import PolicyError
from kvwinnow.policies import Lengths, Phase, Policy, SlidingWindow
from kvwinnow.policies.budget import parse_size
from kvwinnow.statistics import Kind

GROWTH = 32
"""Slots are allocated in steps of this many, up to what the policy may ever need."""

EXACT_SLOTS = 4
"""Slots that codecs which quantise leave unquantised, at least: StreamingLLM's four sinks (arXiv 2309.17453)."""

_INT32 = _FLOAT32 = 4


# -- slots -----------------------------------------------------------------------------------------


def allocation(tokens: int, bound: int | None) -> int:
    """Slots to allocate for ``tokens`` tokens: room for one more, in steps of ``GROWTH``, never beyond ``bound``."""
    steps = (tokens // GROWTH + 1) * GROWTH
    return steps if bound is None else max(tokens, min(steps, bound))


def slots_for(tokens: int, bound: int | None, codecs: tuple[Codec, Codec], exact: int) -> int:
    """Slots a layer allocates for a prompt that leaves ``tokens`` tokens; the unquantised ones at least."""
    return max(least_slots(codecs, exact), allocation(tokens, bound))


def tokens_to_hold(policy: Policy, kept: int, seen: int | None, budget: int | None) -> int:
    """Tokens to allocate for in a row of which a prompt of ``seen`` tokens leaves ``kept``; None: it is a long one.

    How many a cut leaves may differ from chunk to chunk. Once the budget is reached there is room for the most that it
    may leave, so that the slots depend on how much of the prompt has come and not on its chunks.
    """
    if budget is None or kept < budget:
        return kept
    most = policy.most_kept(budget)
    return max(kept, most if seen is None else min(most, seen))


def exact_slots(policy: Policy) -> int:
    """Slots that codecs which quantise leave unquantised: as many as the policy has sinks, ``EXACT_SLOTS`` at least."""
    sinks, _ = policy.protected(1)
    return max(EXACT_SLOTS, sinks)


def least_slots(codecs: tuple[Codec, Codec], exact: int) -> int:
    """Slots that a layer always has: the unquantised ones, where a codec quantises the others."""
    return exact if any(codec.quantises for codec in codecs) else 0


def sliding_budget(window: int) -> int:
    """Tokens a sliding layer keeps: of a window that ends with the next token, all but that token."""
    return max(1, window - 1)


# -- one layer -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerShape:
    """The sizes of one layer that decide its bytes.

    Attributes:
        heads: query heads Hq.
        kv_heads: key/value heads Hkv.
        dim: head dimension D.
        exact: slots kept unquantised.
        itemsize: bytes of an element in the model's dtype, which the unquantised slots and observing queries have.
    """

    heads: int
    kv_heads: int
    dim: int
    exact: int
    itemsize: int


def layer_nbytes(policy: Policy, codecs: tuple[Codec, Codec], shape: LayerShape, *, batch: int, slots: int) -> int:
    """Bytes a ``LayerCache`` holds with ``slots`` slots per KV head, but for those of ``prompt_nbytes``."""
    sizes = (batch, shape.kv_heads, slots, shape.dim)
    total = sum(
        vectors_nbytes(codec, sizes, exact=shape.exact, centred=is_key, itemsize=shape.itemsize)
        for codec, is_key in zip(codecs, (True, False), strict=True)
    )
    return total + batch * shape.kv_heads * slots * (_INT32 + len(policy.running()) * _FLOAT32)


def vectors_nbytes(codec: Codec, shape: tuple[int, int, int, int], *, exact: int, centred: bool, itemsize: int) -> int:
    """Bytes that ``Vectors.allocate`` takes; shared slots count like others.

    Args:
        codec: how vectors are stored.
        shape: (B, Hkv, S, D).
        exact: slots that a codec which quantises leaves in the model's dtype.
        centred: whether these are keys, of which a codec may remove the mean.
        itemsize: bytes of an element in the model's dtype.
    """
    batch, heads, slots, dim = shape
    exact = min(exact, slots) if codec.quantises else 0
    slot_bytes = exact * dim * itemsize + (slots - exact) * codec.bytes_per_vector(dim)
    mean_bytes = dim * _FLOAT32 if centred and codec.centres else 0
    scale_bytes = _FLOAT32 if codec.scales else 0
    return batch * heads * (slot_bytes + mean_bytes + scale_bytes)


def moments_nbytes(batch: int, heads: int, dim: int) -> int:
    """Bytes that ``QueryMoments`` takes."""
    return batch * heads * (dim + dim * dim) * _FLOAT32


def prompt_nbytes(policy: Policy, shape: LayerShape, *, batch: int, prompt: int | None = None) -> int:
    """Bytes a ``LayerCache`` holds beside its slots from a prompt to the first decode step.

    ``prompt`` is the prompt's length in tokens; None: long enough for the policy's observation window.
    """
    statistics = policy.statistics(Phase.PROMPT)
    if statistics.kind is Kind.QUERIES:
        return moments_nbytes(batch, shape.heads, shape.dim)
    queries = statistics.window if statistics.kind is Kind.WINDOW else 0
    queries = queries if prompt is None else min(queries, prompt)
    return batch * shape.heads * queries * shape.dim * shape.itemsize


# -- a whole cache ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedLayer:
    """One layer of a cache.

    Attributes:
        shape: its sizes.
        codecs: how its keys and its values are stored.
        window: how many of the latest tokens a token sees, itself included, whatever the policy; None: all.
    """

    shape: LayerShape
    codecs: tuple[Codec, Codec]
    window: int | None = None


def budget_nbytes(
    policy: Policy, layers: Sequence[PlannedLayer], tokens: int, *, batch: int, seen: int | None = None
) -> int:
    """Bytes the whole cache takes when every KV head is at its budget, right after the prompt.

    Args:
        policy: which tokens stay.
        layers: of the cache.
        tokens: the budget, for policies that divide it among the layers their mean.
        batch: number of rows.
        seen: tokens of the prompt, by which such policies divide; None: not known, which adds what the steps of slots
            may come to at most.
    """

    def nbytes(layer: PlannedLayer, own: Policy, share: int | None) -> int:
        kept = tokens if share is None else share
        bound, most = own.capacity(kept), tokens_to_hold(own, kept, seen, kept)
        if own.layered and seen is not None:
            most = min(most, seen)
        slots = slots_for(most, bound, layer.codecs, layer.shape.exact)
        if own.layered and seen is None:
            # However the sum is divided, no layer has more than a step of slots beyond its part.
            slots = most + GROWTH
        held = layer_nbytes(own, layer.codecs, layer.shape, batch=batch, slots=slots)
        return held + prompt_nbytes(own, layer.shape, batch=batch)

    return sum(_by_layer(policy, layers, tokens, seen, nbytes))


def part_of(share: float, tokens: int) -> int:
    """A share of that many tokens, in tokens."""
    # A hair more, so that 0.29 of 100 is 29 in spite of the float.
    return int(tokens * share + 1e-9)


def share_of(policy: Policy, share: float, tokens: int) -> int:
    """A share of that many tokens, in tokens; at least what the policy cannot do without."""
    return max(policy.minimum(), part_of(share, tokens))


def largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from ``low``, which fits, to ``high`` that fits too; what is less than one that fits does."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def tokens_in(policy: Policy, layers: Sequence[PlannedLayer], size: str, *, batch: int) -> int:
    """The largest budget in tokens whose cache fits into ``size``, such as "64MiB".

    Raises:
        PolicyError: it holds too few tokens for the policy.
    """
    limit, least = parse_size(size), policy.minimum()
    needed = budget_nbytes(policy, layers, least, batch=batch)
    if needed > limit:
        raise PolicyError(
            f"budget={size!r} ({limit:,} bytes) is too small: {policy.name} keeps at least {least} tokens per "
            f"KV head, which take {needed:,} bytes in this model with {batch} row(s), whole steps of slots and "
            "what is held of the prompt's queries included; give at least that"
        )
    most = least + limit  # no token takes less than a byte
    return largest(lambda tokens: budget_nbytes(policy, layers, tokens, batch=batch) <= limit, least, most)


def budget_in_tokens(policy: Policy, layers: Sequence[PlannedLayer], *, batch: int, prompt: int) -> int | None:
    """Tokens per KV head that the policy's budget comes to for rows of one prompt each; None: no limit.

    Raises:
        PolicyError: a budget in bytes that holds too few tokens.
    """
    limit = policy.limit
    if limit is None or isinstance(limit, int):
        return limit
    return tokens_in(policy, layers, limit, batch=batch) if isinstance(limit, str) else share_of(policy, limit, prompt)


def layers_nbytes(
    policy: Policy, layers: Sequence[PlannedLayer], *, batch: int, prompt: int, new: int = 0
) -> tuple[int, ...]:
    """Bytes that each layer holds after a prompt and some decoded tokens: exactly what ``LayerCache.nbytes()`` gives.

    Args:
        policy: which tokens stay.
        layers: of the cache.
        batch: number of rows, none of them padded.
        prompt: tokens of each row's prompt, 1 or more.
        new: tokens decoded after it, which are in the cache too.

    Raises:
        PolicyError: a budget in bytes that holds too few tokens.
    """
    budget = budget_in_tokens(policy, layers, batch=batch, prompt=prompt)

    def nbytes(layer: PlannedLayer, own: Policy, share: int | None) -> int:
        slots = _slots_held(own, layer, share, prompt=prompt, new=new)
        held = layer_nbytes(own, layer.codecs, layer.shape, batch=batch, slots=slots)
        return held + (0 if new else prompt_nbytes(own, layer.shape, batch=batch, prompt=prompt))

    return _by_layer(policy, layers, budget, prompt, nbytes)


def prefill_nbytes(
    policy: Policy, layers: Sequence[PlannedLayer], *, batch: int, prompt: int, chunk: int | None = None
) -> int:
    """The most bytes of keys, values and cache while a prompt is taken in: all layers' slots, one layer's new tokens.

    A layer cuts its prompt before the next one makes its keys and values, so only one layer's are ever there whole.

    Args:
        policy: which tokens stay.
        layers: of the cache.
        batch: number of rows.
        prompt: tokens of each row's prompt.
        chunk: tokens that are fed at once; None: the whole prompt.

    Raises:
        PolicyError: a budget in bytes that holds too few tokens.
    """
    tokens = prompt if chunk is None else min(chunk, prompt)
    made = max(2 * batch * x.shape.kv_heads * tokens * x.shape.dim * x.shape.itemsize for x in layers)
    return sum(layers_nbytes(policy, layers, batch=batch, prompt=prompt)) + made


def _by_layer(
    policy: Policy,
    layers: Sequence[PlannedLayer],
    budget: int | None,
    seen: int | None,
    nbytes: Callable[[PlannedLayer, Policy, int | None], int],
) -> tuple[int, ...]:
    """For each layer ``nbytes`` of it, the policy it goes by, and its part of the budget; of alike layers asked once.

    The budget is divided if ``seen`` tells how.
    """
    sharing, number = sum(layer.window is None for layer in layers), 0
    known: dict[tuple[PlannedLayer, int | None], int] = {}
    found = []
    for layer in layers:
        own, share = policy, budget
        if layer.window is not None:  # keeps its own window, whatever the policy
            share = sliding_budget(layer.window)
            own = SlidingWindow(budget=share)
        else:
            if budget is not None and seen is not None:
                share = policy.layer_budget(budget, layer=number, layers=sharing, seen=seen)
            number += 1
        if (layer, share) not in known:
            known[layer, share] = nbytes(layer, own, share)
        found.append(known[layer, share])
    return tuple(found)


def _slots_held(policy: Policy, layer: PlannedLayer, budget: int | None, *, prompt: int, new: int) -> int:
    """Slots that a layer has allocated after a prompt and ``new`` decoded tokens.

    What ``LayerCache`` does is gone through from one eviction to the next, until that repeats itself.
    """
    bound = None if budget is None else policy.capacity(budget)
    exact = layer.shape.exact

    def kept_of(phase: Phase, seen: int, tokens: int) -> int:
        keep = policy.due(phase, Lengths(seen, tokens, seen if budget is None else budget))
        return tokens if keep is None else min(tokens, keep)

    def quiet(done: int, kept: int) -> int:
        """How many more tokens come before one is evicted; what lets this many be lets fewer be."""
        more = range(1, new - done + 1)
        return bisect(more, False, key=lambda n: kept_of(Phase.DECODE, prompt + done + n, kept + n) < kept + n)

    done, kept = 0, kept_of(Phase.PROMPT, prompt, prompt)
    slots = slots_for(tokens_to_hold(policy, kept, prompt, budget), bound, layer.codecs, exact)
    after_cut: dict[tuple[int, int], int] = {}
    while True:
        more = quiet(done, kept)
        done, kept = done + more, kept + more
        if kept > slots:
            slots = slots_for(kept - 1, bound, layer.codecs, exact)
        if done == new:
            return slots
        if kept + 1 > slots:
            slots = slots_for(kept, bound, layer.codecs, exact)
        done += 1
        before, kept = kept + 1, kept_of(Phase.DECODE, prompt + done, kept + 1)
        if before - kept >= GROWTH:
            fitting = max(slots_for(kept, bound, layer.codecs, exact), least_slots(layer.codecs, exact) + kept)
            slots = fitting if slots - fitting >= GROWTH else slots
        if (kept, slots) in after_cut:  # from here on it goes round in circles
            new = done + (new - done) % (done - after_cut[kept, slots])
        after_cut[kept, slots] = done
