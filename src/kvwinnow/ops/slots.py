"""What attention reads: slots, the new tokens of a prompt, and the queries that observe them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvwinnow.codecs.vectors import Vectors
from kvwinnow.ops.cpu.storage import Known


@dataclass
class Slots:
    """The cached tokens of one layer. Their order in memory means nothing; ``positions`` says which token lies where.

    Attributes:
        keys: storage of (B, Hkv, S, D).
        values: storage of (B, Hkv, S, D).
        positions: (B, Hkv, S) int32, the token's index in its row, padding not counted; -1 = empty.
        writing: how keys and values lie, for the kernels that write them.
        reading: the same for those that read them.
        stepping: the same for those that do both, positions too.
    """

    keys: Vectors
    values: Vectors
    positions: Tensor
    writing: Known[Any] = field(default_factory=Known, compare=False, repr=False)
    reading: Known[Any] = field(default_factory=Known, compare=False, repr=False)
    stepping: Known[Any] = field(default_factory=Known, compare=False, repr=False)

    def tensors(self) -> list[Tensor]:
        """All that keys and values refer to, in order: as long as they are the same they lie as they did."""
        return [*self.keys.tensors(), *self.values.tensors()]

    def free(self) -> Tensor:
        """(B, Hkv, S) bool: slots that the next token may be written to. Shared ones that lost theirs stay empty."""
        free = self.positions < 0
        first, stop = self.keys.exact.shape[2], self.keys.tail
        if first < stop:
            free[:, :, first:stop] = False
        return free

    def blocks(self, size: int) -> list[tuple[int, int]]:
        """Ranges (start, stop) of at most ``size`` slots that cover all of them, none across a seam of the storage."""
        count = self.positions.shape[2]
        ends = [*(seam for seam in self.keys.seams if seam < count), count]
        begins = [0, *ends[:-1]]
        spans = zip(begins, ends, strict=True)
        return [(start, min(start + size, end)) for begin, end in spans for start in range(begin, end, size)]

    def row(self, index: int) -> Slots:
        """One row of the batch, as views of the same memory."""
        return Slots(self.keys.row(index), self.values.row(index), self.positions[index : index + 1])


@dataclass(frozen=True)
class Chunk:
    """New tokens of a prompt, as the model made them; they attend to each other before any of them is stored.

    Attributes:
        keys: (B, Hkv, n, D).
        values: (B, Hkv, n, D).
        positions: (B, n) int32, -1 = padding. Padding lies before a row's first token only.
        starts: for each row, the column of its first token.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    starts: tuple[int, ...]

    def row(self, index: int) -> Chunk:
        """One row without its padding, as views of the same memory."""
        only, start = slice(index, index + 1), self.starts[index]
        return Chunk(
            self.keys[only, :, start:], self.values[only, :, start:], self.positions[only, start:], starts=(0,)
        )


@dataclass(frozen=True)
class Window:
    """The last queries of a prompt so far, which may come from earlier chunks.

    Attributes:
        queries: (B, Hq, w, D).
        positions: (B, w) int32; negative where the row has had fewer than w tokens.
    """

    queries: Tensor
    positions: Tensor

    def row(self, index: int) -> Window:
        """One row of the batch, as views of the same memory."""
        return Window(self.queries[index : index + 1], self.positions[index : index + 1])


@dataclass(frozen=True)
class Observed:
    """The statistic attention was asked for, mean over the query heads that share a KV head.

    Attributes:
        slots: (B, Hkv, S) float32.
        chunk: (B, Hkv, n) float32; n = 0 in decode.
    """

    slots: Tensor
    chunk: Tensor
