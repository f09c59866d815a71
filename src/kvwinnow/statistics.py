"""What a policy may ask to be measured: the word that policies, ops and the cache have in common."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """What must be measured for a policy to score by."""

    NONE = "none"
    WINDOW = "window"
    MASS = "mass"
    KEY_NORM = "key norm"
    QUERIES = "queries"


@dataclass(frozen=True)
class Statistics:
    """The statistic a policy scores by.

    Attributes:
        kind: NONE.
            WINDOW: softmax weight summed over the prompt's last ``window`` queries; while decoding ``window`` is 1,
            and it is the weight that the newest token's query gives. Measured when a cut is due, not stored.
            MASS: softmax weight summed over all queries; stored for each slot.
            KEY_NORM: L2 norm of the key as the model made it; stored for each slot when its token is.
            QUERIES: mean and covariance of the prompt's queries, rotated to the positions to come.
        window: number of queries, for WINDOW only.
        future: number of positions to come, for QUERIES only.
        skip: tokens at the start of a row whose queries do not count, for QUERIES only.
    """

    kind: Kind = Kind.NONE
    window: int = 0
    future: int = 0
    skip: int = 0


NONE = Statistics()
MASS = Statistics(Kind.MASS)
KEY_NORM = Statistics(Kind.KEY_NORM)
RUNNING = (Kind.MASS, Kind.KEY_NORM)
"""The kinds that are stored for each slot, as float32."""


def WINDOW(queries: int) -> Statistics:  # noqa: N802 - reads as the constants beside it
    """The statistic summed over the last ``queries`` queries."""
    return Statistics(Kind.WINDOW, queries)


def QUERIES(future: int, skip: int) -> Statistics:  # noqa: N802 - reads as the constants beside it
    """The moments of the prompt's queries after its first ``skip`` tokens, at the next ``future`` positions."""
    return Statistics(Kind.QUERIES, future=future, skip=skip)
