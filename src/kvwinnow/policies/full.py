"""Full: keep everything. The baseline of every comparison, and the way to use a codec without eviction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvwinnow.policies.base import Policy


@dataclass(frozen=True)
class Full(Policy):
    """Keeps every token; combine it with a codec to store all of them in fewer bits."""

    name: ClassVar[str] = "full"
