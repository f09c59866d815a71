"""How the cache gets between a model and its attention: around the calls that carry one of our caches, no others.

While any cache of a model lives, ``generate``, ``generate_batch`` and the ``forward`` of its decoder are wrapped on
that one model object (and the ``forward`` of the vision-language model around the decoder, which makes its masks). The
wrappers pass every call through unless it carries one of our caches. Inside such a call the config names our attention
and mask functions; both delegate to the model's own whenever another call (another thread's, say) passes through them.
Layers that call torch's ``scaled_dot_product_attention`` themselves are answered there. When the last cache is gone the
wrappers are taken off.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvwinnow.errors import CacheStateError, KvwinnowError, UnsupportedModelError
from kvwinnow.integrations.transformers import graph
from kvwinnow.integrations.transformers.masks import window_of
from kvwinnow.integrations.transformers.structure import wide
from kvwinnow.ops import Variant

if TYPE_CHECKING:
    from kvwinnow.integrations.transformers.cache import CompressedCache

NAME = "kvwinnow"
CACHE_ARGUMENTS = ("cache", "past_key_values")
_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
_NAMED = ("inputs", "generation_config", "assistant_model", "custom_generate")
"""Arguments that ``generate`` names; the others, a cache among them, are in its ``kwargs``."""

_running: ContextVar[CompressedCache | None] = ContextVar("kvwinnow_running", default=None)
"""The cache whose forward call runs in this thread."""

_generating: ContextVar[CompressedCache | None] = ContextVar("kvwinnow_generating", default=None)
"""The cache given to the ``generate`` that runs in this thread."""

_windows: ContextVar[set[int | None] | None] = ContextVar("kvwinnow_windows", default=None)
"""The windows of the masks that the running call has asked for."""


compiled: weakref.WeakKeyDictionary[nn.Module, Callable[..., Any]] = weakref.WeakKeyDictionary()
"""What ``compile_decode`` made of a decoder or a language head; its function may answer NotImplemented."""


class HandOver(NamedTuple):
    """A layer's work, as ``Cache.update`` leaves it.

    Attributes:
        name: where the layer's attention lies in the model.
        sliding: its window.
        keys: what ``update`` returned and the attention function must be given.
        values: the same.
        attend: from queries (B, Hq, n, D) and a variant to the output (B, Hq, n, D).
    """

    name: str
    sliding: int | None
    keys: Tensor
    values: Tensor
    attend: Callable[[Tensor, Variant], Tensor]


_handed_over: ContextVar[HandOver | None] = ContextVar("kvwinnow_handed_over", default=None)
"""What ``Cache.update`` leaves for the attention function of the same layer; taken once."""


@dataclass
class _Arrangement:
    """A config that names our functions for now.

    Attributes:
        calls: how many forward calls with one of our caches are running, in all threads.
        original: the attention implementation the config named before the first of them.
    """

    calls: int
    original: str


_lock = threading.RLock()
_arrangements: dict[int, _Arrangement] = {}
"""By id of the config, which decoder, attention modules and mask functions share; an entry lives as long as a call."""


@dataclass
class _Wrapper:
    """What is known of one of our wrappers.

    Attributes:
        module: the object it was put on; a deep copy of the model carries it too, but is another.
        earlier: what stood in its place, another library's wrapper; None: the class's own method.
        caches: how many living caches need it.
    """

    module: weakref.ref[nn.Module]
    earlier: Any
    caches: int = 0


_signatures: weakref.WeakKeyDictionary[Callable[..., Any], inspect.Signature] = weakref.WeakKeyDictionary()
"""Of methods, without their object."""

_wrappers: weakref.WeakKeyDictionary[Callable[..., Any], _Wrapper] = weakref.WeakKeyDictionary()
"""By the wrapping function itself: attributes of functions are copied by whoever wraps them."""


def attach(cache: CompressedCache, model: PreTrainedModel, decoders: tuple[nn.Module, ...]) -> None:
    """Wrap ``model`` for as long as ``cache`` or another cache of it lives; ``decoders`` are called with it."""
    own = ((model, "generate", _generate), (model, "generate_batch", _batch))
    wrapped = (*own, *((decoder, "forward", _forward) for decoder in decoders))
    for module, name, around in wrapped:
        with _lock:
            method = _wrap(module, name, around)
            _wrappers[method].caches += 1
        weakref.finalize(cache, _unwrap, weakref.ref(method), name)


def hand_over(work: HandOver) -> None:
    """Leave a layer's work for the attention function that the model calls next.

    Raises:
        UnsupportedModelError: the layer before never called it, or this one is given masks of another window.
    """
    _refuse_untaken()
    windows = _windows.get()
    if windows and work.sliding not in windows:
        raise UnsupportedModelError(
            f"{work.name} sees {_shown(work.sliding)} by its configuration, and the model masks for "
            f"{' and '.join(map(_shown, windows))}; CompressedCache cannot tell which holds, see docs/models.md"
        )
    _handed_over.set(work)


def _shown(window: int | None) -> str:
    return "all tokens" if window is None else f"the latest {window:,} tokens"


def _refuse_untaken() -> None:
    untaken = _handed_over.get()
    if untaken is not None:
        raise UnsupportedModelError(
            f"{untaken.name} gave its keys and values to the cache and computed its attention by itself, which "
            "CompressedCache cannot serve; see docs/models.md"
        )


def _take(keys: Tensor, values: Tensor) -> HandOver | None:
    """What was handed over for these keys and values."""
    work = _handed_over.get()
    if work is None:
        return None
    for given, left in ((keys, work.keys), (values, work.values)):
        if given is not left and (given.data_ptr() != left.data_ptr() or given.shape != left.shape):
            raise UnsupportedModelError(
                f"{work.name} changes its keys or values after the cache has seen them, which CompressedCache cannot "
                "serve; see docs/models.md"
            )
    _handed_over.set(None)
    return work


def attend_now(layer: int, q: Tensor, k: Tensor, v: Tensor, variant: Callable[[int | None], Variant]) -> Tensor:
    """A layer's work inside a graph: ``Cache.update`` and the attention after it; (B, n, Hq, D).

    Args:
        layer: its number.
        q: (B, Hq, n, D) queries.
        k: (B, Hkv, n, D) keys.
        v: (B, Hkv, n, D) values.
        variant: from the layer's window to how it attends.
    """
    cache = _running.get()
    if cache is None:
        raise CacheStateError("a compiled decode step runs outside of a call with a CompressedCache; give it one")
    cache.update(k, v, layer)
    work = _take(k, v)
    assert work is not None, "update() leaves it"
    return work.attend(q, variant(work.sliding)).transpose(1, 2).contiguous()


def running() -> CompressedCache | None:
    """The cache whose forward call runs in this thread, or None."""
    return _running.get()


def generate_with(cache: object) -> tuple[PreTrainedModel, dict[str, Any]] | None:
    """The ``generate`` of this thread that was given ``cache``: its model and its arguments; None: there is none."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _GENERATE:
            given = frame.f_locals
            arguments = {**given["kwargs"], **{name: given[name] for name in _NAMED if name in given}}
            if any(arguments.get(name) is cache for name in CACHE_ARGUMENTS):
                return given["self"], arguments
        frame = frame.f_back
    return None


# -- wrappers --------------------------------------------------------------------------------------


def wrap_forward(module: nn.Module, around: Callable[..., Any]) -> Callable[[], None]:
    """Have ``around(original, module, *args, **kwargs)`` answer a module's ``forward``; return what undoes it."""
    with _lock:
        method = _wrap(module, "forward", around)
        _wrappers[method].caches += 1
    return functools.partial(_unwrap, weakref.ref(method), "forward")


def _wrap(module: nn.Module, name: str, around: Callable[..., Any]) -> Callable[..., Any]:
    """Have ``around(original, module, *args, **kwargs)`` answer calls of one method of one object.

    Returns:
        The wrapping function, a key of ``_wrappers``; it may have been there already.
    """
    place = _aside(name) if _aside(name) in module.__dict__ else name
    earlier: Any = module.__dict__.get(place)
    function: Any = getattr(earlier, "__func__", None)
    if function in _wrappers:
        if _wrappers[function].module() is module:
            return function  # type: ignore[no-any-return]
        earlier = None  # ``module`` is a deep copy, and this the wrapper of its original

    @functools.wraps(getattr(type(module), name))
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        original = earlier or types.MethodType(getattr(type(self), name), self)
        return around(original, self, *args, **kwargs)

    _wrappers[method] = _Wrapper(weakref.ref(module), earlier)
    # A bound method, so that a deep copy of the model binds its own.
    setattr(module, place, types.MethodType(method, module))
    return method


def _aside(name: str) -> str:
    """Where accelerate keeps a method that its hook replaced. We sit under the hook, so that it may come and go."""
    return f"_old_{name}"


def _unwrap(reference: weakref.ref[Callable[..., Any]], name: str) -> None:
    """One cache less needs the wrapper; take it off with the last one, unless another library wrapped it in turn."""
    method = reference()
    with _lock:
        if method is None or method not in _wrappers:
            return
        wrapper = _wrappers[method]
        wrapper.caches -= 1
        module = wrapper.module()
        if module is None or wrapper.caches:
            return
        for place in (name, _aside(name)):
            if getattr(module.__dict__.get(place), "__func__", None) is not method:
                continue
            if wrapper.earlier is not None:
                setattr(module, place, wrapper.earlier)
            elif place == name:
                delattr(module, place)
            else:
                setattr(module, place, types.MethodType(getattr(type(module), name), module))


def _cache_in(*values: Any) -> CompressedCache | None:
    from kvwinnow.integrations.transformers.cache import CompressedCache

    return next((value for value in values if isinstance(value, CompressedCache)), None)


def _forward(original: Callable[..., Any], decoder: nn.Module, *args: Any, **kwargs: Any) -> Any:
    cache = _cache_in(*args, *(kwargs.get(name) for name in CACHE_ARGUMENTS))
    if cache is None:
        generating = _generating.get()
        if generating is not None and _running.get() is None:
            generating.check_dropped(decoder, kwargs)
        # A hook may make a plain call in the midst of a call with a cache.
        token = _running.set(None)
        try:
            return original(*args, **kwargs)
        finally:
            _running.reset(token)
    if _running.get() is cache:  # the wrapper of an earlier cache, inside another library's, inside ours
        return _step(original, decoder, cache, args, kwargs)
    given, direct = _given(original, args, kwargs), cache.structure.direct
    with cache.call(decoder, given), _arranged(cache.config, "sdpa" if direct else NAME):
        token, windows = _running.set(cache), _windows.set(set())
        try:
            result = _step(original, decoder, cache, args, kwargs)
            _refuse_untaken()
            return result
        finally:
            _running.reset(token)
            _windows.reset(windows)
            _handed_over.set(None)


def _step(
    original: Callable[..., Any], decoder: nn.Module, cache: CompressedCache, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """The decoder's work in a call with ``cache``: a graph's, if ``compile_decode`` made one that serves it."""
    graphs = compiled.get(decoder)
    if graphs is not None and cache.decoding:
        result = graphs(original, decoder, cache, _given(original, args, kwargs))
        if result is not NotImplemented:
            return result
    with Direct() if cache.structure.direct else contextlib.nullcontext():
        return original(*args, **kwargs)


def _given(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name."""
    given = _signature(function).bind_partial(*args, **kwargs).arguments
    given |= given.pop("kwargs", {})
    return given


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """That of a method is looked at once for all objects: to look takes a quarter of a millisecond at every token."""
    if not isinstance(function, types.MethodType):
        return inspect.signature(function)
    known = _signatures.get(function.__func__)
    if known is None:
        known = _signatures[function.__func__] = inspect.signature(function)
    return known


@contextlib.contextmanager
def _arranged(config: Any, name: str) -> Iterator[None]:
    """Let the config name ``name`` as long as a call with one of our caches runs in any thread."""
    with _lock:
        arrangement = _arrangements.get(id(config))
        if arrangement is None:
            arrangement = _arrangements[id(config)] = _Arrangement(0, config._attn_implementation)
            config._attn_implementation = name
        arrangement.calls += 1
    try:
        yield
    finally:
        with _lock:
            arrangement.calls -= 1
            if arrangement.calls == 0:
                config._attn_implementation = arrangement.original
                del _arrangements[id(config)]


def _generate(original: Callable[..., Any], model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    cache = _cache_in(*(kwargs.get(name) for name in CACHE_ARGUMENTS))
    with contextlib.nullcontext() if cache is None else cache.generation(model, args, kwargs):
        token = _generating.set(cache)
        try:
            return original(*args, **kwargs)
        finally:
            _generating.reset(token)


def _batch(original: Callable[..., Any], model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    if _cache_in(*args, *kwargs.values()) is not None:
        raise KvwinnowError(
            "generate_batch (continuous batching) has a paged cache of its own and would ignore a CompressedCache; use "
            "generate, or leave the cache out"
        )
    return original(*args, **kwargs)


# -- what the config names during our calls --------------------------------------------------------


def _original(config: Any) -> str:
    with _lock:
        arrangement = _arrangements.get(id(config))
        # A plain call may have read our name just before another thread's call with a cache ended; by now the config
        # names its own implementation again.
        named: str = config._attn_implementation if arrangement is None else arrangement.original
    if named == NAME:
        raise CacheStateError(
            f"attn_implementation={NAME!r} is not for setting by hand: give a CompressedCache to the model's call"
        )
    return named


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Transformers' attention interface: query (B, Hq, n, D), key and value (B, Hkv, n, D); output (B, n, Hq, D)."""
    if graph.tracing():
        softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
        return graph.attention(query, key, value, attention_mask, scaling, softcap, sinks), None
    work = _take(key, value)
    if work is None:
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        original = ALL_ATTENTION_FUNCTIONS.get_interface(_original(module.config), eager)
        return original(module, query, key, value, attention_mask, scaling=scaling, **kwargs)  # type: ignore[no-any-return]
    if attention_mask is not None or kwargs.get("cu_seq_lens_q") is not None or kwargs.get("is_causal") is False:
        raise UnsupportedModelError(
            f"{work.name} is given a mask of its own or packed sequences, and CompressedCache serves causal attention "
            "to what it holds; see docs/models.md"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    variant = Variant(scale, kwargs.get("softcap"), work.sliding, kwargs.get("s_aux"))
    return work.attend(query, variant).transpose(1, 2).contiguous(), None


class Direct(TorchFunctionMode):
    """Answers the one call of torch's attention that follows an ``update``, in layers that call it themselves."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and (graph.tracing() or _handed_over.get() is not None):
            return _sdpa(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Torch's ``scaled_dot_product_attention`` over what the cache holds; its mask is the cache's affair."""
    if graph.tracing():
        return graph.attention(query, key, value, None, scale, None, None).transpose(1, 2)
    work = _take(key, value)
    assert work is not None, "asked only while a layer's work waits"
    return work.attend(query, Variant(query.shape[-1] ** -0.5 if scale is None else scale, sliding=work.sliding))


def _mask(*args: Any, config: Any = None, **kwargs: Any) -> Any:
    """Transformers' mask interface. The cache knows padding and windows already: inside its calls there is no mask."""
    if graph.tracing():  # a decode step: the prompt before it has been through here
        return None
    cache, windows = _running.get(), _windows.get()
    if cache is None or windows is None:
        return ALL_MASK_ATTENTION_FUNCTIONS[_original(config)](*args, config=config, **kwargs)
    structure, first, key = cache.structure, kwargs["q_offset"], kwargs["kv_offset"]
    window = window_of(
        kwargs["mask_function"],
        structure.sliding,
        rows=kwargs["batch_size"],
        queries=range(first, first + kwargs["q_length"]),
        keys=range(key, key + kwargs["kv_length"]),
        device=kwargs["device"],
    )
    windows.add(wide(window, structure.trained_length))
    return None


# Registering names the two functions and changes no model: nothing uses them until a config carries the name.
AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
