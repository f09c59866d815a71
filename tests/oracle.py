"""The independent truth: attention over every token of a row in float64, under a mask that hides what was evicted.

Nothing here is shared with the package: the methods are written down once more from their papers, with plain loops and
full softmax matrices, one row and one KV head at a time. It is slow, and that is all it may be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

NEAR = 1e-5
"""Scores closer than this, relatively, may be ranked either way by float32; exact ties are not near, they are ties."""


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention as its definition has it, in float64.

    Args:
        q: (Hq, n, D).
        k: (Hkv, N, D), all tokens of the row.
        v: (Hkv, N, D).
        visible: (Hkv, n, N) bool, which token each query sees in each KV head.
        scale: factor on q.k.
        softcap: bound of the logits; None: they have none.
        sinks: (Hq,) a further logit for each head, that of a key which every query sees and whose value is zero.

    Returns:
        Output (Hq, n, D) and weights (Hq, n, N); zeros for a query that sees nothing.
    """
    group = q.shape[0] // k.shape[0]
    outputs, weights = [], []
    for head in range(q.shape[0]):
        of = head // group
        logits = q[head].double() @ k[of].double().T * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~visible[of], -math.inf)
        if sinks is not None:
            logits = torch.cat([logits, sinks[head].double().expand(len(logits), 1)], 1)
        weight = torch.softmax(logits, dim=-1).nan_to_num(0.0)[:, : k.shape[1]]
        outputs.append(weight @ v[of].double())
        weights.append(weight)
    return torch.stack(outputs), torch.stack(weights)


@dataclass(frozen=True)
class Rule:
    """A method and its parameters, in the words of its paper.

    Attributes:
        method: full, slidingwindow, streamingllm, h2o, hybrid, snapkv, pyramidkv, tova, knorm, keydiff,
            expectedattention or compose.
        sinks: first tokens that always stay; the queries of ExpectedAttention's do not count either.
        recent: latest tokens that always stay; None: H2O's half of what the sinks leave, rounded down.
        heavy_ratio: Hybrid's share of heavy hitters, rounded down.
        window: SnapKV's observing queries.
        kernel: SnapKV's pooling width.
        pool: SnapKV's pooling, max or avg.
        evict_every: how far decoding runs over the budget.
        normalize: age: H2O's and Hybrid's mean over the queries in place of their sum.
        beta: PyramidKV's budget of the mean layer over that of the last one.
        future: positions that ExpectedAttention averages over.
        epsilon: what it adds to a weight.
        covariance: whether its covariance counts.
        values: whether its norms of the values count.
        prompt: Compose's rule for prompts.
        decode: Compose's rule while decoding.
        multiple_of: tokens in a block, of which only whole ones go.
    """

    method: str
    sinks: int = 0
    recent: int | None = None
    heavy_ratio: float = 0.5
    window: int = 0
    kernel: int = 1
    pool: str = "max"
    evict_every: int = 1
    normalize: str | None = None
    beta: int = 20
    future: int = 0
    epsilon: float = 0.0
    covariance: bool = True
    values: bool = True
    prompt: Rule | None = None
    decode: Rule | None = None
    multiple_of: int = 1

    def now(self, prompt: bool) -> Rule:
        """The rule that holds in a prompt, or while decoding."""
        inner = self.prompt if prompt else self.decode
        return self if inner is None else inner

    @property
    def watches(self) -> int:
        """How many of a prompt's last queries the rule looks at; 0: it does not."""
        return {"snapkv": self.window, "pyramidkv": self.window, "tova": 1}.get(self.method, 0)

    @property
    def least(self) -> int:
        """The smallest budget the rule can obey."""
        if self.prompt and self.decode:
            return max(self.prompt.least, self.decode.least)
        if self.method in ("streamingllm", "hybrid", "expectedattention"):
            return self.sinks + 1
        return max(1, self.sinks + self.window + (self.recent or 0))

    def surplus(self, kept: int, budget: int | None, prompt: bool) -> int:
        """How many tokens go now of ``kept`` that a KV head holds."""
        rule = self.now(prompt)
        if rule.method == "full" or budget is None:
            return 0
        if not prompt and rule.method in ("snapkv", "pyramidkv", "expectedattention"):
            return 0
        surplus = 0
        while kept - surplus - self.multiple_of >= budget:
            surplus += self.multiple_of
        return surplus if prompt or surplus >= rule.evict_every else 0

    def latest(self, budget: int) -> int:
        """How many of the latest tokens stay whatever they score."""
        rest = budget - self.sinks
        if self.method == "h2o":
            return rest // 2 if self.recent is None else self.recent
        if self.method == "hybrid":
            return rest - int(rest * self.heavy_ratio)
        return self.window + (self.recent or 0)

    def share(self, budget: int, layer: int, layers: int, seen: int) -> int:
        """One layer's budget: PyramidKV's falls along a line through the mean."""
        rule = self.now(prompt=True)
        if rule.method != "pyramidkv" or layers == 1:
            return budget
        top = 2 * budget - budget / rule.beta
        top = max(budget, min(top, seen - rule.window, 2 * budget - self.least))
        line = [top - index * (top - (2 * budget - top)) / (layers - 1) for index in range(layers)]
        lower = [round(value) for value in line[: layers // 2]]
        return [*lower, *[budget] * (layers % 2), *(2 * budget - value for value in reversed(lower))][layer]

    def scores(self, held: list[int], last: int, measured: Tensor) -> dict[int, float]:
        """The score of every held token; ``measured`` holds what the method goes by, for each position."""
        if self.method in ("slidingwindow", "streamingllm"):
            return {token: float(token) for token in held}
        if self.method not in ("snapkv", "pyramidkv"):
            return {token: float(measured[token]) for token in held}
        prefix = [token for token in held if token <= last - self.window]
        sums = [float(measured[token]) for token in prefix]
        return dict(zip(prefix, pooled(sums, self.kernel, self.pool), strict=True))


def pooled(values: list[float], kernel: int, pool: str) -> list[float]:
    """Pooling of stride 1 with as many zeros on either side as keep the length."""
    side = kernel // 2
    padded = [0.0] * side + values + [0.0] * side
    windows = [padded[i : i + kernel] for i in range(len(values))]
    return [max(window) if pool == "max" else sum(window) / kernel for window in windows]


def best(scores: dict[int, float], count: int) -> tuple[set[int], bool]:
    """The ``count`` best tokens, of equal ones the earlier; and whether float32 might choose otherwise."""
    ranked = sorted(scores, key=lambda token: (-scores[token], token))
    chosen, rest = ranked[:count], ranked[count:]
    if not chosen or not rest:
        return set(chosen), False
    low, high = scores[chosen[-1]], scores[rest[0]]
    others = [high] if low != high else [score for score in scores.values() if score != low]
    return set(chosen), any(abs(score - low) <= NEAR * abs(low) for score in others)


@dataclass
class Row:
    """One row of the batch in one layer: every token it ever had, and which of them each KV head still holds.

    Attributes:
        rule: the method.
        heads: query heads Hq.
        kv_heads: key/value heads Hkv.
        dim: head dimension.
        scale: factor on q.k.
        softcap: bound of the logits.
        sliding: how many of the latest tokens a query sees, itself included; None: all.
        softmax_sinks: (Hq,), see ``masked_attention``.
        layer: index of the layer.
        layers: number of layers.
        theta: base of the rotation of queries and keys; None: they are not rotated.
        held: for each KV head, the positions it holds.
        near: for each KV head, whether the last cut was too close for float32.
        cuts: cuts so far, over all KV heads.
    """

    rule: Rule
    heads: int
    kv_heads: int
    dim: int
    scale: float
    softcap: float | None = None
    sliding: int | None = None
    softmax_sinks: Tensor | None = None
    layer: int = 0
    layers: int = 1
    theta: float | None = None
    held: list[set[int]] = field(init=False)
    near: list[bool] = field(init=False)
    cuts: int = 0

    def __post_init__(self) -> None:
        self.keys = torch.zeros(self.kv_heads, 0, self.dim, dtype=torch.float64)
        self.values = self.keys.clone()
        self.mass = torch.zeros(self.kv_heads, 0, dtype=torch.float64)
        self.norms, self.newest = self.mass.clone(), self.mass
        self.since = self.prompted = 0
        self.held = [set() for _ in range(self.kv_heads)]
        self.near = [False] * self.kv_heads
        self.stash: list[tuple[int, Tensor]] = []  # (position, query (Hq, D)) of the prompt that is being fed

    @property
    def seen(self) -> int:
        return self.keys.shape[1]

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, prompt: bool, budget: int | None, made: Tensor | None = None
    ) -> Tensor:
        """Take in n tokens, q (Hq, n, D), k and v (Hkv, n, D); return their output (Hq, n, D).

        ``made``: the keys as the model made them, where k are the keys as they are stored.
        """
        first, n = self.seen, q.shape[1]
        self.near = [False] * self.kv_heads
        self.keys = torch.cat([self.keys, k.double()], 1)
        self.values = torch.cat([self.values, v.double()], 1)
        for held in self.held:
            held.update(range(first, first + n))
        visible = self.visible(range(first, first + n))
        out, weights = self.attention(q, visible)
        self.norms = torch.cat([self.norms, (k if made is None else made).double().square().sum(-1).sqrt()], 1)
        received = self.mean_of_group(weights)
        self.mass = torch.cat([self.mass, torch.zeros(self.kv_heads, n, dtype=torch.float64)], 1)
        self.mass += received.sum(1)
        self.newest = received[:, -1]
        self.stash = [*self.stash, *((first + i, q[:, i].double()) for i in range(n))] if prompt else []
        watching = self.rule.prompt.watches if self.rule.prompt else 0
        if prompt and watching:  # what is accumulated while decoding starts from what the prompt's rule saw
            self.mass = self.window_sums(watching)
            self.since = self.seen - len(self.stash[-watching:])
        if prompt:
            self.prompted = self.seen
        if budget is not None:
            budget = self.rule.share(budget, self.layer, self.layers, self.prompted)
        surplus = self.rule.surplus(len(self.held[0]), budget, prompt)
        if surplus:
            assert budget is not None
            self.cut(self.rule.now(prompt), budget, len(self.held[0]) - surplus, prompt)
        return out

    def attention(self, q: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """``masked_attention`` of this layer."""
        return masked_attention(q, self.keys, self.values, visible, self.scale, self.softcap, self.softmax_sinks)

    def visible(self, queries: range | list[int]) -> Tensor:
        """(Hkv, n, N) bool: a query at a position sees what its KV head holds, up to itself and within its window."""
        mask = torch.zeros(self.kv_heads, len(queries), self.seen, dtype=torch.bool)
        for head, held in enumerate(self.held):
            for row, query in enumerate(queries):
                oldest = 0 if self.sliding is None else query - self.sliding + 1
                mask[head, row, [token for token in held if oldest <= token <= query]] = True
        return mask

    def mean_of_group(self, weights: Tensor) -> Tensor:
        """(Hq, n, N) to (Hkv, n, N)."""
        group = self.heads // self.kv_heads
        return torch.stack([weights[head * group : (head + 1) * group].mean(0) for head in range(self.kv_heads)])

    def window_sums(self, window: int) -> Tensor:
        """(Hkv, N): what the prompt's last ``window`` queries give to the tokens that are held now."""
        observers = self.stash[-window:]
        queries = torch.stack([query for _, query in observers], 1)
        visible = self.visible([position for position, _ in observers])
        _, weights = self.attention(queries, visible)
        return self.mean_of_group(weights).sum(1)

    def measure(self, rule: Rule, prompt: bool) -> Tensor:
        """(Hkv, N): what a rule goes by, for each token; of a token that is not held it may be anything."""
        if rule.method == "knorm":
            return -self.norms
        if rule.method == "keydiff":
            return torch.stack([self.unlike(head) for head in range(self.kv_heads)])
        if rule.method == "expectedattention":
            return torch.stack([self.expected(rule, head) for head in range(self.kv_heads)])
        if rule.watches:
            return self.window_sums(rule.watches) if prompt else self.newest
        if rule.normalize == "age":
            observers = [self.seen - max(token, self.since) for token in range(self.seen)]
            return self.mass / torch.tensor(observers, dtype=torch.float64)
        return self.mass

    def unlike(self, head: int) -> Tensor:
        """(N,): KeyDiff's score, 1 less the cosine between each key and the mean direction of those held."""
        units = [key / max(float(key.norm()), 1e-12) for key in self.keys[head]]
        anchor = torch.zeros(self.dim, dtype=torch.float64)
        for token in self.held[head]:
            anchor += units[token] / len(self.held[head])
        return torch.stack([1 - unit @ anchor / anchor.norm() for unit in units])

    def expected(self, rule: Rule, head: int) -> Tensor:
        """(N,): ExpectedAttention's score of one KV head's tokens."""
        group, places = self.heads // self.kv_heads, range(self.seen, self.seen + rule.future)
        turn = sum((rotation(self.dim, place, self.theta) for place in places), torch.zeros(self.dim, self.dim))
        turn = turn.double() / rule.future
        tokens = [token for token in sorted(self.held[head]) if token >= rule.sinks]
        expected = torch.zeros(self.seen, dtype=torch.float64)
        for member in range(head * group, (head + 1) * group):
            queries = [rotation(self.dim, p, self.theta).T @ q[member] for p, q in self.stash if p >= rule.sinks]
            mean = torch.stack(queries).mean(0)
            spread = torch.stack([torch.outer(q - mean, q - mean) for q in queries]).mean(0)
            logits = []
            for token in tokens:
                back = turn.T @ self.keys[head, token]  # the key, turned against the queries to come
                variance = float(back @ spread @ back) if rule.covariance else 0.0
                logits.append(self.scale * float(back @ mean) + self.scale**2 * variance / 2)
            expected[tokens] += torch.softmax(torch.tensor(logits, dtype=torch.float64), 0) / group
        return (expected + rule.epsilon) * self.values[head].norm(dim=-1) if rule.values else expected

    def cut(self, rule: Rule, budget: int, keep: int, prompt: bool) -> None:
        """Keep sinks, latest tokens and the best of the others in each KV head: ``keep`` tokens."""
        last = self.seen - 1
        measured = self.measure(rule, prompt)
        for head, held in enumerate(self.held):
            newest = last - rule.latest(budget)
            safe = {token for token in held if token < rule.sinks or token > newest}
            scores = rule.scores(sorted(held), last, measured[head])
            chosen, near = best({token: scores[token] for token in held - safe}, keep - len(safe))
            self.held[head], self.near[head] = safe | chosen, near
            self.cuts += 1

    def store(self, head: int, tokens: list[int], keys: Tensor, values: Tensor) -> None:
        """From now on, read these tokens as they are stored: keys and values (tokens, D)."""
        self.keys[head, tokens], self.values[head, tokens] = keys.double(), values.double()

    def adopt(self, head: int, held: set[int]) -> None:
        """Go on from another choice in one KV head."""
        self.held[head] = set(held)


def rotation(dim: int, position: int, theta: float | None) -> Tensor:
    """(D, D) float64: turns the plane of elements i and i + D/2 by position / theta^(2i/D)."""
    matrix = torch.eye(dim, dtype=torch.float64)
    for i in range(dim // 2 if theta is not None else 0):
        angle = position * theta ** (-2 * i / dim)  # type: ignore[operator]
        j = i + dim // 2
        matrix[i, i] = matrix[j, j] = math.cos(angle)
        matrix[j, i], matrix[i, j] = math.sin(angle), -math.sin(angle)
    return matrix


def hadamard(x: Tensor) -> Tensor:
    """(..., D) float64: the orthonormal Walsh-Hadamard transform over blocks of D's largest power-of-two factor."""
    dim = x.shape[-1]
    size = 1
    while dim % (2 * size) == 0:
        size *= 2
    signs = [[1 - 2 * (bin(i & j).count("1") % 2) for j in range(size)] for i in range(size)]
    matrix = torch.tensor(signs, dtype=torch.float64) / math.sqrt(size)
    blocks = [x[..., start : start + size].double() @ matrix for start in range(0, dim, size)]
    return torch.cat(blocks, -1)
