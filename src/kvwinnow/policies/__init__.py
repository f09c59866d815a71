"""WHICH tokens of each KV head stay: pure functions of tensors, one file per method."""

from kvwinnow.policies.base import Budgeted, LayerView, Lengths, Phase, Policy, Queries, Rolling
from kvwinnow.policies.compose import Compose
from kvwinnow.policies.expected_attention import ExpectedAttention
from kvwinnow.policies.full import Full
from kvwinnow.policies.h2o import H2O
from kvwinnow.policies.hybrid import Hybrid
from kvwinnow.policies.keydiff import KeyDiff
from kvwinnow.policies.knorm import Knorm
from kvwinnow.policies.pyramidkv import PyramidKV
from kvwinnow.policies.registry import POLICIES, parse
from kvwinnow.policies.sliding_window import SlidingWindow
from kvwinnow.policies.snapkv import SnapKV
from kvwinnow.policies.streaming_llm import StreamingLLM
from kvwinnow.policies.tova import TOVA
from kvwinnow.policies.whole_blocks import WholeBlocks

__all__ = [
    "Budgeted",
    "Compose",
    "ExpectedAttention",
    "Full",
    "H2O",
    "Hybrid",
    "KeyDiff",
    "Knorm",
    "LayerView",
    "Lengths",
    "POLICIES",
    "Phase",
    "Policy",
    "PyramidKV",
    "Queries",
    "Rolling",
    "SlidingWindow",
    "SnapKV",
    "StreamingLLM",
    "TOVA",
    "WholeBlocks",
    "parse",
]
