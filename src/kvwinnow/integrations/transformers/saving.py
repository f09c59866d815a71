"""A cache as a file: what is written, and what a file must be before any of it is used."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvwinnow import __version__
from kvwinnow.cache import LayerCache
from kvwinnow.cache.tensor_file import Spec, StrPath, TensorFile, opened, spec_of, write
from kvwinnow.codecs import parse_codec
from kvwinnow.errors import CacheStateError, DocumentError, KvwinnowError
from kvwinnow.integrations.transformers.calls import DIGEST, Seen
from kvwinnow.integrations.transformers.fingerprint import difference, fingerprint
from kvwinnow.integrations.transformers.unwrap import unwrap
from kvwinnow.policies import Phase, parse
from kvwinnow.statistics import Kind

if TYPE_CHECKING:
    from kvwinnow.integrations.transformers.cache import CompressedCache

FORMAT = 1
"""Raised whenever a file means something else than before."""
_MADE_IN = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
MOST = 2**31 - 1
"""Rows, tokens and slots are counted in 32 bits."""


def save(cache: CompressedCache, path: StrPath) -> None:
    """Write ``cache`` to a file. See ``CompressedCache.save``."""
    model = cache._model()
    if model is None:
        raise CacheStateError("the model of this cache is gone, so the cache cannot be saved")
    if not cache._seen.columns:
        raise CacheStateError("the cache is empty, so there is nothing to save; give it the document first")
    if _read(lambda: parse(str(cache.policy))) != cache.policy:
        raise DocumentError(
            f"policy {str(cache.policy)!r} cannot be found again by its text form; add it to kvwinnow.policies.POLICIES"
        )
    layers: list[LayerCache] = cache._layers()
    seen = cache._seen
    told = {
        "columns": seen.columns,
        "tokens": seen.tokens,
        "digests": None if seen.digests is None else [digest.hex() for digest in seen.digests],
        "ended": seen.ended,
        "offsets": seen.offsets,
    }
    texts = {
        "kvwinnow": __version__,
        "format": str(FORMAT),
        "policy": str(cache.policy),
        "k_dtype": str(cache.k_codec),
        "v_dtype": str(cache.v_codec),
        "model": json.dumps(fingerprint(model)),
        "seen": json.dumps(told),
        "budgets": json.dumps(cache.budgets.state()),
        "follows": json.dumps(cache.follows),
        "layers": json.dumps([layer.counts() for layer in layers]),
    }
    tensors = {f"{index}.{name}": x for index, layer in enumerate(layers) for name, x in layer.flat().items()}
    write(path, tensors, texts)


def load(path: StrPath, model: PreTrainedModel, device: str | torch.device | None) -> CompressedCache:
    """Read a cache from a file. See ``CompressedCache.load``."""
    from kvwinnow.integrations.transformers.cache import CompressedCache

    model = unwrap(model)
    own = fingerprint(model)
    target = None if device is None else _device(device)
    with opened(path) as file:
        _check_format(file)
        other = difference(_json(file, "model", dict), own)
        if other is not None:
            raise DocumentError(f"{file.shown} {other}")
        policy = _read(lambda: parse(_text(file, "policy")))
        codecs = [_read(lambda key=key: parse_codec(_text(file, key))) for key in ("k_dtype", "v_dtype")]
        if policy is None or None in codecs:
            raise DocumentError(
                f"{file.shown} was saved with policy {_text(file, 'policy')!r} and dtypes {_text(file, 'k_dtype')!r} "
                f"and {_text(file, 'v_dtype')!r}, and this kvwinnow does not know all of them; load it where they are "
                "registered"
            )
        cache = CompressedCache(model, policy, k_dtype=codecs[0], v_dtype=codecs[1])
        seen = _seen(file)
        cache._seen = seen
        try:
            cache.budgets.set_state(_json(file, "budgets", list, type(None)), len(seen.tokens))
        except ValueError as error:
            raise file.damaged("its budgets") from error
        follows = _json(file, "follows", list)
        if len(follows) != 2 or not all(type(own) is bool for own in follows):
            raise file.damaged("its dtypes")
        cache.follows = (follows[0], follows[1])
        dtypes = cache._layer_dtypes()
        cache.budgets.follow(dtypes, cache.follows)
        layers = cache._layers()
        told = _json(file, "layers", list)
        if len(told) != len(layers):
            raise file.damaged("its number of layers")
        sizes = [_prepare(file, cache, index, dtype) for index, dtype in enumerate(dtypes)]
        expected = {name for names in sizes for name in names}
        if expected != set(file.specs):
            raise file.damaged("its tensors")
        tensors = file.tensors()
        for index, layer in enumerate(layers):
            own_tensors = {name.partition(".")[2]: tensors.pop(name) for name in sizes[index]}
            counts = _counts(file, set(layer.counts()), told[index], own_tensors, seen)
            place = target or _device_of(model.get_submodule(cache.structure.names[index]))
            placed = {name: tensor.to(place) for name, tensor in own_tensors.items()}
            layer.adopt(placed, counts, [tokens > 0 for tokens in seen.tokens])
    return cache


# -- what a file must be ---------------------------------------------------------------------------


def _check_format(file: TensorFile) -> None:
    written, version = file.texts.get("format", ""), file.texts.get("kvwinnow", "")
    if not re.fullmatch(r"[1-9]\d{0,5}", written) or not version or len(version) > 99:
        raise DocumentError(f"{file.shown} is no saved cache; name a file that cache.save(path) wrote")
    if int(written) > FORMAT:
        raise DocumentError(
            f"{file.shown} was written by kvwinnow {version} in format {written}, and this one, {__version__}, reads "
            f"up to format {FORMAT}; update it with: pip install -U kvwinnow"
        )


def _text(file: TensorFile, key: str) -> str:
    text = file.texts.get(key)
    if text is None:
        raise file.damaged(f"it lacks its {key}")
    return text


def _json(file: TensorFile, key: str, *kinds: type) -> Any:
    try:
        value = json.loads(_text(file, key))
    except (ValueError, RecursionError) as error:
        raise file.damaged(f"its {key}") from error
    if type(value) not in kinds:
        raise file.damaged(f"its {key}")
    return value


def _counts_ok(values: object, rows: int, most: int) -> bool:
    """Whether they are one whole number in [0, most] for each row."""
    return isinstance(values, list) and len(values) == rows and all(type(n) is int and 0 <= n <= most for n in values)


def _seen(file: TensorFile) -> Seen:
    told = _json(file, "seen", dict)
    columns, tokens, digests, ended = (told.get(name) for name in ("columns", "tokens", "digests", "ended"))
    rows = len(tokens) if isinstance(tokens, list) else 0
    sound = type(columns) is int and 0 < columns <= MOST and rows > 0 and _counts_ok(tokens, rows, columns)
    if sound and digests is not None:
        pattern = re.compile(rf"[0-9a-f]{{{2 * DIGEST}}}")
        sound = isinstance(digests, list) and len(digests) == rows
        sound = sound and all(isinstance(text, str) and pattern.fullmatch(text) for text in digests)
    offsets = told.get("offsets")
    if sound and offsets is not None:
        sound = isinstance(offsets, list) and len(offsets) == rows
        sound = sound and all(type(number) is int and abs(number) <= MOST for number in offsets)
    if not sound or type(ended) is not bool:
        raise file.damaged("what it has seen")
    made = None if digests is None else tuple(bytes.fromhex(text) for text in digests)
    return Seen(columns, tuple(tokens), made, ended, None if offsets is None else tuple(offsets))


def _prepare(file: TensorFile, cache: CompressedCache, index: int, dtype: torch.dtype) -> list[str]:
    """Allocate a layer without memory, to know what each of its tensors must be; return their names in the file."""
    layer, structure = cache._layers()[index], cache.structure
    rows = len(cache._seen.tokens)
    shape = file.specs.get(f"{index}.positions", ("", ()))[1]
    if len(shape) != 3 or not 0 < shape[2] <= MOST:
        raise file.damaged(f"the positions of layer {index}")
    k_dtype, v_dtype = (_made_in(file, f"{index}.{side}.exact", dtype) for side in ("keys", "values"))
    cache._follow(layer, (k_dtype, v_dtype))
    # Unquantised slots beside others are in the dtype of the keys; a side that follows is in its own.
    dtype = k_dtype if cache.follows[0] or layer.k_codec.quantises or not layer.v_codec.quantises else v_dtype
    layer.allocate((rows, structure.kv_heads, shape[2], structure.dim), dtype, torch.device("meta"))
    wanted: dict[str, Spec] = {f"{index}.{name}": spec_of(tensor) for name, tensor in layer.flat().items()}
    window, own = f"{index}.window", cache.policy.statistics(Phase.PROMPT)
    if window in file.specs and own.kind is Kind.WINDOW:
        width = file.specs[window][1][2:3]
        sizes = (rows, structure.heads, min(*width, own.window) if width else 0, structure.dim)
        wanted[window] = spec_of(torch.empty(sizes, dtype=_made_in(file, window, dtype), device="meta"))
    for name in ("mean", "products") if f"{index}.moments.mean" in file.specs and own.kind is Kind.QUERIES else ():
        shape = (rows, structure.heads, *([structure.dim] * (1 if name == "mean" else 2)))
        wanted[f"{index}.moments.{name}"] = spec_of(torch.empty(shape, dtype=torch.float32, device="meta"))
    for name, spec in wanted.items():
        if file.specs.get(name) != spec:
            raise file.damaged(f"its tensor {name!r} is {file.specs.get(name)} and must be {spec}")
    return list(wanted)


def _made_in(file: TensorFile, name: str, default: torch.dtype) -> torch.dtype:
    """The dtype that the model made a tensor in, which need not be that of its weights: autocast chooses another."""
    return _MADE_IN.get(file.specs.get(name, ("", ()))[0], default)


def _counts(
    file: TensorFile, names: set[str], told: Any, tensors: dict[str, Tensor], seen: Seen
) -> dict[str, list[int]]:
    """What goes with a layer's tensors for each row, checked against them."""
    rows = len(seen.tokens)
    if not isinstance(told, dict) or set(told) != names:
        raise file.damaged("its counts")
    width = tensors["window"].shape[2] if "window" in tensors else MOST
    needed = {"kept", "since", "prompted"} | ({"observers"} if "window" in tensors else set())
    needed |= {"queries"} if "moments.mean" in tensors else set()
    for name, values in told.items():
        most = width if name == "observers" else MOST
        if not _counts_ok(values, rows, most) and (name in needed or values != []):
            raise file.damaged("its counts")
    positions = tensors["positions"]
    held = positions >= 0
    last = torch.tensor(seen.tokens).view(-1, 1, 1)
    ordered = positions.sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    counted = bool((held.sum(-1) == torch.tensor(told["kept"]).unsqueeze(1)).all())
    if not counted or bool((positions < -1).any() | (positions >= last).any() | twice.any()):
        raise file.damaged("its positions")
    return told


def _read(parsed: Any) -> Any:
    """What a text form stands for; None: nothing that is known here."""
    try:
        return parsed()
    except KvwinnowError:
        return None


def _device(device: str | torch.device) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise KvwinnowError(f"device={device!r} is none that torch can use here; give one such as 'cpu'") from error


def _device_of(attention: nn.Module) -> torch.device:
    """Where a layer computes, which differs between layers if the model is spread over devices."""
    place: torch.device = next(attention.parameters()).device
    if place.type != "meta":
        return place
    # Weights that lie on disk or in host memory are brought to this device by accelerate's hook.
    return torch.device(getattr(getattr(attention, "_hf_hook", None), "execution_device", None) or "cpu")
