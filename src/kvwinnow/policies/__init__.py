"""WHICH tokens of each KV head stay: pure functions of tensors, one file per method."""

from kvwinnow.policies.base import Budgeted, LayerView, Lengths, Phase, Policy, Rolling
from kvwinnow.policies.full import Full
from kvwinnow.policies.h2o import H2O
from kvwinnow.policies.hybrid import Hybrid
from kvwinnow.policies.registry import POLICIES, parse
from kvwinnow.policies.sliding_window import SlidingWindow
from kvwinnow.policies.snapkv import SnapKV
from kvwinnow.policies.streaming_llm import StreamingLLM

__all__ = [
    "H2O",
    "POLICIES",
    "Budgeted",
    "Full",
    "Hybrid",
    "LayerView",
    "Lengths",
    "Phase",
    "Policy",
    "Rolling",
    "SlidingWindow",
    "SnapKV",
    "StreamingLLM",
    "parse",
]
