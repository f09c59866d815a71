"""The transformers model inside what a user holds: PEFT wraps a model, and adapters live in its layers."""

from __future__ import annotations

import sys
from typing import Any

from kvwinnow.errors import UnsupportedModelError


def unwrap(model: Any) -> Any:
    """The model that ``model`` calls: itself, or the one a PeftModel put its adapters into.

    Raises:
        UnsupportedModelError: a PeftModel that learnt tokens of its own (prompt or prefix tuning), which PEFT puts
            into the cache, or in its place.
    """
    if not _is_peft(model):
        return model
    refuse_learnt_prompts(model)
    return model.base_model.model


def refuse_learnt_prompts(model: Any) -> None:
    """Refuse a PeftModel whose active adapter is a learnt prompt; anything else passes.

    Raises:
        UnsupportedModelError: as in ``unwrap``.
    """
    if not _is_peft(model):
        return
    adapter = getattr(model, "active_peft_config", None)  # PeftMixedModel, which has no prompts, has none
    if adapter is not None and adapter.is_prompt_learning:
        raise UnsupportedModelError(
            f"the adapter is a {type(adapter).__name__}, whose learnt tokens PEFT puts before the prompt or in place "
            "of the cache; CompressedCache takes adapters in the model's weights, such as LoRA"
        )


def _is_peft(model: Any) -> bool:
    peft = sys.modules.get("peft")  # whoever holds such a model has imported it
    return peft is not None and isinstance(model, peft.PeftModel | peft.PeftMixedModel)
