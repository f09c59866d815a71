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

    @property
    def ratio(self) -> float:
        """Times smaller than the full bfloat16 cache."""
        return self.full_nbytes / self.nbytes if self.nbytes else 1.0

    def __str__(self) -> str:
        return (
            f"{self.policy}, keys {self.k_dtype}, values {self.v_dtype}: {self.tokens_kept:,} of {self.tokens_seen:,} "
            f"tokens per KV head in {self.nbytes:,} bytes, {self.ratio:.1f} times smaller than a full bf16 cache "
            f"({self.full_nbytes:,} bytes)"
        )
