"""Traces: what each token was paid in attention, in steps, without the model that paid it. Needs no torch.

L is the number of layers in the trace, H of their KV heads, Hq of their query heads, n of tokens, D the head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvwinnow.errors import TraceError

Floats = NDArray[np.float32]

WINDOWS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of queries at the end of a recorded prompt that can be summed over exactly (and any further power of two)."""


@dataclass(frozen=True)
class ModelShape:
    """The model that a trace was recorded from, as far as memory and windows depend on it.

    Attributes:
        name: of the model, as it was given.
        heads: query heads Hq.
        kv_heads: key/value heads H.
        dim: head dimension D.
        itemsize: bytes of an element in the model's dtype.
        windows: for each of the model's layers, how many of the latest tokens a token sees; None: all. Those with a
            window keep just that, whatever the policy, and are left out of the trace.
        softmax_sinks: whether the softmax has sinks of its own (gpt-oss), which take a share of every query's weight.
    """

    name: str
    heads: int
    kv_heads: int
    dim: int
    itemsize: int
    windows: tuple[int | None, ...]
    softmax_sinks: bool = False


@dataclass(frozen=True, eq=False)
class QueryFacts:
    """What ExpectedAttention goes by: the prompt's queries before their rotation, and the rotations to come.

    Attributes:
        lead: (L, Hq, m, D) float32, the queries of the prompt's first tokens, 16 at most, their rotation undone.
        count: number of the other queries.
        mean: (L, Hq, D) float32, of the other queries.
        products: (L, Hq, D, D) float32, sum over the other queries of (q - mean)(q - mean)'.
        scale: (L,) float32, the factor on q.k.
        angles: cosines and sines (2, F, R) float32 of the F positions after the prompt, each table once; R = 0: the
            model has no rotation.
        tables: for each layer, which of ``angles`` is its own, and whether elements 2i and 2i + 1 are a pair.
    """

    lead: Floats
    count: int
    mean: Floats
    products: Floats
    scale: Floats
    angles: tuple[Floats, ...]
    tables: tuple[tuple[int, bool], ...]


@dataclass(frozen=True, eq=False)
class Vectors:
    """What is recorded beside sums, if asked for.

    Attributes:
        keys: (L, H, n, D) float16 or float32, rotated as the model rotates them.
        values: (L, H, n, D) float16 or float32.
        head_mass: (d, L, Hq, n) float32, the weights of the d decoded tokens' queries, each query head for itself.
        queries: None if the model's rotation could not be found out.
    """

    keys: NDArray[Any]
    values: NDArray[Any]
    head_mass: Floats
    queries: QueryFacts | None = None


@dataclass(frozen=True, eq=False)
class Trace:
    """The attention that each token of one text received.

    Attributes:
        tokens: the text of each token.
        prompt: how many of them are the prompt; the others were decoded one by one.
        steps: (T, 2) int32, the queries [first, last) that step t sums over, one step after the other. Queries after
            the prompt have steps of their own.
        mass: (T, L, H, n) float32, softmax weight each token received from the queries of the step, mean over the
            query heads that share a KV head; 0 where a token had not come yet.
        key_norm: (L, H, n) float32, the norm of each token's key; None: not known.
        vectors: keys, values and more; None: not recorded.
        model: where the trace is from; None: a file of text.
        fixed: whether there is no attention but one number per token, which is its statistic from its arrival on. Then
            steps are [(0, n)] and mass (1, 1, 1, n).
    """

    tokens: tuple[str, ...]
    prompt: int
    steps: NDArray[np.int32]
    mass: Floats
    key_norm: Floats | None = None
    vectors: Vectors | None = None
    model: ModelShape | None = None
    fixed: bool = False

    def __post_init__(self) -> None:
        n, steps = len(self.tokens), self.steps
        if n == 0:
            raise TraceError("the trace has no tokens; give one at least")
        if not isinstance(self.prompt, int | np.integer) or isinstance(self.prompt, bool):
            raise TraceError(f"the trace's prompt is {self.prompt!r}; give a whole number of tokens")
        object.__setattr__(self, "prompt", int(self.prompt))
        if not 0 <= self.prompt <= n:
            raise TraceError(f"the trace's prompt has {self.prompt} tokens and the whole trace {n}; give 0 to {n}")
        if steps.ndim != 2 or steps.shape[1] != 2:
            raise TraceError(f"the trace's steps have shape {steps.shape}, which is not (steps, 2)")
        if self.mass.ndim != 4 or self.mass.shape[3] != n or self.mass.shape[0] != len(steps) or not self.mass.size:
            raise TraceError(
                f"the trace's mass has shape {self.mass.shape}, which is not ({len(steps)} steps, layers, KV heads, "
                f"{n} tokens)"
            )
        bounds = [0, *(int(last) for _, last in steps)]
        if [int(first) for first, _ in steps] != bounds[:-1] or bounds[-1] != n or sorted(set(bounds)) != bounds:
            raise TraceError(f"the trace's steps do not cover its {n} queries one after the other")
        if not self.fixed and any(last - first > 1 and last > self.prompt for first, last in steps):
            raise TraceError("the trace sums over several queries after its prompt; give each of them a step")
        if self.fixed and self.mass.shape != (1, 1, 1, n):
            raise TraceError(f"a trace of one number per token has mass of shape (1, 1, 1, {n}), not {self.mass.shape}")
        self._check_numbers()
        if self.vectors is not None:
            _check_vectors(self, self.vectors)

    def _check_numbers(self) -> None:
        """Attention and norms are numbers of 0 or more, and nobody attends to what has not come."""
        _check_floats("mass", self.mass, self.mass.shape)
        if not self.fixed and any(self.mass[step, :, :, last:].any() for step, (_, last) in enumerate(self.steps)):
            raise TraceError("the trace's mass gives attention to tokens that had not come yet; it is 0 there")
        if self.key_norm is not None:
            _check_floats("key_norm", self.key_norm, self.mass.shape[1:])
        if self.model is not None and (self.model.kv_heads != self.kv_heads or len(self.layers) != self.mass.shape[1]):
            raise TraceError("the trace's layers and heads are not its model's")

    @property
    def positions(self) -> NDArray[np.int32]:
        """(n,) int32: each token's index, its position to the policies."""
        return np.arange(len(self.tokens), dtype=np.int32)

    @property
    def layers(self) -> tuple[int, ...]:
        """For each of the trace's layers, its number in the model."""
        if self.model is None:
            return tuple(range(self.mass.shape[1]))
        return tuple(layer for layer, window in enumerate(self.model.windows) if window is None)

    @property
    def kv_heads(self) -> int:
        """H."""
        return int(self.mass.shape[2])

    def step_of(self, query: int) -> int:
        """The step that a query belongs to."""
        return int(np.searchsorted(self.steps[:, 1], query, side="right"))

    def prompt_mass(self, window: int | None = None) -> Floats:
        """(L, H, n) float32: the weight each token received from the prompt's last ``window`` queries, or all of them.

        Raises:
            TraceError: the trace sums over more than these queries at once.
        """
        first = 0 if window is None else max(0, self.prompt - window)
        begin, end = self.step_of(first), self.step_of(self.prompt - 1) + 1
        if int(self.steps[begin, 0]) != first:
            sums = [self.prompt - int(at) for at in self.steps[:end, 0]][::-1]
            raise TraceError(
                f"a window of {window} queries cannot be summed from this trace, which holds sums over the last "
                f"{', '.join(map(str, sums))} queries of its prompt; take one of these"
            )
        total: Floats = np.add.reduce(self.mass[begin:end], axis=0, dtype=np.float32)
        return total


def _check_floats(name: str, array: Floats, shape: tuple[int, ...]) -> None:
    if array.dtype != np.float32 or array.shape != shape:
        raise TraceError(f"the trace's {name} is {array.dtype} of shape {array.shape}; give float32 of shape {shape}")
    if not np.isfinite(array).all() or (array < 0).any():
        raise TraceError(f"the trace's {name} holds numbers that are no attention; each is finite, 0 or more")


def _check_vectors(trace: Trace, vectors: Vectors) -> None:
    model = trace.model
    if model is None:
        raise TraceError("the trace has vectors and no model")
    layers, heads, n = trace.mass.shape[1:]
    for name, array in (("keys", vectors.keys), ("values", vectors.values)):
        if array.shape != (layers, heads, n, model.dim) or array.dtype not in (np.float32, np.float16):
            raise TraceError(f"the trace's {name} are {array.dtype} of shape {array.shape}, which is not its model's")
    _check_floats("head_mass", vectors.head_mass, (n - trace.prompt, layers, model.heads, n))
    if vectors.queries is not None:
        _check_queries(vectors.queries, layers, model)


def _check_queries(facts: QueryFacts, layers: int, model: ModelShape) -> None:
    heads, dim = model.heads, model.dim
    arrays = (facts.lead, facts.mean, facts.products, facts.scale, *facts.angles)
    if (
        any(array.dtype != np.float32 for array in arrays)
        or facts.mean.shape != (layers, heads, dim)
        or facts.products.shape != (layers, heads, dim, dim)
        or facts.lead.ndim != 4
        or (*facts.lead.shape[:2], facts.lead.shape[3]) != (layers, heads, dim)
        or facts.scale.shape != (layers,)
        or facts.count < 0
        or not facts.angles
        or any(t.ndim != 3 or t.shape[0] != 2 or t.shape[2] > dim or t.shape[2] % 2 for t in facts.angles)
        or len({table.shape[1] for table in facts.angles}) > 1
        or any(not 0 <= table < len(facts.angles) for table, _ in facts.tables)
        or len(facts.tables) != layers
    ):
        raise TraceError("the trace's queries are not its model's")


def from_numbers(tokens: tuple[str, ...], numbers: list[float], prompt: int = 0) -> Trace:
    """A trace of one number per token."""
    mass = np.array(numbers, dtype=np.float32).reshape(1, 1, 1, -1)
    return Trace(tokens, prompt, np.array([[0, len(tokens)]], dtype=np.int32), mass, fixed=True)


def from_rows(tokens: tuple[str, ...], rows: list[list[float]], prompt: int = 0) -> Trace:
    """A trace of one head's attention matrix: row t has the weights that query t gives to the tokens 0 to t."""
    n = len(tokens)
    mass = np.zeros((n, 1, 1, n), dtype=np.float32)
    for query, row in enumerate(rows):
        mass[query, 0, 0, : len(row)] = row
    return Trace(tokens, prompt, np.stack([np.arange(n), np.arange(1, n + 1)], axis=1).astype(np.int32), mass)


def demo() -> Trace:
    """Eight tokens with a number each: two early ones and two late ones matter."""
    words = ("Ada", " Lovelace", " was", " born", " in", " a", " December", " 1815")
    return from_numbers(words, [0.95, 0.85, 0.10, 0.90, 0.05, 0.20, 0.15, 0.75])


def demo_rows() -> Trace:
    """Sixteen tokens and an attention matrix: each query looks at the first token, at itself, and at what matters."""
    words = "The key to the vault is under the third red stone ; now fetch the key"
    tokens = tuple(word if place == 0 else f" {word}" for place, word in enumerate(words.split()))
    weight = {"key": 2.0, "vault": 2.5, "third": 1.5, "red": 1.0, "stone": 3.0, "fetch": 0.5}
    salience = np.array([4.0, *(weight.get(word, -1.0) for word in words.split()[1:])])
    rows = []
    for query in range(len(tokens)):
        away = query - np.arange(query + 1)
        logits = salience[: query + 1] + 3.0 * (away == 0) - 0.05 * away
        weights = np.exp(logits - logits.max())
        rows.append([float(w) for w in weights / weights.sum()])
    return from_rows(tokens, rows)


DEMOS = {"demo": demo, "demo-rows": demo_rows}
"""The traces that come with the package, by the name that ``--trace`` takes."""
