"""Storage for the keys (or the values) of one layer's slots, whatever the codec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvwinnow.codecs.base import Codec
from kvwinnow.codecs.rotation import rotate

MEAN_TOKENS = 256
"""The mean vector of centred keys, and a tensor scale, follow from at most this many of a row's first tokens."""
MEAN_LEAST = 32
"""With fewer first tokens the mean is 0: theirs would be that of the sinks, and worse than none."""


Move = Callable[[Tensor, int, Tensor | None], Tensor]
"""What ``moved`` is: a tensor, its new number of slots, and which come first."""


@dataclass
class Vectors:
    """One vector per slot: the first ``exact`` slots unquantised, the others in the codec's parts.

    What lies here is in *stored space*: x less ``mean``, then rotated, where the codec asks for it. Queries are
    brought there by ``query``, outputs brought back by ``restore``. A tensor scale is no part of that space: it is
    divided by when vectors are encoded, and multiplied with when they are read.

    Slots come in this order: the exact ones, the shared ones, which other storage refers to as well and nobody writes
    to any more (see ``fork``), and the rest.

    Attributes:
        codec: how a vector is stored.
        exact: (B, Hkv, E, D) in the model's dtype, or in the codec's where that does not quantise: slots [0, E).
            Attention sinks fill them first, and those are the vectors that quantisation hurts most.
        parts: each (B, Hkv, S - tail, width): slots [tail, S).
        mean: (B, Hkv, D) float32, or None where the codec does not centre.
        scale: (B, Hkv) float32 tensor scale, or None where the codec has none.
        frozen: for each row, whether its mean and scale are set.
        shared: for each shared segment its parts, like ``parts``: slots [E, tail) in order.
    """

    codec: Codec
    exact: Tensor
    parts: tuple[Tensor, ...]
    mean: Tensor | None = None
    scale: Tensor | None = None
    frozen: list[bool] = field(default_factory=list)
    shared: tuple[tuple[Tensor, ...], ...] = ()

    @classmethod
    def allocate(
        cls,
        codec: Codec,
        shape: tuple[int, int, int, int],
        *,
        exact: int,
        centred: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Vectors:
        """Empty storage of ``shape`` (B, Hkv, S, D), whose first ``exact`` slots are not quantised.

        Raises:
            CodecError: D does not fit the codec.
        """
        batch, heads, slots, dim = shape
        exact = min(exact, slots)
        layout = codec.layout(dim)
        parts = tuple(
            torch.zeros(batch, heads, slots - exact, part.width, dtype=part.dtype, device=device) for part in layout
        )
        mean = scale = None
        if centred and codec.centres:
            mean = torch.zeros(batch, heads, dim, dtype=torch.float32, device=device)
        if codec.scales:
            scale = torch.ones(batch, heads, dtype=torch.float32, device=device)
        own = dtype if codec.quantises else layout[0].dtype
        storage = torch.zeros(batch, heads, exact, dim, dtype=own, device=device)
        return cls(codec, storage, parts, mean, scale, [mean is None and scale is None] * batch)

    @property
    def tail(self) -> int:
        """The first slot after the shared ones; these and the exact ones aside, any slot can be moved."""
        edge = self.exact.shape[2]
        return edge + sum(segment[0].shape[2] for segment in self.shared) if self.shared else edge

    @property
    def slots(self) -> int:
        """Slots allocated for each KV head."""
        return self.tail + self.parts[0].shape[2]

    @property
    def seams(self) -> list[int]:
        """The slots at which a shared segment ends; a range across one is read by putting parts together."""
        ends, slot = [], self.exact.shape[2]
        for segment in self.shared:
            slot += segment[0].shape[2]
            ends.append(slot)
        return ends

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that this storage refers to."""
        held = (self.exact, *self.parts)
        if self.mean is not None:
            held = (*held, self.mean)
        if self.scale is not None:
            held = (*held, self.scale)
        return (*held, *(part for segment in self.shared for part in segment)) if self.shared else held

    def shared_tensors(self) -> tuple[Tensor, ...]:
        """Of these, the ones that forks refer to as well."""
        if not self.shared:
            return ()
        frozen = (self.mean, self.scale) if all(self.frozen) else ()
        return tuple(x for place in (*self.shared, frozen) for x in place if x is not None)

    def flat(self) -> dict[str, Tensor]:
        """Every tensor by name, what is shared and what is not as one."""
        places = [*self.shared, self.parts]
        parts = [torch.cat(pieces, dim=2) if self.shared else pieces[0] for pieces in zip(*places, strict=True)]
        named = {"exact": self.exact, "mean": self.mean, "scale": self.scale}
        named |= {f"part{index}": part for index, part in enumerate(parts)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def adopt(self, named: Mapping[str, Tensor], frozen: list[bool]) -> None:
        """Take over tensors of the same names, shapes and dtypes as ``flat`` gives, and which rows' mean is set."""
        self.exact, self.mean, self.scale = named["exact"], named.get("mean"), named.get("scale")
        self.parts = tuple(named[f"part{index}"] for index in range(len(self.parts)))
        self.frozen = [(self.mean is None and self.scale is None) or done for done in frozen]

    # -- stored space ------------------------------------------------------------------------------

    def freeze(self, x: Tensor, starts: Sequence[int]) -> None:
        """Set the mean and the tensor scale of rows that have none from their first tokens.

        Args:
            x: (B, Hkv, n, D), the first vectors given to the cache.
            starts: for each row, the column of its first token (padding lies before it); n: the row has none here.
        """
        if all(self.frozen):
            return
        for row, start in enumerate(starts):
            if self.frozen[row] or start >= x.shape[2]:
                continue
            self.frozen[row] = True
            first = x[row, :, start : start + MEAN_TOKENS].float()
            if self.mean is not None and x.shape[2] - start >= MEAN_LEAST:
                self.mean[row] = first.mean(1)
            if self.scale is not None:
                first = first if self.mean is None else first - self.mean[row].unsqueeze(1)
                first = rotate(first) if self.codec.rotates else first
                self.scale[row] = self.codec.tensor_scale(first.abs().amax((1, 2)))

    def store(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Bring vectors into stored space.

        Args:
            x: (B, Hkv, n, D), or (N, D) with ``rows``.
            rows: (N,) int64 index of each vector's (batch, head) pair, counted over B * Hkv.
        """
        if self.mean is not None:
            x = x.float() - (self.mean.unsqueeze(2) if rows is None else self.mean.flatten(0, 1)[rows])
        return rotate(x) if self.codec.rotates else x

    def query(self, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """Bring queries into stored space.

        Args:
            q: (B, Hkv, M, D).

        Returns:
            The queries to multiply stored keys with, and what to add to each product: (B, Hkv, M, 1) float32 q.mean,
            or None where keys are not centred.
        """
        shift = None if self.mean is None else q.float() @ self.mean.unsqueeze(-1)
        return (rotate(q) if self.codec.rotates else q), shift

    def restore(self, x: Tensor) -> Tensor:
        """Bring a weighted sum of stored values (..., D) back."""
        return rotate(x) if self.codec.rotates else x

    # -- reading and writing -----------------------------------------------------------------------

    def read(self, start: int, stop: int) -> Tensor:
        """Slots [start, stop) in stored space: (B, Hkv, stop - start, D), float32 or the dtype they are stored in."""
        pieces, begin = [], 0
        for place in ((self.exact,), *self.shared, self.parts):
            end = begin + place[0].shape[2]
            if max(start, begin) < min(stop, end):
                part = tuple(x[:, :, max(start - begin, 0) : stop - begin] for x in place)
                pieces.append(part[0] if place[0] is self.exact else self._decode(part))
            begin = end
        if not pieces:
            return self.exact[:, :, :0]
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat([piece.to(pieces[-1].dtype) for piece in pieces], dim=2)

    def _encode(self, stored: Tensor, rows: Tensor | None = None) -> tuple[Tensor, ...]:
        if self.scale is not None:
            scale = self.scale[..., None, None] if rows is None else self.scale.flatten()[rows].unsqueeze(-1)
            stored = stored.float() / scale
        return self.codec.encode(stored)

    def _decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        stored = self.codec.decode(parts)
        return stored if self.scale is None else stored.mul_(self.scale[..., None, None])

    def _unquantised(self, stored: Tensor) -> Tensor:
        """As exact slots take it."""
        return (stored if self.codec.quantises else self.codec.encode(stored)[0]).to(self.exact.dtype)

    def unstored(self) -> Tensor:
        """All slots as vectors of the model: (B, Hkv, S, D) float32."""
        x = self.restore(self.read(0, self.slots).float())
        return x if self.mean is None else x + self.mean.unsqueeze(2)

    def write_one(self, slot: Tensor, x: Tensor) -> None:
        """Overwrite one slot of each KV head, without a branch that would have to wait for the device.

        Args:
            slot: (B, Hkv, 1) int64, none of the shared ones.
            x: (B, Hkv, 1, D).
        """
        stored, edge = self.store(x), self.exact.shape[2]
        if edge:
            _replace(self.exact, slot.clamp(max=edge - 1), self._unquantised(stored), slot < edge)
        if self.parts[0].shape[2]:
            tail = self.tail
            for part, new in zip(self.parts, self._encode(stored), strict=True):
                _replace(part, (slot - tail).clamp(min=0), new, slot >= tail if tail else None)

    def write_many(self, rows: Tensor, slots: Tensor, x: Tensor) -> None:
        """Overwrite any slots.

        Args:
            rows: (N,) int64 (batch, head) pair of each vector, counted over B * Hkv.
            slots: (N,) int64, none of the shared ones.
            x: (N, D).
        """
        stored, edge = self.store(x, rows), self.exact.shape[2]
        if edge:
            first = slots < edge
            self.exact.flatten(0, 1)[rows[first], slots[first]] = self._unquantised(stored[first])
            rows, slots, stored = rows[~first], slots[~first], stored[~first]
        for part, new in zip(self.parts, self._encode(stored, rows), strict=True):
            part.flatten(0, 1)[rows, slots - self.tail] = new

    def write_first(self, x: Tensor) -> None:
        """Overwrite the first n slots of each KV head, none of which is shared, with x (B, Hkv, n, D)."""
        stored, edge = self.store(x), min(self.exact.shape[2], x.shape[2])
        self.exact[:, :, :edge] = self._unquantised(stored[:, :, :edge])
        rest = x.shape[2] - edge
        if rest:
            for part, new in zip(self.parts, self._encode(stored[:, :, edge:]), strict=True):
                part[:, :, :rest] = new

    # -- memory ------------------------------------------------------------------------------------

    def resize(self, slots: int, order: Tensor | None = None, move: Move | None = None) -> None:
        """Reallocate to ``slots`` slots; what is quantised is moved, never quantised again.

        Args:
            slots: new number of slots, at least ``tail``.
            order: (B, Hkv, k) int64, which slots come first, [0, tail) being themselves; None: all stay in place.
            move: does what ``moved`` does, and may be faster.
        """
        edge = self.tail
        order = None if order is None else order[:, :, edge:] - edge
        self.parts = tuple((move or moved)(part, slots - edge, order) for part in self.parts)

    def row(self, index: int) -> Vectors:
        """One row of the batch, as views of the same memory."""
        only = slice(index, index + 1)
        mean, scale = (None if tensor is None else tensor[only] for tensor in (self.mean, self.scale))
        parts, *shared = (tuple(part[only] for part in place) for place in (self.parts, *self.shared))
        return Vectors(self.codec, self.exact[only], parts, mean, scale, self.frozen[only], tuple(shared))

    def select(self, rows: Tensor) -> None:
        """Let row r hold what row ``rows[r]`` held; codes are copied, never quantised again, and shared no longer.

        Args:
            rows: (N,) int64 on this storage's device.
        """
        places = [[part.index_select(0, rows) for part in place] for place in (*self.shared, self.parts)]
        pieces = zip(*places, strict=True)
        self.parts = tuple(torch.cat(same, dim=2) if self.shared else same[0] for same in pieces)
        self.exact, self.shared = self.exact.index_select(0, rows), ()
        self.mean = None if self.mean is None else self.mean.index_select(0, rows)
        self.scale = None if self.scale is None else self.scale.index_select(0, rows)
        self.frozen = [self.frozen[row] for row in rows.tolist()]

    def fork(self) -> Vectors:
        """Further storage with the same content, which shares all but the exact slots: they alone are copied.

        From now on neither of the two writes to what is shared; both have room for new tokens only once resized.
        """
        if self.parts[0].shape[2]:
            own, shared = self.parts, list(self.shared)
            # Forks of forks of forks: so that segments stay few, one that is no longer than its successor joins it.
            while shared and shared[-1][0].shape[2] <= own[0].shape[2]:
                own = tuple(torch.cat(pair, dim=2) for pair in zip(shared.pop(), own, strict=True))
            self.shared = (*shared, own)
            self.parts = tuple(part[:, :, :0].clone() for part in self.parts)
        mean, scale = self.mean, self.scale
        if not all(self.frozen):  # one of the two may freeze a row that the other freezes otherwise
            mean, scale = (None if tensor is None else tensor.clone() for tensor in (mean, scale))
        parts = tuple(part.clone() for part in self.parts)
        return Vectors(self.codec, self.exact.clone(), parts, mean, scale, list(self.frozen), self.shared)

    def drop(self, segment: int) -> None:
        """Let go a shared segment whose slots are all empty; later slots move up by its length."""
        self.shared = (*self.shared[:segment], *self.shared[segment + 1 :])


def moved(tensor: Tensor, slots: int, order: Tensor | None, fill: float = 0) -> Tensor:
    """A copy of (B, Hkv, S, ...) with another number of slots: those of ``order`` (B, Hkv, k) first, then ``fill``.

    Without an order all stay in place; what does not fit is left out.
    """
    kept = tensor
    if order is not None:
        kept = tensor.gather(2, order if tensor.ndim == 3 else order.unsqueeze(-1).expand(-1, -1, -1, tensor.shape[3]))
    new = tensor.new_full((*tensor.shape[:2], slots, *tensor.shape[3:]), fill)
    count = min(kept.shape[2], slots)
    new[:, :, :count] = kept[:, :, :count]
    return new


def _replace(target: Tensor, slot: Tensor, new: Tensor, where: Tensor | None) -> None:
    """Write ``new`` (B, Hkv, 1, W) at ``slot`` (B, Hkv, 1) of (B, Hkv, S, W), only where ``where`` holds."""
    index = slot.unsqueeze(-1).expand(-1, -1, -1, target.shape[-1])
    new = new.to(target.dtype)
    if where is not None:
        new = torch.where(where.unsqueeze(-1), new, target.gather(2, index))
    target.scatter_(2, index, new)
