"""What a cache holds, in figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheReport:
    """What a cache holds.

    Attributes:
        policy: the policy's text form.
        k_dtype: the key codec's text form.
        v_dtype: the value codec's text form.
        tokens_seen: tokens given to the cache, of the longest row, padding not counted.
        tokens_kept: tokens each KV head holds, the most over rows and layers; where there are others, not of sliding
            layers.
        nbytes: bytes allocated, everything counted.
        shared_nbytes: of these, bytes that this cache's forks, or the cache it is a fork of, refer to as well. Caches
            that share a document hold it once: count these bytes once.
        full_nbytes: bytes of a full bfloat16 cache that holds all tokens seen by all rows, without padding; of sliding
            layers their windows.
    """

    policy: str
    k_dtype: str
    v_dtype: str
    tokens_seen: int
    tokens_kept: int
    nbytes: int
    full_nbytes: int
    shared_nbytes: int = 0

    @property
    def ratio(self) -> float:
        """Times smaller than the full bfloat16 cache."""
        return self.full_nbytes / self.nbytes if self.nbytes else 1.0

    def __str__(self) -> str:
        shared = f" ({self.shared_nbytes:,} of them shared with forks)" if self.shared_nbytes else ""
        return (
            f"{self.policy}, keys {self.k_dtype}, values {self.v_dtype}: {self.tokens_kept:,} of {self.tokens_seen:,} "
            f"tokens per KV head in {self.nbytes:,} bytes{shared}{self._compared()}"
        )

    def _compared(self) -> str:
        if not self.nbytes or not self.full_nbytes:
            return ""
        times = f"{self.ratio:.1f} times smaller" if self.ratio >= 1 else f"{1 / self.ratio:.1f} times larger"
        return f", {times} than a full bf16 cache ({self.full_nbytes:,} bytes)"
