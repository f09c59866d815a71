"""Random streams of queries, keys and values for one layer: turns of padded batches in chunks, then decoded tokens."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvwinnow.cache import LayerCache, Step
from kvwinnow.codecs import Codec
from kvwinnow.ops import Rope, Variant
from kvwinnow.policies import POLICIES, Phase, Policy
from tests.oracle import Row, Rule

# The same examples at every run; `ORACLE_EXAMPLES=1000 pytest tests/test_oracle.py` looks for others.
EXAMPLES = int(os.environ.get("ORACLE_EXAMPLES", "0"))

LEAST: dict[str, Callable[[dict[str, Any]], int]] = {
    "full": lambda p: 1,
    "slidingwindow": lambda p: 1,
    "streamingllm": lambda p: p["sinks"] + 1,
    "h2o": lambda p: max(1, p["sinks"] + (p["recent"] or 0)),
    "hybrid": lambda p: p["sinks"] + 1,
    "snapkv": lambda p: p["sinks"] + p["window"],
    "pyramidkv": lambda p: p["sinks"] + p["window"],
    "tova": lambda p: max(1, p["sinks"] + p["recent"]),
    "knorm": lambda p: max(1, p["sinks"] + p["recent"]),
    # Of two keys both are as like their mean, and rounding decides: so three at least before a cut.
    "keydiff": lambda p: max(2, p["sinks"] + p["recent"]),
    "expectedattention": lambda p: p["sinks"] + 1,
    "compose": lambda p: max(LEAST[inner.name](inner.params) for inner in p.values()),
    "blocks": lambda p: LEAST[p["policy"].name](p["policy"].params),
}
"""The smallest budget of each method that its streams have."""

PROMPT_ONLY = ("snapkv", "pyramidkv", "expectedattention")
"""Methods that evict nothing while decoding."""

THETA = 10_000.0
"""Base of the rotation that the streams' queries are taken to have undergone."""


@dataclass(frozen=True)
class Method:
    """A method by name with its parameters, for the package and for the oracle alike."""

    name: str
    params: dict[str, Any] = field(default_factory=dict)

    def policy(self, budget: int) -> Policy:
        params = {
            key: value.policy(budget) if isinstance(value, Method) else value for key, value in self.params.items()
        }
        return POLICIES[self.name](**params, **({} if self.name in ("full", "blocks") else {"budget": budget}))

    def rule(self) -> Rule:
        if self.name == "blocks":
            return dataclasses.replace(self.params["policy"].rule(), multiple_of=self.params["multiple_of"])
        params = {key: value.rule() if isinstance(value, Method) else value for key, value in self.params.items()}
        return Rule(self.name, **params)


def plain_rope(dim: int) -> Rope:
    """The plain rotation over the whole head dimension."""
    inverse = THETA ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = (positions.double().unsqueeze(-1) * inverse).repeat(1, 2)
        return angle.cos().float(), angle.sin().float()

    return Rope(angles)


@dataclass(frozen=True)
class Turn:
    """A prompt and what is generated after it.

    Attributes:
        lengths: for each row, tokens of the prompt; shorter rows are padded on the left.
        ends: columns at which a chunk ends, the last one included.
        budgets: for each row.
        decoded: tokens decoded after the prompt.
        ends_after: for each row, after how many of them it brings nothing more; empty: none ends before the others.
    """

    lengths: tuple[int, ...]
    ends: tuple[int, ...]
    budgets: tuple[int, ...]
    decoded: int
    ends_after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Call:
    """What one forward call brings to a layer: q (B, Hq, n, D), k and v (B, Hkv, n, D)."""

    step: Step
    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def prompt(self) -> bool:
        return self.step.phase is Phase.PROMPT

    def alone(self, row: int) -> Call | None:
        """The call as the row alone would make it, without padding; None: it brings nothing for that row."""
        start, step = self.step.starts[row], self.step
        if start == self.q.shape[2]:
            return None
        only = slice(row, row + 1)
        own = Step(step.phase, step.positions[only, start:], (0,), step.seen[only], step.budgets[only])
        return Call(own, *(x[only, :, start:] for x in (self.q, self.k, self.v)))


@dataclass(frozen=True)
class Stream:
    """Everything a layer is given, and which of a model's layers it is."""

    kv_heads: int
    group: int
    dim: int
    turns: tuple[Turn, ...]
    unlimited: bool = False
    seed: int = 0
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    sliding: int | None = None
    sinks: bool = False
    layer: int = 0
    layers: int = 1

    @property
    def rows(self) -> int:
        return len(self.turns[0].lengths)

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    @property
    def softmax_sinks(self) -> Tensor | None:
        """(Hq,), of the size of the logits."""
        if not self.sinks:
            return None
        return 2 * torch.randn(self.heads, generator=torch.Generator().manual_seed(self.seed + 1))

    @property
    def variant(self) -> Variant:
        return Variant(self.scale, self.softcap, self.sliding, self.softmax_sinks)

    def cache(self, method: Method, k_codec: Codec, v_codec: Codec) -> LayerCache:
        """The layer's cache, empty."""
        policy = method.policy(max(budget for turn in self.turns for budget in turn.budgets))
        return LayerCache(
            policy, k_codec, v_codec, exact=4, layer=self.layer, layers=self.layers, rope=plain_rope(self.dim)
        )

    def rows_alone(self, method: Method) -> list[Row]:
        """The oracle of each row."""
        sizes = (self.heads, self.kv_heads, self.dim, self.scale)
        variant = (self.softcap, self.sliding, self.softmax_sinks)
        return [Row(method.rule(), *sizes, *variant, self.layer, self.layers, THETA) for _ in range(self.rows)]

    def calls(self) -> Iterator[Call]:
        """All calls in order; the same at every iteration."""
        generator = torch.Generator().manual_seed(self.seed)
        seen = [0] * self.rows
        for turn in self.turns:
            columns, begin = max(turn.lengths), 0
            for end in turn.ends:
                starts = [min(max(columns - length - begin, 0), end - begin) for length in turn.lengths]
                yield self._call(generator, turn, Phase.PROMPT, seen, starts, end - begin)
                begin = end
            for token in range(turn.decoded):
                starts = [int(token >= end) for end in turn.ends_after or [turn.decoded] * self.rows]
                yield self._call(generator, turn, Phase.DECODE, seen, starts, 1)

    def _call(
        self, generator: torch.Generator, turn: Turn, phase: Phase, seen: list[int], starts: list[int], n: int
    ) -> Call:
        positions = torch.full((self.rows, n), -1, dtype=torch.int32)
        for row, start in enumerate(starts):
            positions[row, start:] = torch.arange(seen[row], seen[row] + n - start)
            seen[row] += n - start
        # Logits of a standard deviation of 2 make some tokens matter far more than others; 30 times that in the
        # padding would be seen anywhere.
        loud = torch.where(positions < 0, 30.0, 1.0).view(self.rows, 1, n, 1)
        shapes = [(self.rows, heads, n, self.dim) for heads in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (torch.randn(shape, generator=generator) * loud for shape in shapes)
        budgets = (None,) * self.rows if self.unlimited else turn.budgets
        step = Step(phase, positions, tuple(starts), tuple(seen), budgets)
        return Call(step, *(x.to(self.dtype) for x in (2 * q, k, v)))


@st.composite
def methods(draw: st.DrawFn, name: str) -> Method:
    """A method with random parameters, small enough that short streams reach every limit."""
    some = st.integers(0, 3)
    if name == "compose":
        inner = [name for name in LEAST if name not in ("compose", "blocks")]
        rolling = [name for name in inner if name not in PROMPT_ONLY]
        pair = {"prompt": draw(st.sampled_from(inner)), "decode": draw(st.sampled_from(rolling))}
        return Method(name, {role: draw(methods(inner)) for role, inner in pair.items()})
    if name == "blocks":
        inner = draw(st.sampled_from([name for name in LEAST if name not in ("full", "blocks")]))
        return Method(name, {"policy": draw(methods(inner)), "multiple_of": draw(st.integers(1, 6))})
    params: dict[str, Any] = {} if name in ("full", "slidingwindow") else {"sinks": draw(some)}
    if name == "h2o":
        params["recent"] = draw(st.none() | some)
    if name in ("tova", "knorm", "keydiff"):
        params["recent"] = draw(some)
    if name == "hybrid":
        params["heavy_ratio"] = draw(st.sampled_from([0.0, 0.3, 0.5, 1.0]))
    if name in ("h2o", "hybrid"):
        params["normalize"] = draw(st.sampled_from([None, "age"]))
    if name in ("snapkv", "pyramidkv"):
        params |= {"window": draw(st.integers(1, 6)), "kernel": draw(st.sampled_from([1, 3, 5, 7]))}
        params["pool"] = draw(st.sampled_from(["max", "avg"]))
    if name == "pyramidkv":
        params["beta"] = draw(st.sampled_from([1, 2, 20]))
    if name == "expectedattention":
        params |= {"future": draw(st.integers(1, 6)), "epsilon": draw(st.sampled_from([0.0, 0.1]))}
        params |= {"covariance": draw(st.booleans()), "values": draw(st.booleans())}
    if name not in (*PROMPT_ONLY, "full"):
        params["evict_every"] = draw(st.integers(1, 5))
    return Method(name, params)


@st.composite
def turns(draw: st.DrawFn, budgets: tuple[int, ...], *, first: bool) -> Turn:
    """A turn; in a further one some rows may have nothing to say."""
    longest = draw(st.integers(1, 24 if first else 10))
    least = 1 if first else 0
    lengths = [draw(st.integers(least, longest)) for _ in budgets]
    lengths[draw(st.integers(0, len(lengths) - 1))] = longest
    inner = draw(st.lists(st.integers(1, longest), max_size=4))
    ends = tuple(sorted({longest, *inner}))
    decoded = draw(st.integers(0, 9))
    # A first decoded token ends the prompt of all rows, so that none may miss it.
    ends_after = [draw(st.integers(min(1, decoded), decoded)) for _ in budgets] if draw(st.booleans()) else []
    return Turn(tuple(lengths), ends, budgets, decoded, tuple(ends_after))


variants = st.fixed_dictionaries(
    {
        "softcap": st.sampled_from([None, 1.0, 4.0]),
        "sliding": st.none() | st.integers(1, 12),
        "sinks": st.booleans(),
    }
)
"""What a layer's attention may add to softmax(scale q.k) v."""


@st.composite
def streams(draw: st.DrawFn, method: Method, group: int, *, dims: tuple[int, ...] = (4, 8)) -> Stream:
    """One to three rows of different lengths and budgets, and two turns."""
    batch, least = draw(st.integers(1, 3)), LEAST[method.name](method.params)
    budgets = tuple(least + draw(st.integers(0, 8)) for _ in range(batch))
    later = tuple(budget + draw(st.sampled_from([0, 0, 3])) for budget in budgets)
    layers = draw(st.integers(1, 5)) if method.name in ("pyramidkv", "compose", "blocks") else 1
    return Stream(
        kv_heads=draw(st.integers(1, 2)),
        group=group,
        dim=draw(st.sampled_from(dims)),
        turns=(draw(turns(budgets, first=True)), draw(turns(later, first=False))),
        unlimited=method.name == "full",
        seed=draw(st.integers(0, 2**31)),
        layer=draw(st.integers(0, layers - 1)),
        layers=layers,
        **(draw(variants) if draw(st.booleans()) else {}),
    )


@st.composite
def cases(draw: st.DrawFn, name: str, group: int) -> tuple[Method, Stream]:
    """A method and a stream for it."""
    method = draw(methods(name))
    return method, draw(streams(method, group))


def search(strategy: st.SearchStrategy[Any], check: Callable[[Any], object], *, examples: int) -> None:
    """Run ``check`` on examples of ``strategy``."""

    def test(case: Any) -> None:
        check(case)

    chosen = settings(
        deadline=None,
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    chosen(given(strategy)(test))()
