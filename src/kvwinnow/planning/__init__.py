"""How much memory a model and its cache take and what fits on a GPU: arithmetic alone, without torch."""

from kvwinnow.planning.architecture import Architecture, Attention, Latent, Parameters, State
from kvwinnow.planning.catalogue import find
from kvwinnow.planning.gpus import GPU, GPUS, parse_gpu
from kvwinnow.planning.planner import Plan, plan

__all__ = [
    "Architecture",
    "Attention",
    "GPU",
    "GPUS",
    "Latent",
    "Parameters",
    "Plan",
    "State",
    "find",
    "parse_gpu",
    "plan",
]
