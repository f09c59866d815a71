"""Which model a cache belongs to: its structure, and a hash of a sample of its weights."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvwinnow.errors import DocumentError
from kvwinnow.integrations.transformers.structure import Structure, inspect_model, text_decoder

SAMPLE = 256
"""Elements of each parameter that are hashed: a training step changes nearly all of them."""

Fingerprint = dict[str, Any]


def fingerprint(model: PreTrainedModel) -> Fingerprint:
    """What tells the model from others, as JSON values.

    Takes milliseconds: of each parameter, at most ``SAMPLE`` evenly spread elements are looked at. So other weights, an
    adapter or a quantised copy are told apart; a file edited by hand in a few elements may not be.

    Raises:
        DocumentError: weights that are not in memory.
    """
    structure: Structure = inspect_model(model)
    config: Any = text_decoder(model).config
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "type": config.model_type,
        "layers": structure.layers,
        "heads": structure.heads,
        "kv_heads": structure.kv_heads,
        "head_dim": structure.dim,
        "vocabulary": config.vocab_size,
        "rope": json.loads(json.dumps(getattr(config, "rope_parameters", None), default=str, sort_keys=True)),
        "weights": _weights(model),
    }


def difference(saved: Fingerprint, model: Fingerprint) -> str | None:
    """Why a cache saved with one model cannot serve another, as the rest of a sentence; None: they are the same."""
    for name, own in model.items():
        kept = saved.get(name)
        if kept == own:
            continue
        if name == "dtype":
            return f"was saved with a model in {kept} and this one is in {own}; load the model with dtype=torch.{kept}"
        if name == "weights":
            return (
                "was saved with a model of the same structure but other weights (another checkpoint, an adapter, "
                "another quantisation); load that model, or save the document with this one"
            )
        return (
            f"was saved with another model ({name.replace('_', ' ')}: {kept}, here {own}); load that model, or save "
            "the document with this one"
        )
    return None


def _weights(model: PreTrainedModel) -> str:
    hashed = hashlib.blake2b(digest_size=16)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            _add(hashed, name, parameter.detach())
    for name, module in model.named_modules():
        # PEFT's layers: which adapters count, and how much, is no weight.
        if isinstance(getattr(module, "disable_adapters", None), bool):
            told = (module.disable_adapters, list(module.active_adapters), getattr(module, "scaling", None))
            hashed.update(f"{name} {told};".encode())
    return hashed.hexdigest()


def _add(hashed: Any, name: str, tensor: Tensor) -> None:
    if hasattr(tensor, "__tensor_flatten__"):  # a quantised weight is a tensor made of plain ones
        for part in tensor.__tensor_flatten__()[0]:
            _add(hashed, f"{name}.{part}", getattr(tensor, part))
        return
    if tensor.device.type == "meta":
        raise DocumentError(
            f"the weights {name!r} are not in memory, so the model cannot be told from others; load it without "
            "offloading"
        )
    hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
    flat = tensor.reshape(-1)
    if flat.numel() > SAMPLE:
        places = torch.arange(SAMPLE, device=flat.device) * (flat.numel() - 1) // (SAMPLE - 1)
        flat = flat[places]
    hashed.update(flat.to("cpu").contiguous().view(torch.uint8).numpy().tobytes())
