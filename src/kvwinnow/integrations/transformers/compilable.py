"""What ``compile_decode`` takes, and what it says of the rest."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import NoReturn

from torch import nn
from transformers import PreTrainedModel

from kvwinnow.errors import KvwinnowError, UnsupportedModelError, UnsupportedSetupError
from kvwinnow.integrations.transformers import attachment

MOST_BATCH_SIZES = 8


def checked(batch_sizes: int | Iterable[int]) -> tuple[int, ...]:
    """Numbers of rows, without doubles.

    Raises:
        KvwinnowError: there are none, or too many, or one is no number of rows.
    """
    given = tuple(batch_sizes) if isinstance(batch_sizes, Iterable) else (batch_sizes,)
    sizes = tuple(dict.fromkeys(given))
    if not 0 < len(sizes) <= MOST_BATCH_SIZES or any(type(rows) is not int or rows < 1 for rows in given):
        raise KvwinnowError(
            f"batch_sizes={batch_sizes!r} must be 1 to {MOST_BATCH_SIZES} whole numbers of rows, 1 or more each"
        )
    return sizes


def refuse_model(model: PreTrainedModel, decoder: nn.Module) -> None:
    """Raise if a model is in a state in which its decode step cannot be compiled."""
    if model.training or decoder.training:
        raise KvwinnowError(
            "the model is in training mode, and compile_decode is for inference only; call model.eval()"
        )
    if decoder in attachment.compiled:
        raise KvwinnowError(
            "the decode step of this model is compiled already; close() what compile_decode returned before you "
            "compile it anew"
        )
    if any(module._compiled_call_impl is not None for module in model.modules()):
        raise KvwinnowError(
            "the model has been compiled by model.compile(), which compile_decode would compile again; use one of them"
        )
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise UnsupportedModelError(
            "the model is spread over devices or offloaded by accelerate, which moves weights at every call; "
            "compile_decode takes models on one device: load it with device_map=None, or with one device"
        )
    if "position_ids" not in inspect.signature(type(decoder).forward).parameters:
        raise UnsupportedModelError(
            f"the decoder, a {type(decoder).__name__}, takes no position_ids, which compile_decode gives its graphs; "
            "use the model uncompiled"
        )


def refuse_failed(model: PreTrainedModel, error: Exception) -> NoReturn:
    """Say in a sentence why torch could not compile it."""
    found = list(causes(error))
    if any(type(cause).__name__ == "InvalidCxxCompiler" for cause in found):
        raise UnsupportedSetupError(
            "compile_decode needs a C++ compiler, and torch finds none that works; install g++ or clang, or name one "
            "by the environment variable CXX"
        ) from error
    first = next((line.strip() for line in str(found[-1]).splitlines() if line.strip()), type(found[-1]).__name__)
    raise UnsupportedModelError(
        f"torch.compile cannot compile the decode step of this {type(model).__name__} ({first.rstrip('.')}); use it "
        "uncompiled"
    ) from error


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from, the first cause last."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = getattr(current, "inner_exception", None) or current.__cause__ or current.__context__
