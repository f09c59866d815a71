"""Keys and values as they lie in vLLM's pool: one small reader-writer for each attention back end."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Paged(Protocol):
    """One layer's part of the pool.

    Attributes:
        kv_heads: how many KV heads each block has.
    """

    kv_heads: int

    def keys(self, blocks: Tensor) -> Tensor:
        """Keys of some blocks (blocks, Hkv, block size, D), in the model's dtype and any order of memory.

        Args:
            blocks: (blocks,) int64, which.
        """

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of some blocks, (Hkv, blocks * block size, D) each, in the model's dtype.

        Args:
            blocks: (blocks,) int64, which.
        """

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Overwrite slots.

        Args:
            slots: (n,) int64, block * block size + place in it.
            keys: (Hkv, n, D).
            values: (Hkv, n, D).
        """

    def attend(self, query: Tensor, output: Tensor, blocks: Tensor, length: int) -> None:
        """Causal attention of the last queries of one request over the first ``length`` slots of its blocks.

        Args:
            query: (n, Hq, D), the queries of the last n of these slots.
            output: (n, Hq, D) or (n, Hq * D), written to.
            blocks: (blocks,) int64, of the request, from the first that is not gone.
            length: slots that hold tokens.
        """
