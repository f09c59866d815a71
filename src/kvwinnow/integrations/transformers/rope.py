"""How a model rotates the queries of each layer by their positions: found among its own modules, and proved by running.

A lone token attends to itself alone, so that its query differs from one position to another by the rotation and by
nothing else, in every layer of every model whose positions are relative. A rotation is taken to be a layer's if undoing
it gives the same query at every position.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvwinnow.errors import UnsupportedModelError
from kvwinnow.ops import Rope
from kvwinnow.policies import Full

PROBES = (0, 1, 5, 117)
"""Positions at which a lone token's queries are compared; as many of them as the model was trained to."""

Angles = Callable[[Tensor], tuple[Tensor, Tensor]]


def find_ropes(
    decoder: nn.Module, layers: int, trained: int | None, queries_at: Callable[[int], Sequence[Tensor]], policy: str
) -> list[Rope | None]:
    """The rotation of each layer; None where there is none.

    Args:
        decoder: the module whose layers attend.
        layers: number of attention layers.
        trained: positions it was trained to; None: not stated.
        queries_at: a position to each layer's queries (1, Hq, 1, D) of one and the same lone token there.
        policy: who needs to know, for the complaint.

    Raises:
        UnsupportedModelError: a layer's rotation cannot be found out, or changes with the length of the text.
    """
    names = vars(sys.modules[type(decoder).__module__])
    if not any("rotary" in name.lower() or "rope" in name.lower() for name in names):
        return [None] * layers  # its positions, if it has any, are added to the tokens
    modules = [module for module in decoder.modules() if "Rotary" in type(module).__name__]
    kinds = {kind for module in modules for kind in _flat(getattr(module, "rope_type", "default"))}
    changing = kinds & {"dynamic", "longrope"}
    if changing:
        raise UnsupportedModelError(
            f"the model's rotary embedding is of type {min(changing)!r}, whose frequencies change with the text's "
            f"length, and {policy} has to know those of the positions to come; take another policy, such as snapkv"
        )
    places = [place for place in PROBES if trained is None or place < trained]
    seen = [queries_at(place) for place in places]
    candidates = [None, *(rope for module in modules for rope in _ropes(module, decoder.config))]
    positions = torch.tensor(places, device=seen[0][0].device)
    found: list[Rope | None] = []
    for layer in range(layers):
        queries = torch.cat([queries[layer][0] for queries in seen], 1)
        rope = next((candidate for candidate in candidates if _explains(candidate, queries, positions)), False)
        if isinstance(rope, bool):
            raise UnsupportedModelError(
                f"how {type(decoder).__name__} rotates the queries of its layer {layer} by their positions could not "
                f"be found out, and {policy} has to know it; take another policy, such as snapkv"
            )
        found.append(rope)
    return found


def lone_token(model: PreTrainedModel, decoder: nn.Module) -> Callable[[int], list[Tensor]]:
    """A position to each layer's queries (1, Hq, 1, D) of one and the same token, alone there."""

    from kvwinnow.integrations.transformers.cache import CompressedCache

    def queries_at(position: int) -> list[Tensor]:
        probe, queries = CompressedCache(model, Full()), dict[int, Tensor]()
        for index, layer in enumerate(probe._layers()):

            def attend(q: Tensor, *rest: Any, index: int = index, original: Any = layer.attend) -> Tensor:
                queries[index] = q
                return original(q, *rest)  # type: ignore[no-any-return]

            setattr(layer, "attend", attend)  # noqa: B010 - a method of this one object
        # Where the weights are not, as those on disk, accelerate's hooks take inputs from anywhere.
        place = "cpu" if model.device.type == "meta" else model.device
        ids = torch.ones(1, 1, dtype=torch.int64, device=place)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            decoder(input_ids=ids, position_ids=ids * position, past_key_values=probe)
        return [queries[index] for index in range(len(queries))]

    return queries_at


def _explains(rope: Rope | None, queries: Tensor, positions: Tensor) -> bool:
    """Whether (Hq, n, D) queries are the same ones at all positions but for the rotation."""
    plain = queries.float()
    try:
        plain = plain if rope is None else rope.undo(plain, positions)
    except RuntimeError:  # it rotates more elements than there are, or does not take positions alone
        return False
    tolerance = 1e-3 if queries.dtype == torch.float32 else 0.05
    return bool((plain - plain[:, :1]).norm() <= tolerance * plain.norm())


def _ropes(module: nn.Module, config: Any) -> Iterator[Rope]:
    """All rotations that a rotary module's cosines and sines may mean."""
    for kind in [None, *sorted(set(getattr(config, "layer_types", None) or []))]:
        for interleaved, spread in (
            (False, lambda x: x),
            (True, lambda x: x[..., : x.shape[-1] // 2].repeat_interleave(2, -1)),
            (True, lambda x: x),
            (False, lambda x: torch.cat([x, x], -1)),
            (True, lambda x: x.repeat_interleave(2, -1)),
        ):
            yield Rope(_angles(module, kind, spread), interleaved)


def _angles(module: nn.Module, kind: str | None, spread: Callable[[Tensor], Tensor]) -> Angles:
    """The module's cosines and sines, in float32, with one for every element."""

    def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
        x, places = positions.new_zeros(1, dtype=torch.float32), positions.unsqueeze(0)
        kinds = () if kind is None else (kind,)
        try:
            out = module(x, places, *kinds)
        except IndexError:  # M-RoPE of older transformers wants time, height and width, which are alike in text
            out = tuple(part[0] for part in module(x, places.expand(3, 1, -1), *kinds))
        except (TypeError, AttributeError, KeyError) as error:
            raise RuntimeError("the module asks for other arguments") from error
        cos, sin = (out.real, out.imag) if isinstance(out, Tensor) else out
        return spread(cos[0]).float(), spread(sin[0]).float()

    return angles


def _flat(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else [value]
