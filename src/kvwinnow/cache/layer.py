"""The cache of one layer: it stores, evicts in place and reports its bytes; what to evict is the policy's decision."""

from __future__ import annotations

import torch
from torch import Tensor

from kvwinnow import ops
from kvwinnow.cache.holding import Holding
from kvwinnow.cache.memory import GROWTH
from kvwinnow.cache.moments import QueryMoments
from kvwinnow.cache.step import Step
from kvwinnow.codecs.vectors import Vectors
from kvwinnow.policies import LayerView, Lengths, Phase, Queries
from kvwinnow.statistics import MASS, NONE, Kind, Statistics


class LayerCache(Holding):
    """Slots of one layer, overwritten in place: an eviction marks a slot as empty, the next token is written there."""

    # -- the way of a token ------------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step, variant: ops.Variant) -> Tensor:
        """Take in the new tokens, attend to everything held, and evict what the policy lets go.

        Args:
            q: (B, Hq, n, D) queries, rotated as the model rotates them.
            k: (B, Hkv, n, D) keys.
            v: (B, Hkv, n, D) values.
            step: what this call means.
            variant: how the layer attends.

        Returns:
            (B, Hq, n, D) in q's dtype.
        """
        step = step.on(k.device)
        slots = self.slots or self.allocate((*k.shape[:2], self._least(), k.shape[3]), k.dtype, k.device)
        slots.keys.freeze(k, step.starts)
        slots.values.freeze(v, step.starts)
        return (
            self._prompt(q, k, v, step, variant) if step.phase is Phase.PROMPT else self._decode(q, k, v, step, variant)
        )

    def _prompt(self, q: Tensor, k: Tensor, v: Tensor, step: Step, variant: ops.Variant) -> Tensor:
        slots = self._held()
        n = k.shape[2]
        before = self.kept
        self.kept = [kept + n - start for kept, start in zip(before, step.starts, strict=True)]
        self._divide(step)
        keep = self._due(step)
        wanted = self.policy.statistics(Phase.PROMPT)
        window = self._observe(q, step, wanted.window) if wanted.kind is Kind.WINDOW else None
        if wanted.kind is Kind.QUERIES:
            self._take_in(q, step, wanted.skip)
        measure = MASS if Kind.MASS in self.running else NONE
        if wanted.kind is Kind.WINDOW and (keep is not None or Kind.MASS in self.running):
            measure = wanted  # else nobody will look at it
        chunk = ops.Chunk(k, v, step.positions, step.starts)
        # Slots that hold nothing yet are not worth attending to.
        past = slots if any(before) else self._no_slots()
        out, observed = ops.attention(q, past, chunk, variant=variant, statistics=measure, window=window)

        fresh = self._carry_on(k, step, past, measure, observed)
        stays = step.positions.unsqueeze(1).expand(-1, k.shape[1], -1) >= 0
        if keep is not None:
            parts = None
            if wanted.kind is Kind.WINDOW and observed is not None:
                parts = (observed.slots, observed.chunk)
            elif wanted.kind in self.running:
                parts = (self.running[wanted.kind][:, :, : past.positions.shape[2]], fresh[wanted.kind])
            stays = self._cut(chunk, step, keep, past, parts, variant.scale)
        self._count_written(stays)
        self._resize_for()
        alike = not any(step.starts) and len(set(self.kept)) == 1
        (self._write_first if alike and not any(before) else self._write)(k, v, step, stays, fresh)
        if keep is not None:
            self._shrink(prompt=True)
        return out

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, step: Step, variant: ops.Variant) -> Tensor:
        self.window = self.moments = None  # the prompt is over
        self.observers = []
        self._divide(step)
        # A row to which this step brings nothing (start 1) needs a free slot too, which is written to and stays empty.
        self._resize_for(more=1)
        self.kept = [kept + 1 - start for kept, start in zip(self.kept, step.starts, strict=True)]
        self.written = min(self.written + 1, max(self.kept))
        slots = self._held()
        wanted = self.policy.statistics(Phase.DECODE).kind
        done = ops.decode(
            *(q, slots, k, v, step.positions),
            variant=variant,
            mass=self.running.get(Kind.MASS),
            weigh=wanted is Kind.WINDOW,
        )
        if Kind.KEY_NORM in self.running:
            self.running[Kind.KEY_NORM].scatter_(2, done.slot, _norms(k))
        keep = self._due(step)
        if keep is not None:
            view = LayerView(
                Phase.DECODE,
                slots.positions,
                done.weights if wanted is Kind.WINDOW else self.running.get(wanted),
                step.last,
                self._since(step),
                slots.keys.unstored,
                slots.values.unstored,
            )
            stays, before = self.policy.select(view, self._lengths(step), keep), max(self.kept)
            slots.positions.masked_fill_(~stays, -1)
            self.kept = [min(kept, most) for kept, most in zip(self.kept, keep, strict=True)]
            if before - max(self.kept) >= GROWTH:  # a prompt that was left whole until now
                self._shrink()
        if max(step.seen) % GROWTH == 0:  # to look waits for the device, so not at every step
            self._let_go_of_empty_segments()
        return done.out

    # -- statistics --------------------------------------------------------------------------------

    def _carry_on(
        self, k: Tensor, step: Step, past: ops.Slots, measure: Statistics, observed: ops.Observed | None
    ) -> dict[Kind, Tensor]:
        """Bring what is stored for the slots up to date; return the same for the chunk, (B, Hkv, n) each."""
        fresh = {}
        if Kind.KEY_NORM in self.running:
            fresh[Kind.KEY_NORM] = _norms(k)
        mass = self.running.get(Kind.MASS)
        if mass is None or observed is None:
            return fresh
        fresh[Kind.MASS] = observed.chunk
        held, n = past.positions.shape[2] > 0, step.positions.shape[1]
        if measure.kind is Kind.MASS:
            if held:
                mass += observed.slots
            return fresh
        # The sums over a prompt's window are taken anew at every chunk and every turn, and stand for all before.
        for row, start in enumerate(step.starts):
            if start < n:
                self.since[row] = step.seen[row] - self.observers[row]
                if held:
                    mass[row] = observed.slots[row]
        return fresh

    def _since(self, step: Step) -> Tensor | int:
        if not any(self.since):
            return 0
        return torch.tensor(self.since, dtype=torch.int32, device=step.positions.device).view(-1, 1, 1)

    def _take_in(self, q: Tensor, step: Step, skip: int) -> None:
        """Add the new queries to the moments, but those of a row's first ``skip`` tokens."""
        batch, heads, n, dim = q.shape
        if self.moments is None:
            self.moments = QueryMoments(batch, heads, dim, q.device)
        for row, start in enumerate(step.starts):
            begin = max(start, n - (step.seen[row] - skip))
            if begin < n:
                self.moments.add(row, q[row, :, begin:], step.seen[row] - (n - begin), self.rope)

    # -- eviction ----------------------------------------------------------------------------------

    def _divide(self, step: Step) -> None:
        """Give this layer its part of each row's budget, which goes by the row's length when its last prompt ended."""
        if step.phase is Phase.PROMPT:
            rows = zip(self.prompted or step.seen, step.seen, step.starts, strict=True)
            self.prompted = [seen if start < step.positions.shape[1] else old for old, seen, start in rows]
        if self.budget is not None:
            self.budgets = [self.budget] * len(step.budgets)
            return
        self.budgets = [
            None
            if budget is None
            else self.policy.layer_budget(budget, layer=self.layer, layers=self.layers, seen=seen)
            for budget, seen in zip(step.budgets, self.prompted, strict=True)
        ]

    def _lengths(self, step: Step) -> list[Lengths]:
        return [
            Lengths(seen, kept, seen if budget is None else budget)
            for seen, kept, budget in zip(step.seen, self.kept, self.budgets, strict=True)
        ]

    def _due(self, step: Step) -> list[int] | None:
        """Tokens each row keeps now, or None if no row has anything to lose."""
        lengths, n = self._lengths(step), step.positions.shape[1]
        # A row to which this call brings nothing waits for its own next token, as it would alone.
        due = [
            None if start == n else self.policy.due(step.phase, row)
            for row, start in zip(lengths, step.starts, strict=True)
        ]
        if all(keep is None for keep in due):
            return None
        return [row.kept if keep is None else keep for row, keep in zip(lengths, due, strict=True)]

    def _cut(
        self,
        chunk: ops.Chunk,
        step: Step,
        keep: list[int],
        past: ops.Slots,
        parts: tuple[Tensor, Tensor] | None,
        scale: float,
    ) -> Tensor:
        """Free what the policy lets go among the slots; return (B, Hkv, n) bool, what stays of the chunk.

        ``parts`` is the statistic of the slots and that of the chunk.
        """
        new = step.positions.unsqueeze(1).expand(-1, past.positions.shape[1], -1)
        positions, count = torch.cat([past.positions, new], dim=2), past.positions.shape[2]
        # Policies see a prompt in position order, empty slots last.
        order = torch.where(positions < 0, torch.iinfo(torch.int32).max, positions).argsort(dim=-1, stable=True)

        def read(vectors: Vectors, made: Tensor) -> Tensor:
            every = torch.cat([vectors.unstored(), made.float()], dim=2) if count else made.float()
            return every.gather(2, order.unsqueeze(-1).expand(-1, -1, -1, every.shape[-1]))

        def expect() -> Queries:
            assert self.moments is not None, "asked for by QUERIES only"
            return self.moments.expected(step.seen, self.policy.statistics(Phase.PROMPT).future, scale, self.rope)

        view = LayerView(
            Phase.PROMPT,
            positions.gather(2, order),
            None if parts is None else torch.cat(parts, dim=2).gather(2, order),
            step.last,
            self._since(step),
            lambda: read(past.keys, chunk.keys),
            lambda: read(past.values, chunk.values),
            None if self.moments is None else expect,
        )
        chosen = self.policy.select(view, self._lengths(step), keep)
        stays = torch.zeros_like(chosen).scatter_(2, order, chosen)
        past.positions.masked_fill_(~stays[:, :, :count], -1)
        self.kept = [min(kept, most) for kept, most in zip(self.kept, keep, strict=True)]
        return stays[:, :, count:]

    def _observe(self, q: Tensor, step: Step, width: int) -> ops.Window:
        """The last ``width`` queries of each row, those of earlier chunks included; kept for the next chunk."""
        batch, heads, n, dim = q.shape
        earlier = q.new_zeros(batch, heads, 0, dim) if self.window is None else self.window
        before = [0] * batch if self.window is None else self.observers
        self.lent = False
        self.observers = [min(width, old + n - start) for old, start in zip(before, step.starts, strict=True)]
        if any(step.starts):
            width = min(width, earlier.shape[2] + n)
            rows = []
            for row, start in enumerate(step.starts):
                tail = torch.cat([earlier[row], q[row, :, start:][:, -width:]], dim=1)[:, -width:]
                rows.append(torch.cat([tail.new_zeros(heads, width - tail.shape[1], dim), tail], dim=1))
            self.window = torch.stack(rows)
        else:
            self.window = torch.cat([earlier, q[:, :, -width:]], dim=2)[:, :, -width:].clone()
        width = self.window.shape[2]
        ends = torch.tensor(step.seen, dtype=torch.int32, device=q.device)
        places = torch.arange(-width, 0, dtype=torch.int32, device=q.device)
        own = places >= -torch.tensor(self.observers, dtype=torch.int32, device=q.device).unsqueeze(1)
        return ops.Window(self.window, (ends.unsqueeze(1) + places).masked_fill(~own, -1))


def _norms(k: Tensor) -> Tensor:
    """(B, Hkv, n) float32: L2 norms of keys (B, Hkv, n, D), rounded to 17 bits.

    The same token has the same norm wherever it stands in the first layer, since rotations keep lengths. Rounded, such
    ties are ties, which the position breaks, and not the noise of a rotation or of another batch's matrix products.
    """
    bits = k.float().norm(dim=-1).view(torch.int32)
    rounded: Tensor = (bits + 64) & -128
    return rounded.view(torch.float32)
