"""What a policy may ask attention to report: the word that policies and ops have in common."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """What attention must report about each cached token."""

    NONE = "none"
    WINDOW = "window"
    MASS = "mass"


@dataclass(frozen=True)
class Statistics:
    """The statistic a policy needs from attention.

    Attributes:
        kind: NONE; WINDOW: softmax weight summed over the last ``window`` queries; MASS: summed over all queries.
        window: number of queries, for WINDOW only.
    """

    kind: Kind = Kind.NONE
    window: int = 0


NONE = Statistics()
MASS = Statistics(Kind.MASS)


def WINDOW(queries: int) -> Statistics:  # noqa: N802 - reads as the constants beside it
    """The statistic summed over the last ``queries`` queries."""
    return Statistics(Kind.WINDOW, queries)
