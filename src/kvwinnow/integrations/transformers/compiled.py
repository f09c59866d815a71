"""``compile_decode``: the decode step of a model as one compiled graph, with the cache inside and unseen.

**Design.** Of a decode step (one new token a row, with a ``CompressedCache``) the decoder is traced as one whole graph
and the language head as another, and both are compiled by inductor with frozen weights. In each layer, everything
between the projections (storing, attending, evicting, growing) is ONE opaque operator, ``kvwinnow::attend_layer``: at
run time it finds the cache whose call runs in this thread and does what the uncompiled model does, with the native
kernels. All host-side state (positions, counts, budgets, the checks of a call) stays where it is, outside the graph. So
every policy, codec and growing cache works as uncompiled, and the graph depends on the number of rows alone.

Prompts and chunks take the uncompiled forward, as do calls without one of our caches.
"""

from __future__ import annotations

import dataclasses
import inspect
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvwinnow.errors import CacheStateError, KvwinnowError, UnsupportedModelError, UnsupportedSetupError
from kvwinnow.integrations.transformers import attachment, graph, linears, mrope
from kvwinnow.integrations.transformers.attachment import CACHE_ARGUMENTS
from kvwinnow.integrations.transformers.cache import CompressedCache
from kvwinnow.integrations.transformers.compilable import causes, checked, refuse_failed, refuse_model
from kvwinnow.integrations.transformers.structure import Structure, inspect_model, text_decoder
from kvwinnow.integrations.transformers.unwrap import unwrap
from kvwinnow.ops import Variant
from kvwinnow.ops.operators import register

Backend = Callable[[torch.fx.GraphModule, list[Tensor]], Callable[..., Any]]

_PASSED = ("input_ids", "inputs_embeds", "position_ids")
_SILENT = {"attention_mask": None, "use_cache": True, "return_dict": True}
"""Arguments that a graph need not be given: what the cache knows, and values (None: any) that change nothing."""
_ASKED = ("output_hidden_states", "output_router_logits")
"""What a model's configuration may ask for beside."""
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
"""Tensors that have memory of their own; those of quantised weights are made of others."""

_TUNED = "ATEN,CPP,TRITON"
"""Whose matrix products inductor may time: the library's own, and its templates for CPUs and GPUs."""

_hidden: ContextVar[weakref.ref[Tensor] | None] = ContextVar("kvwinnow_hidden", default=None)
"""What the latest compiled step of this thread gave, which the language head is given next."""


def compile_decode(
    model: PreTrainedModel, *, batch_sizes: int | Iterable[int] = 1, freeze: bool = True, tune: bool = False
) -> CompiledDecode:
    """Compile the decode step of ``model`` with any ``CompressedCache``, in place; ``generate`` then uses it.

    One graph is made for each batch size, here and now (for a model of 30 layers about a minute; later runs take less,
    from inductor's cache on disk); none is made later. The prompt, chunks of several tokens, calls with other caches or
    with none run as before, and so does a decode step that no graph serves (another number of rows, hidden states asked
    for), which is warned about once.

    Args:
        model: a loaded model in eval mode that ``CompressedCache`` serves, or a PeftModel around one.
        batch_sizes: numbers of rows to compile for, at most 8. Beams and returned sequences are rows.
        freeze: hold weights as constants. Those that kernels read as they lie (on CPUs, linear layers of up to 4 rows)
            are used in place; of others graphs have copies, in the layout that oneDNN reads fastest, which take their
            memory once more for each batch size. False: graphs use the model's own ones.
        tune: let inductor write kernels of its own for the matrix products that are not kvwinnow's (without native
            kernels, or from 5 rows on), time them beside the library's and keep the faster. It compiles some three
            times as long. On CPUs with AMX a step without native kernels takes about half as long then.

    Returns:
        A handle whose ``close()`` (or ``with`` block) undoes it. It need not be kept: a model stays compiled.

    Raises:
        UnsupportedModelError: the model is none that CompressedCache serves, or cannot be compiled.
        UnsupportedSetupError: torch.compile is switched off, or finds no C++ compiler.
        KvwinnowError: the model is in training mode or compiled already, or a batch size is none.

    A graph holds weights, adapters and torch's settings (threads, autocast) as they were. What has changed is noticed
    at the next decode step, which raises KvwinnowError: ``close()`` and compile again. (What is written through a
    weight's ``.data`` leaves no trace and is not.)
    """
    return CompiledDecode(model, batch_sizes, freeze=freeze, tune=tune)


class CompiledDecode:
    """What ``compile_decode`` returns.

    Attributes:
        batch_sizes: the numbers of rows compiled for; none once closed.
        steps: how many decode steps graphs have served so far.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch_sizes: int | Iterable[int] = 1,
        *,
        freeze: bool = True,
        tune: bool = False,
        backend: Backend | None = None,
    ) -> None:
        """As ``compile_decode``. ``backend``: what turns a traced graph into a function; None: inductor."""
        model = unwrap(model)
        structure = inspect_model(model)
        self.batch_sizes = checked(batch_sizes)
        decoder = text_decoder(model)
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        refuse_model(model, decoder)
        self._freeze, self._backend = freeze, backend or _inductor
        # Dynamo asks inductor's configuration whether weights are going to be constants.
        self._settings: dict[str, Any] = {"freezing": freeze}
        if tune:
            self._settings |= {"max_autotune_gemm": True, "max_autotune_gemm_backends": _TUNED}
        # The thread that compiles, until all is compiled. Other threads' steps run uncompiled as long.
        self._making: int | None = threading.get_ident()
        self.steps, self._warned = 0, False
        self._sections, self._taken = mrope.used_by(model), "input_ids"
        argument = _cache_argument(decoder)
        self._steps = {rows: self._compiled(_step(structure, argument)) for rows in self.batch_sizes}
        self._heads = {rows: self._compiled(_logits()) for rows in self.batch_sizes}
        parts = (decoder,) if head is None else (decoder, head)
        self._weights = [(tensor, _state(tensor)) for part in parts for tensor in _tensors(part)]
        # Weakly, since the registry holds this object for as long as the decoder lives.
        self._parts = weakref.WeakSet(parts)
        attachment.compiled[decoder] = self._decode
        self._unwrap = None if head is None else attachment.wrap_forward(head, _around_head)
        if head is not None:
            attachment.compiled[head] = self._head
        _compiles.begin()
        try:
            self._warm_up(model, argument)
        except BaseException:
            self.close()
            raise
        finally:
            self._making = None
            _compiles.end()

    def close(self) -> None:
        """Take the graphs off the model and let go of them and their copies of the weights."""
        for part in self._parts:
            attachment.compiled.pop(part, None)
        if self._unwrap is not None:
            self._unwrap()
        self._parts.clear()
        self._unwrap, self._steps, self._heads, self._weights, self.batch_sizes = None, {}, {}, [], ()

    def __enter__(self) -> CompiledDecode:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"CompiledDecode(batch_sizes={self.batch_sizes}, freeze={self._freeze})"

    # -- compiling ---------------------------------------------------------------------------------

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # Dynamo keeps graphs with the code object and looks through all of one, so each gets a code object of its own.
        own = types.FunctionType(function.__code__.replace(), globals(), closure=function.__closure__)
        reference = weakref.ref(self)  # Dynamo keeps every back end for good

        def backend(traced: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
            handle = reference()
            if handle is None:
                raise _ChangedError
            return handle._compile(traced, inputs)

        options: dict[str, Any] = {"guard_filter_fn": _of_the_model}
        return torch.compile(own, backend=backend, fullgraph=True, dynamic=False, options=options)

    def _compile(self, traced: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """What torch.compile asks for a graph: it is given one in ``_warm_up`` and never again."""
        if self._making != threading.get_ident():
            raise _ChangedError
        linears.take_over(traced)
        return self._backend(traced, inputs)

    def _warm_up(self, model: PreTrainedModel, argument: str) -> None:
        """Compile, by decoding one token for each batch size."""
        remembered = mrope.remembered(model)
        device: Any = model.get_input_embeddings().weight.device
        for rows in self.batch_sizes:
            given = {argument: CompressedCache(model, "full"), "use_cache": True}
            ids = torch.zeros(rows, 3, dtype=torch.int64, device=device)
            mask = torch.ones_like(ids)
            before = self.steps
            with torch.inference_mode(False), torch.no_grad():
                model(ids[:, :2], attention_mask=mask[:, :2], **given)
                try:
                    with torch._inductor.config.patch(self._settings):
                        model(ids[:, 2:], attention_mask=mask, **given)
                except KvwinnowError:
                    raise
                except Exception as error:
                    refuse_failed(model, error)
            if self.steps == before:
                raise UnsupportedSetupError(
                    "torch.compile is switched off here (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE or a stance of "
                    "torch.compiler), so compile_decode has nothing to compile with; switch it on, or leave "
                    "compile_decode out"
                )
        self.steps = 0
        if remembered is not None:
            mrope.remind(model, remembered.flatten().tolist(), remembered.device)

    # -- decoding ----------------------------------------------------------------------------------

    def _decode(self, original: Any, decoder: nn.Module, cache: CompressedCache, given: dict[str, Any]) -> Any:
        """A decode step of ``cache``, whose planning is done; NotImplemented: no graph serves it."""
        if getattr(original, "__func__", None) is not type(decoder).forward:
            return NotImplemented  # another library's wrapper, which calls ours inside
        steps = self._steps  # another thread may close() meanwhile
        if not steps or self._making not in (None, threading.get_ident()):
            return NotImplemented
        why = self._unserved(cache, given, steps)
        if why is not None:
            self._warn(why)
            return NotImplemented
        self._refuse_changed(decoder)
        inputs = _inputs(cache, given, self._sections)
        with torch.inference_mode(False), torch.no_grad():
            made = self._run(steps[_rows(given)], decoder, *inputs)
        if made is None:
            return NotImplemented
        kind, hidden = made
        self.steps += 1
        _hidden.set(weakref.ref(hidden))
        fields = {field.name for field in dataclasses.fields(kind)}
        return kind(last_hidden_state=hidden, **{name: cache for name in CACHE_ARGUMENTS if name in fields})

    def _head(self, original: Any, head: nn.Module, x: Any = None, *args: Any) -> Any:
        """Logits of what the latest step gave; NotImplemented: the head is given something else."""
        reference = _hidden.get()
        hidden = None if reference is None else reference()
        own = getattr(original, "__func__", None) is type(head).forward
        if hidden is None or not own or args or not isinstance(x, Tensor):
            return NotImplemented
        function = self._heads.get(hidden.shape[0])
        if function is None or x.shape != hidden.shape or x.data_ptr() != hidden.data_ptr():
            return NotImplemented
        with torch.inference_mode(False), torch.no_grad():
            made = self._run(function, head, hidden)
        return NotImplemented if made is None else made

    def _unserved(self, cache: CompressedCache, given: dict[str, Any], steps: Container[int]) -> str | None:
        """What of a call no graph serves; None: one does."""
        for name, value in given.items():
            passed = name in CACHE_ARGUMENTS or name in _PASSED or value is None or value is False
            if not passed and (name not in _SILENT or _SILENT[name] not in (None, value)):
                return name
        for name in _ASKED:
            if getattr(cache.config, name, False):
                return name
        taken = "input_ids" if given.get("input_ids") is not None else "inputs_embeds"
        if self._making is not None:
            self._taken = taken
        elif taken != self._taken:
            return taken
        rows, seen = _rows(given), cache.get_seq_length()
        if rows not in steps:
            return f"{rows} row(s)"
        if given.get("position_ids") is None and any(tokens != seen for tokens in cache.tokens_seen):
            return "padding and no position_ids"
        return None

    def _warn(self, why: str) -> None:
        if self._making is not None:
            raise UnsupportedModelError(
                f"the decoder is given {why} where one token is decoded, which compile_decode does not serve; use the "
                "model uncompiled"
            )
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"a decode step with {why} is none of those compiled (tokens and positions of "
                f"{_listed(self.batch_sizes)} row(s)), so it runs uncompiled; compile_decode(model, batch_sizes=...) "
                "takes other numbers of rows",
                stacklevel=2,
            )

    def _refuse_changed(self, decoder: nn.Module) -> None:
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            raise KvwinnowError(
                "the compiled decode step has no gradient; call the model inside torch.no_grad(), as generate does, or "
                "close() what compile_decode returned"
            )
        if any(torch.is_autocast_enabled(device) for device in {tensor.device.type for tensor, _ in self._weights[:1]}):
            raise KvwinnowError(
                "the decode step is compiled without autocast and called under it; call it outside, or close() what "
                "compile_decode returned"
            )
        if self._freeze and self._making is None and any(_state(tensor) != state for tensor, state in self._weights):
            _refuse_changed()

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        """What the graph gives; None, and nothing done, where it does not serve for now."""
        finished = _compiles.finished
        try:
            return function(*args)
        except Exception as error:
            if not any(isinstance(cause, _ChangedError) for cause in causes(error)):
                raise
            # While torch compiles in one thread, what it sets for itself may look to others like a change.
            if self._steps and _compiles.started == finished:
                _refuse_changed()
            return None


class _Compiles:
    """How many graphs this process has begun to make, and how many it is done with."""

    def __init__(self) -> None:
        self.started = self.finished = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        with self._lock:
            self.started += 1

    def end(self) -> None:
        with self._lock:
            self.finished += 1


_compiles = _Compiles()


class _ChangedError(Exception):
    """What a graph was made for is no longer so."""


def _refuse_changed() -> NoReturn:
    raise CacheStateError(
        "the model, its adapters or torch's settings (threads, modes) have changed since compile_decode, whose graphs "
        "hold them as they were; close() what it returned and call compile_decode(model) again"
    )


# -- what is traced --------------------------------------------------------------------------------


def _step(structure: Structure, argument: str) -> Callable[..., Any]:
    layers, direct = structure.layers, structure.direct

    def step(decoder: Any, ids: Tensor | None, embeds: Tensor | None, positions: Tensor, columns: Tensor) -> Any:
        if not torch.compiler.is_compiling():
            return None
        cache = graph.StandIn(layers, columns)
        given: dict[str, Any] = {"input_ids": ids} if embeds is None else {"inputs_embeds": embeds}
        given[argument] = cache
        graph.enter(cache)
        if direct:
            with attachment.Direct():
                out = type(decoder).forward(decoder, position_ids=positions, use_cache=True, **given)
        else:
            out = type(decoder).forward(decoder, position_ids=positions, use_cache=True, **given)
        graph.enter(None)
        return type(out), out.last_hidden_state

    return step


def _logits() -> Callable[..., Any]:
    def logits(head: Any, hidden: Tensor) -> Any:
        return type(head).forward(head, hidden) if torch.compiler.is_compiling() else None

    return logits


def _around_head(original: Callable[..., Any], head: nn.Module, *args: Any, **kwargs: Any) -> Any:
    compiled = attachment.compiled.get(head)
    if compiled is not None and not kwargs:
        made = compiled(original, head, *args)
        if made is not NotImplemented:
            return made
    return original(*args, **kwargs)


def _of_the_model(guards: Any) -> list[bool]:
    """Which guards to keep: those of the model, its inputs and torch's modes.

    What modules remember in globals (transformers' registries, say) grows with every other model that is loaded.
    """
    return [guard.guard_type == "GLOBAL_STATE" or not guard.is_global for guard in guards]


def _inductor(traced: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(traced, inputs)
    return compiled  # type: ignore[no-any-return]


def attend_layer(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layer: int, scale: float, softcap: float | None
) -> Tensor:
    """Store a layer's new keys and values in the cache whose call runs in this thread, attend to it, and evict.

    The cache is no argument, since graphs know only tensors. The layers' calls follow from each other by their results,
    so they come in order and once each.

    Args:
        q: (B, Hq, n, D) queries.
        k: (B, Hkv, n, D) keys.
        v: (B, Hkv, n, Dv) values.
        sinks: (Hq,) logits of the softmax's sinks; None: there are none.
        layer: the layer's number.
        scale: of the logits.
        softcap: of the logits; None: none.

    Returns:
        (B, n, Hq, Dv), as transformers' attention functions.
    """
    return attachment.attend_now(layer, q, k, v, lambda sliding: Variant(scale, softcap, sliding, sinks))


def _like_values(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layer: int, scale: float, softcap: float | None
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


register(attend_layer, _like_values, key="CompositeExplicitAutograd")


# -- inputs ----------------------------------------------------------------------------------------


def _inputs(cache: CompressedCache, given: dict[str, Any], sections: bool) -> tuple[Tensor | None, ...]:
    """Token ids or embeddings, positions and columns seen, in the shapes and strides that graphs were made for.

    Positions are (rows, 1), or (3, rows, 1) where M-RoPE has ``sections``.
    """
    ids, embeds, positions = (given.get(name) for name in _PASSED)
    first: Any = ids if ids is not None else embeds
    rows, seen = first.shape[0], cache.get_seq_length()
    if positions is None:
        positions = torch.full((rows, 1), seen, dtype=torch.int64, device=first.device)
    if sections:  # where there are four, the first is the tokens' own count, which makes masks
        positions = positions[-3:].expand(3, rows, 1) if positions.ndim == 3 else positions.expand(3, rows, 1)
    else:
        positions = positions.expand(rows, 1)
    columns = torch.tensor(seen, device=first.device)
    # A graph is particular about all strides, which slices and views leave behind even in dimensions of size 1, and
    # about whether tensors were made in inference mode.
    made = (ids, embeds, positions.to(torch.int64), columns)
    with torch.inference_mode(False), torch.no_grad():
        return tuple(None if x is None else x.clone(memory_format=torch.contiguous_format) for x in made)


def _rows(given: dict[str, Any]) -> int:
    ids = given.get("input_ids")
    return int((ids if ids is not None else given["inputs_embeds"]).shape[0])


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _state(tensor: Tensor) -> tuple[int, int]:
    """What changes when a tensor is written to or given other memory."""
    version = 0 if tensor.is_inference() else tensor._version
    return version, tensor.untyped_storage().data_ptr() if type(tensor) in _PLAIN else 0


def _cache_argument(decoder: nn.Module) -> str:
    """By which name the decoder takes a cache."""
    known = inspect.signature(type(decoder).forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in known), CACHE_ARGUMENTS[-1])


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
