"""What one layer holds: slots, statistics and counts, and how they grow, shrink, are shared, selected and filed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from kvwinnow import ops
from kvwinnow.cache.memory import GROWTH, least_slots, slots_for, tokens_to_hold
from kvwinnow.cache.moments import QueryMoments
from kvwinnow.cache.step import Step
from kvwinnow.codecs import Codec
from kvwinnow.codecs.vectors import Vectors
from kvwinnow.errors import PolicyError
from kvwinnow.policies import Phase, Policy
from kvwinnow.statistics import Kind


class Holding:
    """The memory of one layer. What is written to it, and what is given up, ``LayerCache`` decides.

    Attributes:
        slots: keys, values and positions; None before the first token.
        running: (B, Hkv, S) float32 each, the statistics the policy has stored for each slot: the attention its token
            has received (MASS), its key's norm (KEY_NORM).
        since: for each row, the position of the first query whose weights MASS holds.
        window: (B, Hq, w, D), the prompt's last queries, right-aligned; None unless the policy asks for WINDOW, and
            from the first decode step on.
        observers: for each row, how many of the window's queries are its own; padding lies before them.
        moments: of the prompt's queries; None unless the policy asks for QUERIES, and from the first decode step on.
        kept: for each row, tokens that each KV head holds.
        budgets: for each row, tokens that each KV head of this layer may hold; None: no limit.
        prompted: for each row, tokens seen when its last prompt ended.
        lent: whether forks refer to this window as well.
        written: once slots are shared with forks, the most own slots that a KV head may have filled.
    """

    def __init__(
        self,
        policy: Policy,
        k_codec: Codec,
        v_codec: Codec,
        *,
        exact: int,
        budget: int | None = None,
        layer: int = 0,
        layers: int = 1,
        rope: ops.Rope | None = None,
    ) -> None:
        """A cache that holds nothing yet.

        Args:
            policy: which tokens stay.
            k_codec: how keys are stored.
            v_codec: how values are stored.
            exact: slots left unquantised.
            budget: tokens each KV head may hold whatever a step says: a sliding layer's own window; None: the step's.
            layer: index of the layer among those that share the budget.
            layers: how many those are.
            rope: how the model rotates queries and keys; None: it does not. Policies that ask for QUERIES need it.

        Raises:
            PolicyError: the policy asks for more than the newest query's weights while decoding.
        """
        decoding = policy.statistics(Phase.DECODE)
        if decoding.kind is Kind.QUERIES or (decoding.kind is Kind.WINDOW and decoding.window != 1):
            raise PolicyError(
                f"{policy.name} asks for {decoding.kind.value} of {decoding.window} while decoding; the cache measures "
                "NONE, MASS, KEY_NORM or WINDOW(1) there"
            )
        self.policy, self.k_codec, self.v_codec, self.exact = policy, k_codec, v_codec, exact
        self.budget, self.layer, self.layers, self.rope = budget, layer, layers, rope
        self.slots: ops.Slots | None = None
        self.running: dict[Kind, Tensor] = {}
        self.since: list[int] = []
        self.window: Tensor | None = None
        self.observers: list[int] = []
        self.moments: QueryMoments | None = None
        self.kept: list[int] = []
        self.budgets: list[int | None] = []
        self.prompted: list[int] = []
        self.lent = False
        self.written = 0

    def allocate(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> ops.Slots:
        """Empty slots of ``shape`` (B, Hkv, S, D) for a model of that dtype."""
        least = self._least()
        keys = Vectors.allocate(self.k_codec, shape, exact=least, centred=True, dtype=dtype, device=device)
        values = Vectors.allocate(self.v_codec, shape, exact=least, centred=False, dtype=dtype, device=device)
        positions = torch.full(shape[:3], -1, dtype=torch.int32, device=device)
        self.slots = ops.Slots(keys, values, positions)
        for kind in self.policy.running():
            self.running[kind] = torch.zeros(shape[:3], dtype=torch.float32, device=device)
        self.kept, self.since = [0] * shape[0], [0] * shape[0]
        return self.slots

    # -- slots -------------------------------------------------------------------------------------

    def _write(self, k: Tensor, v: Tensor, step: Step, stays: Tensor, fresh: dict[Kind, Tensor]) -> None:
        """Put the chunk's tokens that stay into free slots, lower positions into lower slots."""
        slots = self._held()
        rows, columns = stays.flatten(0, 1).nonzero(as_tuple=True)
        rank = stays.flatten(0, 1).cumsum(-1)[rows, columns] - 1
        free = (~slots.free()).to(torch.uint8).argsort(dim=-1, stable=True).flatten(0, 1)
        places = free[rows, rank]
        ops.write_some(slots, k, v, rows, columns, places)
        slots.positions.flatten(0, 1)[rows, places] = step.positions[rows // k.shape[1], columns]
        for kind, values in fresh.items():
            self.running[kind].flatten(0, 1)[rows, places] = values.flatten(0, 1)[rows, columns]

    def _write_first(self, k: Tensor, v: Tensor, step: Step, stays: Tensor, fresh: dict[Kind, Tensor]) -> None:
        """The same where all slots are empty and as many tokens stay of each KV head of each row."""
        slots, count = self._held(), self.kept[0]
        positions = step.positions.unsqueeze(1).expand(-1, k.shape[1], -1)
        order = None
        if count < k.shape[2]:
            order = stays.nonzero()[:, 2].view(*k.shape[:2], count)
            positions = positions.gather(2, order)
            fresh = {kind: values.gather(2, order) for kind, values in fresh.items()}
        ops.write_first(slots, k, v, order)
        slots.positions[:, :, :count] = positions
        for kind, values in fresh.items():
            self.running[kind][:, :, :count] = values

    def _shared(self) -> tuple[int, int]:
        """The range of the shared slots."""
        keys = self._held().keys
        return keys.exact.shape[2], keys.tail

    def _count_written(self, stays: Tensor) -> None:
        """Count own slots once a chunk's tokens of which (B, Hkv, n) ``stays`` tells are written."""
        first, stop = self._shared()
        if first < stop:
            own = self._held().positions >= 0
            own[:, :, first:stop] = False
            self.written = int((own.sum(-1) + stays.sum(-1)).max())

    def _least(self) -> int:
        return least_slots((self.k_codec, self.v_codec), self.exact)

    def _bound(self) -> int | None:
        bounds = [None if budget is None else self.policy.capacity(budget) for budget in self.budgets]
        known = [bound for bound in bounds if bound is not None]
        return max(known) if len(known) == len(bounds) else None

    def _slots_for(self, tokens: int) -> int:
        return slots_for(tokens, self._bound(), (self.k_codec, self.v_codec), self.exact)

    def _resize_for(self, *, more: int = 0) -> None:
        """Allocate slots if those held do not suffice: in decode for one ``more`` token than is kept.

        After a chunk of a prompt there are as many as if the prompt had come in one piece.
        """
        slots = self._held()
        first, stop = self._shared()
        count = slots.positions.shape[2] - (stop - first)
        own = self._own_tokens(prompt=not more)
        if own + more > count or (not more and own and self._slots_for(own) > count):
            self._let_go_of_empty_segments()
            first, stop = self._shared()
            target = stop - first + self._slots_for(self._own_tokens(prompt=not more))
            if target > slots.positions.shape[2]:  # else what was let go makes room enough
                self._resize(target)

    def _own_tokens(self, *, prompt: bool = False) -> int:
        """The most tokens that a KV head may hold outside the shared slots; of a ``prompt`` those to allocate for."""
        first, stop = self._shared()
        if first < stop:
            return min(self.written, max(self.kept))
        if not prompt:
            return max(self.kept)
        rows = zip(self.kept, self.prompted, self.budgets, strict=True)
        return max(tokens_to_hold(self.policy, *row) for row in rows)

    def _let_go_of_empty_segments(self) -> None:
        """Give back shared segments of which no KV head holds a token any more."""
        slots = self._held()
        begin = slots.keys.exact.shape[2]
        for segment, end in reversed(list(enumerate(slots.keys.seams))):
            start = begin if segment == 0 else slots.keys.seams[segment - 1]
            if not bool((slots.positions[:, :, start:end] >= 0).any()):
                slots.keys.drop(segment)
                slots.values.drop(segment)
                slots.positions = _without(slots.positions, start, end)
                self.running = {kind: _without(tensor, start, end) for kind, tensor in self.running.items()}

    def _shrink(self, *, prompt: bool = False) -> None:
        """Give back slots when a cut leaves a whole growth step or more unused."""
        self._let_go_of_empty_segments()
        slots = self._held()
        first, stop = self._shared()
        edge = max(self._least(), stop)
        held = slots.positions[:, :, edge:] >= 0
        own = self._own_tokens(prompt=prompt)
        # The first slots stay where they are, filled or not; what lies after them may be all that is held.
        target = max(stop - first + self._slots_for(own), edge + own)
        if slots.positions.shape[2] - target >= GROWTH:
            order = (~held).to(torch.uint8).argsort(dim=-1, stable=True)[:, :, : target - edge] + edge
            self._resize(target, order)

    def _resize(self, count: int, order: Tensor | None = None) -> None:
        slots = self._held()
        edge = max(self._least(), self._shared()[1])
        if order is not None:
            first = torch.arange(edge, device=order.device).expand(*order.shape[:2], -1)
            order = torch.cat([first, order], dim=2)
        slots.keys.resize(count, order, ops.moved)
        slots.values.resize(count, order, ops.moved)
        slots.positions = ops.moved(slots.positions, count, order, -1)
        self.running = {kind: ops.moved(tensor, count, order, 0.0) for kind, tensor in self.running.items()}

    def select_rows(self, rows: Sequence[int]) -> None:
        """Let row r of the batch hold everything that row ``rows[r]`` held; rows may repeat or be left out."""
        if self.slots is None:
            return
        first, stop = self._shared()
        index = torch.tensor(rows, dtype=torch.int64, device=self.slots.positions.device)
        self.slots.keys.select(index)
        self.slots.values.select(index)
        self.slots.positions = self.slots.positions.index_select(0, index)
        self.running = {kind: tensor.index_select(0, index) for kind, tensor in self.running.items()}
        if self.window is not None:
            self.window = self.window.index_select(0, index)
            self.observers, self.lent = [self.observers[row] for row in rows], False
        if self.moments is not None:
            self.moments.select(index)
        self.kept, self.since = [self.kept[row] for row in rows], [self.since[row] for row in rows]
        self.prompted = [self.prompted[row] for row in rows] if self.prompted else []
        self.budgets = [self.budgets[row] for row in rows] if self.budgets else []
        if first < stop and self.budgets:  # what was shared is this layer's own now, empty slots too
            self._shrink()

    def fork(self) -> Self:
        """Another layer with the same content, which shares all slots but the unquantised ones.

        From now on both write to new slots of their own only, and neither sees what becomes of the other.
        """
        twin = type(self)(
            self.policy,
            self.k_codec,
            self.v_codec,
            exact=self.exact,
            budget=self.budget,
            layer=self.layer,
            layers=self.layers,
            rope=self.rope,
        )
        if self.slots is not None:
            first, stop = self._shared()
            if stop - first > 2 * (max(self.kept) + GROWTH):  # most of what is shared has been evicted here
                self.select_rows(range(len(self.kept)))
            if self.slots.keys.parts[0].shape[2]:  # else all of it is shared already
                self._trim()
                self.written = self.slots.keys.exact.shape[2]
            keys, values = self.slots.keys.fork(), self.slots.values.fork()
            twin.slots = ops.Slots(keys, values, self.slots.positions.clone())
        twin.running = {kind: tensor.clone() for kind, tensor in self.running.items()}
        twin.moments = copy.deepcopy(self.moments)
        twin.window = self.window  # never written to, only replaced
        twin.lent = self.lent = self.window is not None
        twin.observers, twin.kept, twin.written = list(self.observers), list(self.kept), self.written
        twin.since, twin.prompted, twin.budgets = list(self.since), list(self.prompted), list(self.budgets)
        return twin

    def _trim(self) -> None:
        """Give back a fork's last slots, which it never used: once they are shared, nobody may."""
        first, stop = self._shared()
        if first < stop:
            used = (self._held().positions >= 0).flatten(0, 1).any(0).nonzero()
            self._resize(max(stop, int(used.max()) + 1 if used.numel() else 0))

    def _held(self) -> ops.Slots:
        assert self.slots is not None, "attend() allocates before anything else runs"
        return self.slots

    def _no_slots(self) -> ops.Slots:
        slots = self._held()
        return ops.Slots(slots.keys, slots.values, slots.positions[:, :, :0])

    def reset(self) -> None:
        """Forget everything and give the memory back."""
        self.slots = self.window = self.moments = None
        self.running = {}
        self.kept, self.budgets, self.prompted, self.since, self.observers = [], [], [], [], []
        self.written = 0

    def shared_nbytes(self) -> int:
        """Of ``nbytes()``, what forks of this layer, or the one it was forked from, refer to as well."""
        shared = [self.window] if self.window is not None and self.lent else []
        if self.slots is not None:
            shared += [*self.slots.keys.shared_tensors(), *self.slots.values.shared_tensors()]
        return sum(tensor.untyped_storage().nbytes() for tensor in shared)

    def flat(self) -> dict[str, Tensor]:
        """Every tensor held, by name, what is shared and what is not as one: what a file of the layer holds."""
        slots = self._held()
        named = {f"keys.{name}": tensor for name, tensor in slots.keys.flat().items()}
        named |= {f"values.{name}": tensor for name, tensor in slots.values.flat().items()}
        named["positions"] = slots.positions
        named |= {f"running.{kind.name.lower()}": tensor for kind, tensor in self.running.items()}
        if self.window is not None:
            named["window"] = self.window
        if self.moments is not None:
            named["moments.mean"], named["moments.products"] = self.moments.tensors()
        return named

    def counts(self) -> dict[str, list[int]]:
        """For each row, the numbers that go with the tensors of ``flat``; none where there is nothing to count."""
        queries = [] if self.moments is None else self.moments.counts
        return {
            "kept": self.kept,
            "since": self.since,
            "prompted": self.prompted,
            "observers": self.observers,
            "queries": queries,
        }

    def adopt(self, named: Mapping[str, Tensor], counts: Mapping[str, list[int]], frozen: list[bool]) -> None:
        """Take over what ``flat`` and ``counts`` gave for slots allocated alike.

        ``frozen`` tells which rows had a token.
        """
        slots = self._held()
        for side, vectors in (("keys.", slots.keys), ("values.", slots.values)):
            own = {name.removeprefix(side): tensor for name, tensor in named.items() if name.startswith(side)}
            vectors.adopt(own, frozen)
        slots.positions, self.window = named["positions"], named.get("window")
        self.running = {kind: named[f"running.{kind.name.lower()}"] for kind in self.running}
        self.kept, self.since, self.prompted = counts["kept"], counts["since"], counts["prompted"]
        self.observers = counts["observers"]
        self.moments = None
        if "moments.mean" in named:
            self.moments = QueryMoments.of(counts["queries"], named["moments.mean"], named["moments.products"])

    def nbytes(self) -> int:
        """Bytes of every tensor held: codes, scales, positions, statistics, means, unquantised slots, empty slots."""
        held = list(self.running.values())
        if self.window is not None:
            held.append(self.window)
        if self.moments is not None:
            held += self.moments.tensors()
        if self.slots is not None:
            held += [*self.slots.keys.tensors(), *self.slots.values.tensors(), self.slots.positions]
        return sum(tensor.untyped_storage().nbytes() for tensor in held)


def _without(tensor: Tensor, start: int, stop: int) -> Tensor:
    return torch.cat([tensor[:, :, :start], tensor[:, :, stop:]], dim=2)
