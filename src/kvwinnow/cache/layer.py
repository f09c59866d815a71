"""The cache of one layer: it stores, evicts in place and reports its bytes; what to evict is the policy's decision."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvwinnow import ops
from kvwinnow.cache.memory import GROWTH, least_slots, slots_for
from kvwinnow.cache.step import Step
from kvwinnow.codecs import Codec, Vectors
from kvwinnow.policies import LayerView, Lengths, Phase, Policy
from kvwinnow.statistics import NONE, Kind


class LayerCache:
    """Slots of one layer, overwritten in place: an eviction marks a slot as empty, the next token is written there.

    Attributes:
        slots: keys, values and positions; None before the first token.
        mass: (B, Hkv, S) float32, attention each token has received; None unless the policy asks for MASS.
        window: (B, Hq, w, D), the prompt's last queries, right-aligned; None unless the policy asks for WINDOW, and
            from the first decode step on.
        observers: for each row, how many of the window's queries are its own; padding lies before them.
        kept: for each row, tokens that each KV head holds.
        lent: whether forks refer to this window as well.
        written: once slots are shared with forks, the most own slots that a KV head may have filled.
    """

    def __init__(self, policy: Policy, k_codec: Codec, v_codec: Codec, *, exact: int) -> None:
        self.policy, self.k_codec, self.v_codec, self.exact = policy, k_codec, v_codec, exact
        self.slots: ops.Slots | None = None
        self.mass: Tensor | None = None
        self.window: Tensor | None = None
        self.observers: list[int] = []
        self.kept: list[int] = []
        self.lent = False
        self.written = 0

    # -- the way of a token ------------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step, scale: float) -> Tensor:
        """Take in the new tokens, attend to everything held, and evict what the policy lets go.

        Args:
            q: (B, Hq, n, D) queries, rotated as the model rotates them.
            k: (B, Hkv, n, D) keys.
            v: (B, Hkv, n, D) values.
            step: what this call means.
            scale: factor on q.k.

        Returns:
            (B, Hq, n, D) in q's dtype.
        """
        slots = self.slots or self.allocate((*k.shape[:2], self._least(), k.shape[3]), k.dtype, k.device)
        slots.keys.freeze(k, list(step.starts))
        slots.values.freeze(v, list(step.starts))
        return self._prompt(q, k, v, step, scale) if step.phase is Phase.PROMPT else self._decode(q, k, v, step, scale)

    def allocate(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> ops.Slots:
        """Empty slots of ``shape`` (B, Hkv, S, D) for a model of that dtype."""
        least = self._least()
        keys = Vectors.allocate(self.k_codec, shape, exact=least, centred=True, dtype=dtype, device=device)
        values = Vectors.allocate(self.v_codec, shape, exact=least, centred=False, dtype=dtype, device=device)
        positions = torch.full(shape[:3], -1, dtype=torch.int32, device=device)
        self.slots = ops.Slots(keys, values, positions)
        if self.policy.statistics(Phase.DECODE).kind is Kind.MASS:
            self.mass = torch.zeros(shape[:3], dtype=torch.float32, device=device)
        self.kept = [0] * shape[0]
        return self.slots

    def _prompt(self, q: Tensor, k: Tensor, v: Tensor, step: Step, scale: float) -> Tensor:
        slots = self._held()
        n = k.shape[2]
        before = self.kept
        self.kept = [kept + n - start for kept, start in zip(before, step.starts, strict=True)]
        keep = self._due(step)
        wanted = self.policy.statistics(Phase.PROMPT)
        window = self._observe(q, step, wanted.window) if wanted.kind is Kind.WINDOW else None
        if wanted.kind is Kind.WINDOW and keep is None:
            wanted = NONE  # nobody will look at it
        chunk = ops.Chunk(k, v, step.positions, step.starts)
        # Slots that hold nothing yet are not worth attending to.
        past = slots if any(before) else self._no_slots()
        out, observed = ops.attention(q, past, chunk, scale=scale, statistics=wanted, window=window)

        if self.mass is not None and observed is not None and any(before):
            self.mass += observed.slots
        stays = step.positions.unsqueeze(1).expand(-1, k.shape[1], -1) >= 0
        if keep is not None:
            stays = self._cut(step, keep, past, observed)
        self._count_written(stays)
        self._resize_for(step)
        self._write(k, v, step, stays, None if self.mass is None or observed is None else observed.chunk)
        if keep is not None:
            self._shrink(step)
        return out

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, step: Step, scale: float) -> Tensor:
        self.window = None  # the prompt is over
        # A row to which this step brings nothing (start 1) needs a free slot too, which is written to and stays empty.
        self._resize_for(step, more=1)
        self.kept = [kept + 1 - start for kept, start in zip(self.kept, step.starts, strict=True)]
        self.written = min(self.written + 1, max(self.kept))
        slots = self._held()
        slot = self._free().to(torch.uint8).argmax(-1, keepdim=True)
        slots.keys.write_one(slot, k)
        slots.values.write_one(slot, v)
        slots.positions.scatter_(2, slot, step.positions.unsqueeze(1).expand(-1, k.shape[1], -1))
        out, observed = ops.attention(q, slots, scale=scale, statistics=self.policy.statistics(Phase.DECODE))
        if self.mass is not None and observed is not None:
            self.mass.scatter_(2, slot, 0.0)
            shown = step.positions.unsqueeze(1) >= 0
            self.mass += observed.slots * shown if any(step.starts) else observed.slots
        keep = self._due(step)
        if keep is not None:
            lengths = self._lengths(step)
            view = LayerView(Phase.DECODE, slots.positions, self.mass, step.last)
            slots.positions.masked_fill_(~self.policy.select(view, lengths, keep), -1)
            self.kept = [min(kept, most) for kept, most in zip(self.kept, keep, strict=True)]
        if max(step.seen) % GROWTH == 0:  # to look waits for the device, so not at every step
            self._let_go_of_empty_segments()
        return out

    # -- eviction ----------------------------------------------------------------------------------

    def _lengths(self, step: Step) -> list[Lengths]:
        return [
            Lengths(seen, kept, seen if budget is None else budget)
            for seen, kept, budget in zip(step.seen, self.kept, step.budgets, strict=True)
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

    def _cut(self, step: Step, keep: list[int], past: ops.Slots, observed: ops.Observed | None) -> Tensor:
        """Free what the policy lets go among the slots; return (B, Hkv, n) bool, what stays of the chunk."""
        new = step.positions.unsqueeze(1).expand(-1, past.positions.shape[1], -1)
        positions = torch.cat([past.positions, new], dim=2)
        statistic = None
        if observed is not None:
            held = observed.slots if self.mass is None or not past.positions.shape[2] else self.mass
            statistic = torch.cat([held, observed.chunk], dim=2)
        # Policies see a prompt in position order, empty slots last.
        order = torch.where(positions < 0, torch.iinfo(torch.int32).max, positions).argsort(dim=-1, stable=True)
        statistic = None if statistic is None else statistic.gather(2, order)
        view = LayerView(Phase.PROMPT, positions.gather(2, order), statistic, step.last)
        chosen = self.policy.select(view, self._lengths(step), keep)
        stays = torch.zeros_like(chosen).scatter_(2, order, chosen)
        count = past.positions.shape[2]
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
                tail = torch.cat([earlier[row], q[row, :, start:]], dim=1)[:, -width:]
                rows.append(torch.cat([tail.new_zeros(heads, width - tail.shape[1], dim), tail], dim=1))
            self.window = torch.stack(rows)
        else:
            self.window = torch.cat([earlier, q], dim=2)[:, :, -width:].clone()
        width = self.window.shape[2]
        ends = torch.tensor(step.seen, dtype=torch.int32, device=q.device)
        places = torch.arange(-width, 0, dtype=torch.int32, device=q.device)
        own = places >= -torch.tensor(self.observers, dtype=torch.int32, device=q.device).unsqueeze(1)
        return ops.Window(self.window, (ends.unsqueeze(1) + places).masked_fill(~own, -1))

    # -- memory ------------------------------------------------------------------------------------

    def _write(self, k: Tensor, v: Tensor, step: Step, stays: Tensor, mass: Tensor | None) -> None:
        """Put the chunk's tokens that stay into free slots, lower positions into lower slots."""
        slots = self._held()
        rows, columns = stays.flatten(0, 1).nonzero(as_tuple=True)
        rank = stays.flatten(0, 1).cumsum(-1)[rows, columns] - 1
        free = (~self._free()).to(torch.uint8).argsort(dim=-1, stable=True).flatten(0, 1)
        places = free[rows, rank]
        slots.keys.write_many(rows, places, k.flatten(0, 1)[rows, columns])
        slots.values.write_many(rows, places, v.flatten(0, 1)[rows, columns])
        slots.positions.flatten(0, 1)[rows, places] = step.positions[rows // k.shape[1], columns]
        if self.mass is not None and mass is not None:
            self.mass.flatten(0, 1)[rows, places] = mass.flatten(0, 1)[rows, columns]

    def _free(self) -> Tensor:
        """(B, Hkv, S) bool: slots that the next token may be written to. Shared ones that lost theirs stay empty."""
        slots = self._held()
        free = slots.positions < 0
        first, stop = self._shared()
        if first < stop:
            free[:, :, first:stop] = False
        return free

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

    def _bound(self, step: Step) -> int | None:
        budgets = [budget for budget in step.budgets if budget is not None]
        bounds = [self.policy.capacity(budget) for budget in budgets]
        known = [bound for bound in bounds if bound is not None]
        return max(known) if len(known) == len(step.budgets) else None

    def _slots_for(self, tokens: int, step: Step) -> int:
        return slots_for(tokens, self._bound(step), (self.k_codec, self.v_codec), self.exact)

    def _resize_for(self, step: Step, *, more: int = 0) -> None:
        """Allocate slots if those held do not suffice for the tokens kept and, in decode, for one ``more``."""
        slots = self._held()
        first, stop = self._shared()
        count = slots.positions.shape[2] - (stop - first)
        if self._own_tokens() + more > count:
            self._let_go_of_empty_segments()
            first, stop = self._shared()
            target = stop - first + self._slots_for(self._own_tokens(), step)
            if target > slots.positions.shape[2]:  # else what was let go makes room enough
                self._resize(target)

    def _own_tokens(self) -> int:
        """The most tokens that a KV head may hold outside the shared slots."""
        first, stop = self._shared()
        return max(self.kept) if first == stop else min(self.written, max(self.kept))

    def _let_go_of_empty_segments(self) -> None:
        """Give back shared segments of which no KV head holds a token any more."""
        slots = self._held()
        begin = slots.keys.exact.shape[2]
        for segment, end in reversed(list(enumerate(slots.keys.seams))):
            start = begin if segment == 0 else slots.keys.seams[segment - 1]
            if not bool((slots.positions[:, :, start:end] >= 0).any()):
                slots.keys.drop(segment)
                slots.values.drop(segment)
                slots.positions = torch.cat([slots.positions[:, :, :start], slots.positions[:, :, end:]], dim=2)
                if self.mass is not None:
                    self.mass = torch.cat([self.mass[:, :, :start], self.mass[:, :, end:]], dim=2)

    def _shrink(self, step: Step) -> None:
        """Give back slots when a cut leaves a whole growth step or more unused."""
        self._let_go_of_empty_segments()
        slots = self._held()
        first, stop = self._shared()
        edge = max(self._least(), stop)
        held = slots.positions[:, :, edge:] >= 0
        target = stop - first + self._slots_for(self._own_tokens(), step)
        target = max(target, edge + int(held.sum(-1).max()) if held.numel() else edge)
        if slots.positions.shape[2] - target >= GROWTH:
            order = (~held).to(torch.uint8).argsort(dim=-1, stable=True)[:, :, : target - edge] + edge
            self._resize(target, order)

    def _resize(self, count: int, order: Tensor | None = None) -> None:
        slots = self._held()
        edge = max(self._least(), self._shared()[1])
        if order is not None:
            first = torch.arange(edge, device=order.device).expand(*order.shape[:2], -1)
            order = torch.cat([first, order], dim=2)
        slots.keys.resize(count, order)
        slots.values.resize(count, order)
        slots.positions = _moved(slots.positions, count, order, -1)
        self.mass = None if self.mass is None else _moved(self.mass, count, order, 0.0)

    def fork(self) -> LayerCache:
        """Another layer with the same content, which shares all slots but the unquantised ones.

        From now on both write to new slots of their own only, and neither sees what becomes of the other.
        """
        twin = LayerCache(self.policy, self.k_codec, self.v_codec, exact=self.exact)
        if self.slots is not None:
            if self.slots.keys.parts[0].shape[2]:  # else all of it is shared already
                self.written = self.slots.keys.exact.shape[2]
            keys, values = self.slots.keys.fork(), self.slots.values.fork()
            twin.slots = ops.Slots(keys, values, self.slots.positions.clone())
        twin.mass = None if self.mass is None else self.mass.clone()
        twin.window = self.window  # never written to, only replaced
        twin.lent = self.lent = self.window is not None
        twin.observers, twin.kept, twin.written = list(self.observers), list(self.kept), self.written
        return twin

    def _held(self) -> ops.Slots:
        assert self.slots is not None, "attend() allocates before anything else runs"
        return self.slots

    def _no_slots(self) -> ops.Slots:
        slots = self._held()
        return ops.Slots(slots.keys, slots.values, slots.positions[:, :, :0])

    def reset(self) -> None:
        """Forget everything and give the memory back."""
        self.slots = self.mass = self.window = None
        self.kept = []
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
        statistics = {"mass": self.mass, "window": self.window}
        return named | {name: tensor for name, tensor in statistics.items() if tensor is not None}

    def adopt(self, named: Mapping[str, Tensor], kept: list[int], observers: list[int], frozen: list[bool]) -> None:
        """Take over what ``flat`` gave for slots allocated alike; ``frozen`` tells which rows had a token."""
        slots = self._held()
        for side, vectors in (("keys.", slots.keys), ("values.", slots.values)):
            own = {name.removeprefix(side): tensor for name, tensor in named.items() if name.startswith(side)}
            vectors.adopt(own, frozen)
        slots.positions, self.mass, self.window = named["positions"], named.get("mass"), named.get("window")
        self.kept, self.observers = kept, observers

    def nbytes(self) -> int:
        """Bytes of every tensor held: codes, scales, positions, statistics, means, unquantised slots, empty slots."""
        held: list[Tensor | None] = [self.mass, self.window]
        if self.slots is not None:
            held += [*self.slots.keys.tensors(), *self.slots.values.tensors(), self.slots.positions]
        return sum(tensor.untyped_storage().nbytes() for tensor in held if tensor is not None)


def _moved(tensor: Tensor, count: int, order: Tensor | None, fill: float) -> Tensor:
    kept = tensor if order is None else tensor.gather(2, order)
    new = tensor.new_full((*tensor.shape[:2], count), fill)
    size = min(kept.shape[2], count)
    new[:, :, :size] = kept[:, :, :size]
    return new
