"""The list of policies, and their text form: ``snapkv:budget=1024,window=32``."""

from __future__ import annotations

from kvwinnow.errors import PolicyError
from kvwinnow.policies.base import Policy
from kvwinnow.policies.budget import Budget
from kvwinnow.policies.compose import Compose
from kvwinnow.policies.expected_attention import ExpectedAttention
from kvwinnow.policies.full import Full
from kvwinnow.policies.h2o import H2O
from kvwinnow.policies.hybrid import Hybrid
from kvwinnow.policies.keydiff import KeyDiff
from kvwinnow.policies.knorm import Knorm
from kvwinnow.policies.pyramidkv import PyramidKV
from kvwinnow.policies.sliding_window import SlidingWindow
from kvwinnow.policies.snapkv import SnapKV
from kvwinnow.policies.streaming_llm import StreamingLLM
from kvwinnow.policies.tova import TOVA
from kvwinnow.policies.whole_blocks import WholeBlocks
from kvwinnow.textform import SHARED, parse_spec

# A new policy is one file beside this one and one entry here.
POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        Full,
        SlidingWindow,
        StreamingLLM,
        H2O,
        Hybrid,
        SnapKV,
        PyramidKV,
        TOVA,
        Knorm,
        KeyDiff,
        ExpectedAttention,
        Compose,
        WholeBlocks,
    )
}


def parse(text: str, *, budget: Budget | None = None) -> Policy:
    """Read a policy from its text form, ``name`` or ``name:parameter=value,...``; a value may be ``name(...)`` itself.

    Args:
        text: it.
        budget: of the policy where its text names none; None: the default.

    Raises:
        PolicyError: an unknown name or parameter, or a value that the policy refuses.
    """
    shared = None if budget is None else {SHARED: budget}
    return parse_spec(text, POLICIES, kind="policy", error=PolicyError, shared=shared)
