"""Bytes of a model's weights in the formats they are published in."""

from __future__ import annotations

from dataclasses import dataclass

from kvwinnow.errors import KvwinnowError
from kvwinnow.planning.architecture import Parameters


@dataclass(frozen=True)
class Format:
    """A format of weights.

    Attributes:
        bits: bits a parameter takes, scales and zero points included.
        covers: "all", "linear" (all but embeddings and language head, which stay at 16 bits) or "experts" (only routed
            experts, the others stay at 16 bits).
        what: where the bits come from.
    """

    bits: float
    covers: str
    what: str


@dataclass(frozen=True)
class LighterWeights:
    """A format in which weights fit on GPUs.

    Attributes:
        weights_dtype: its name.
        weights: bytes of all weights in it.
        free: bytes of one GPU that they leave for the cache.
    """

    weights_dtype: str
    weights: int
    free: int


FORMATS = {
    "fp32": Format(32, "all", "32 bits"),
    "bf16": Format(16, "all", "16 bits"),
    "fp16": Format(16, "all", "16 bits"),
    "fp8": Format(8, "linear", "8 bits; a scale per tensor or channel is too small to count"),
    "int8": Format(8, "linear", "8 bits; a scale per channel is too small to count"),
    "int4": Format(4 + 20 / 128, "linear", "4 bits, a float16 scale and a 4-bit zero point per 128 (AWQ, GPTQ)"),
    "nvfp4": Format(4.5, "linear", "4 bits and an 8-bit scale per 16"),
    "mxfp4": Format(4.25, "experts", "4 bits and an 8-bit scale per 32"),
}


def weights_bytes(parameters: Parameters, name: str) -> int:
    """Bytes of the weights in the format ``name``.

    Raises:
        KvwinnowError: an unknown format, or one that does not fit the model.
    """
    form = FORMATS.get(name) if isinstance(name, str) else None
    if form is None:
        raise KvwinnowError(f"weights dtype {name!r} is unknown; known are {', '.join(FORMATS)}")
    if form.covers == "experts" and not parameters.experts:
        raise KvwinnowError(
            f"weights dtype {name} quantises routed experts, and this model has none; take int4 or nvfp4"
        )
    covered = {
        "all": parameters.total,
        "linear": parameters.total - parameters.embeddings,
        "experts": parameters.experts,
    }[form.covers]
    return int(covered * form.bits / 8) + 2 * (parameters.total - covered)


def lighter(parameters: Parameters | None, gpus: int, usable: int) -> tuple[LighterWeights, ...]:
    """The formats in which weights fit, the smallest first; none where their number is not known.

    Args:
        parameters: of the weights.
        gpus: that share them evenly.
        usable: bytes of one GPU for weights and cache.
    """
    if parameters is None:
        return ()
    sizes = {
        name: weights_bytes(parameters, name)
        for name, form in FORMATS.items()
        if form.covers != "experts" or parameters.experts
    }
    fitting = (LighterWeights(name, size, usable - -(-size // gpus)) for name, size in sizes.items())
    return tuple(sorted((one for one in fitting if one.free > 0), key=lambda one: one.weights))
