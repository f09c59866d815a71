"""Storage for the keys (or the values) of one layer's slots, whatever the codec."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvwinnow.codecs.base import Codec
from kvwinnow.codecs.rotation import rotate

MEAN_TOKENS = 256
"""The mean vector of centred keys is taken over at most this many of a row's first tokens."""
MEAN_LEAST = 32
"""With fewer first tokens the mean is 0: theirs would be that of the sinks, and worse than none."""


@dataclass
class Vectors:
    """One vector per slot: the first ``exact`` slots unquantised, the others in the codec's parts.

    What lies here is in *stored space*: x less ``mean``, then rotated, where the codec asks for it. Queries are
    brought there by ``query``, outputs brought back by ``restore``.

    Attributes:
        codec: how a vector is stored.
        exact: (B, Hkv, E, D) in the model's dtype: slots [0, E). Attention sinks fill them first, and those are the
            vectors that quantisation hurts most. E is 0 for codecs that do not quantise.
        parts: each (B, Hkv, S - E, width): slots [E, S).
        mean: (B, Hkv, D) float32, or None where the codec does not centre.
        frozen: for each row, whether its mean is set.
    """

    codec: Codec
    exact: Tensor
    parts: tuple[Tensor, ...]
    mean: Tensor | None = None
    frozen: list[bool] = field(default_factory=list)

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
        """Empty storage of ``shape`` (B, Hkv, S, D), of whose slots the first ``exact`` are unquantised.

        Raises:
            CodecError: D does not fit the codec.
        """
        batch, heads, slots, dim = shape
        exact = min(exact, slots) if codec.quantises else 0
        parts = tuple(
            torch.zeros(batch, heads, slots - exact, part.width, dtype=part.dtype, device=device)
            for part in codec.layout(dim)
        )
        mean = None
        if centred and codec.centres:
            mean = torch.zeros(batch, heads, dim, dtype=torch.float32, device=device)
        storage = torch.zeros(batch, heads, exact, dim, dtype=dtype, device=device)
        return cls(codec, storage, parts, mean, [mean is None] * batch)

    @property
    def slots(self) -> int:
        """Slots allocated for each KV head."""
        return self.exact.shape[2] + self.parts[0].shape[2]

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that lies in memory for this storage."""
        return (self.exact, *self.parts, *(() if self.mean is None else (self.mean,)))

    # -- stored space ------------------------------------------------------------------------------

    def freeze_mean(self, x: Tensor, starts: list[int]) -> None:
        """Set the mean of rows that have none from their first tokens.

        Args:
            x: (B, Hkv, n, D), the first vectors given to the cache.
            starts: for each row, the column of its first token (padding lies before it); n: the row has none here.
        """
        for row, start in enumerate(starts):
            if not self.frozen[row] and self.mean is not None and start < x.shape[2]:
                self.frozen[row] = True
                if x.shape[2] - start >= MEAN_LEAST:
                    self.mean[row] = x[row, :, start : start + MEAN_TOKENS].float().mean(1)

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
        edge = self.exact.shape[2]
        coded = self.codec.decode(tuple(part[:, :, max(start - edge, 0) : max(stop - edge, 0)] for part in self.parts))
        return coded if start >= edge else torch.cat([self.exact[:, :, start:stop].to(coded.dtype), coded], dim=2)

    def unstored(self) -> Tensor:
        """All slots as vectors of the model: (B, Hkv, S, D) float32."""
        x = self.restore(self.read(0, self.slots).float())
        return x if self.mean is None else x + self.mean.unsqueeze(2)

    def write_one(self, slot: Tensor, x: Tensor) -> None:
        """Overwrite one slot of each KV head, without a branch that would have to wait for the device.

        Args:
            slot: (B, Hkv, 1) int64.
            x: (B, Hkv, 1, D).
        """
        stored, edge = self.store(x), self.exact.shape[2]
        if edge:
            _replace(self.exact, slot.clamp(max=edge - 1), stored, slot < edge)
        if self.slots > edge:
            for part, new in zip(self.parts, self.codec.encode(stored), strict=True):
                _replace(part, (slot - edge).clamp(min=0), new, slot >= edge if edge else None)

    def write_many(self, rows: Tensor, slots: Tensor, x: Tensor) -> None:
        """Overwrite any slots.

        Args:
            rows: (N,) int64 (batch, head) pair of each vector, counted over B * Hkv.
            slots: (N,) int64.
            x: (N, D).
        """
        stored, edge = self.store(x, rows), self.exact.shape[2]
        if edge:
            first = slots < edge
            self.exact.flatten(0, 1)[rows[first], slots[first]] = stored[first].to(self.exact.dtype)
            rows, slots, stored = rows[~first], slots[~first] - edge, stored[~first]
        for part, new in zip(self.parts, self.codec.encode(stored), strict=True):
            part.flatten(0, 1)[rows, slots] = new

    def resize(self, slots: int, order: Tensor | None = None) -> None:
        """Reallocate to ``slots`` slots; what is quantised is moved, never quantised again.

        Args:
            slots: new number of slots, at least E.
            order: (B, Hkv, k) int64, which slots come first, [0, E) being themselves; None: all stay in place.
        """
        edge = self.exact.shape[2]

        def moved(part: Tensor) -> Tensor:
            kept = part
            if order is not None:
                index = (order[:, :, edge:] - edge).unsqueeze(-1).expand(-1, -1, -1, part.shape[-1])
                kept = part.gather(2, index)
            new = part.new_zeros(*part.shape[:2], slots - edge, part.shape[-1])
            count = min(kept.shape[2], slots - edge)
            new[:, :, :count] = kept[:, :, :count]
            return new

        self.parts = tuple(moved(part) for part in self.parts)

    def select(self, rows: Tensor) -> None:
        """Let row r hold what row ``rows[r]`` held; codes are copied, never quantised again.

        Args:
            rows: (N,) int64 on this storage's device.
        """
        self.exact = self.exact.index_select(0, rows)
        self.parts = tuple(part.index_select(0, rows) for part in self.parts)
        self.mean = None if self.mean is None else self.mean.index_select(0, rows)
        self.frozen = [self.frozen[row] for row in rows.tolist()]

    def row(self, index: int) -> Vectors:
        """One row of the batch, as views of the same memory."""
        only = slice(index, index + 1)
        mean = None if self.mean is None else self.mean[only]
        parts = tuple(part[only] for part in self.parts)
        return Vectors(self.codec, self.exact[only], parts, mean, self.frozen[only])


def _replace(target: Tensor, slot: Tensor, new: Tensor, where: Tensor | None) -> None:
    """Write ``new`` (B, Hkv, 1, W) at ``slot`` (B, Hkv, 1) of (B, Hkv, S, W), only where ``where`` holds."""
    index = slot.unsqueeze(-1).expand(-1, -1, -1, target.shape[-1])
    new = new.to(target.dtype)
    if where is not None:
        new = torch.where(where.unsqueeze(-1), new, target.gather(2, index))
    target.scatter_(2, index, new)


def vectors_nbytes(
    codec: Codec, shape: tuple[int, int, int, int], *, exact: int, centred: bool, dtype: torch.dtype
) -> int:
    """Bytes that ``Vectors.allocate`` takes with the same arguments."""
    batch, heads, slots, dim = shape
    exact = min(exact, slots) if codec.quantises else 0
    slot_bytes = exact * dim * dtype.itemsize + (slots - exact) * codec.bytes_per_vector(dim)
    mean_bytes = dim * torch.float32.itemsize if centred and codec.centres else 0
    return batch * heads * (slot_bytes + mean_bytes)
