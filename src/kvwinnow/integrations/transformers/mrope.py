"""What vision-language models with M-RoPE keep beside the cache: how far positions run from the count of tokens.

An image takes up fewer positions than tokens, so such a model remembers a number for each row, its ``rope_deltas``, of
the latest conversation it has read. A cache keeps those of its own rows and puts them back when it goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

ATTRIBUTE = "rope_deltas"


def _keeper(model: PreTrainedModel | None) -> Any:
    """The module that remembers; None: the model has no M-RoPE, or is gone while its decoder lives."""
    if model is None:
        return None
    return next((module for module in (model, model.base_model) if hasattr(module, ATTRIBUTE)), None)


def used_by(model: PreTrainedModel) -> bool:
    """Whether the model has M-RoPE."""
    return _keeper(model) is not None


def remembered(model: PreTrainedModel | None) -> Tensor | None:
    """What the model remembers now, (rows, 1)."""
    deltas = getattr(_keeper(model), ATTRIBUTE, None)
    return deltas if isinstance(deltas, Tensor) else None


def offsets(model: PreTrainedModel | None, rows: int) -> tuple[int, ...] | None:
    """The same as one number for each row, where ``generate`` may have made several rows of each."""
    deltas = remembered(model)
    if deltas is None or not deltas.numel() or rows % deltas.numel():
        return None
    numbers = deltas.flatten().tolist()
    return tuple(number for number in numbers for _ in range(rows // len(numbers)))


def remind(model: PreTrainedModel | None, numbers: Sequence[int] | None, device: torch.device) -> None:
    """Have the model remember these again, whatever it has read in between."""
    keeper = _keeper(model)
    if keeper is not None:
        deltas = None if numbers is None else torch.tensor(numbers, dtype=torch.int64, device=device).view(-1, 1)
        setattr(keeper, ATTRIBUTE, deltas)
