"""``plan``: the memory of a model, its cache and what fits, before anything is loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from kvwinnow.codecs import Codec, parse_codec
from kvwinnow.errors import KvwinnowError, PolicyError
from kvwinnow.planning.architecture import Architecture, Parameters
from kvwinnow.planning.caches import (
    Cache,
    CompressedCachePlan,
    FullCache,
    check_served,
    has_default_budget,
    unserved,
)
from kvwinnow.planning.catalogue import find
from kvwinnow.planning.config import architecture as read_config
from kvwinnow.planning.fitting import Load, Option, gpus_for, gpus_for_weights, longest_context, options, requests
from kvwinnow.planning.gpus import GPU, parse_gpu
from kvwinnow.planning.units import MOST, UNITS, parse_count, parse_overhead, parse_parameters, parse_tokens
from kvwinnow.planning.weights import LighterWeights, lighter, weights_bytes
from kvwinnow.policies import Full, Policy, parse

OVERHEAD = "10%"
"""What is kept free of each GPU where nothing else is said.

CUDA's context, the activations of a chunk of the prompt, workspaces and fragmentation; a little more than
vLLM leaves by default (gpu_memory_utilization=0.92).
"""
CHUNK = 2048
"""Tokens of a prompt that are read at once where nothing else is said, as serving engines do."""
BLOCK = 16
"""Tokens in a block of vLLM's paged cache, its default on GPUs."""


@runtime_checkable
class ConfigLike(Protocol):
    """A config of transformers, or whatever else gives its fields as a mapping."""

    def to_dict(self) -> dict[str, Any]:
        """Its fields, by name."""
        ...


@dataclass(frozen=True)
class ModelPlan:
    """The model, in numbers.

    Attributes:
        name: as the planner calls it.
        source: where its facts are from.
        layers: how many layers cache what, such as "full attention, 32 query heads, 8 KV heads of 128".
        dtype: in which it computes.
        trained: tokens it was trained to; None: not stated.
        bytes_per_token: of an uncompressed cache, while no window is full.
        bytes_per_late_token: by which it grows once all windows are full.
        state_bytes: of a sequence, whatever its length.
        unserved: why kvwinnow's cache does not serve it; None: nothing is known against it.
        notes: what a reader of the figures should know.
        dtype_assumed: whether ``dtype`` is a guess, since the config does not say it.
        windows: of its sliding layers, each once.
    """

    name: str
    source: str
    layers: dict[str, int]
    dtype: str
    trained: int | None
    bytes_per_token: int
    bytes_per_late_token: int
    state_bytes: int
    unserved: str | None
    notes: tuple[str, ...]
    dtype_assumed: bool
    windows: tuple[int, ...]


@dataclass(frozen=True)
class GPUPlan:
    """The GPUs and what is left of them for the cache.

    Attributes:
        name: of the kind.
        count: how many share the model by tensor parallelism.
        source: where the memory is from.
        memory: bytes of one of them.
        overhead: bytes of one of them that are kept free.
        weights: bytes of the weights on one of them.
        free: bytes of one of them that are left for the cache; negative: the weights do not fit.
        lighter: if they do not, the formats in which they would, the smallest first.
        gpus_for_weights: if they do not, the least number of such GPUs, a power of two, on which they would; None: they
            fit, or on none up to 64.
    """

    name: str
    count: int
    source: str
    memory: int
    overhead: int
    weights: int
    free: int
    lighter: tuple[LighterWeights, ...] = ()
    gpus_for_weights: int | None = None


@dataclass(frozen=True)
class ContextPlan:
    """The cache at one context, of all rows and on all GPUs, in bytes.

    Attributes:
        context: tokens of each row's prompt.
        full: a cache that keeps every token in the model's dtype, after the prompt and the new tokens.
        full_blocks: the same in the blocks of a paged cache.
        budget: tokens per KV head that kvwinnow's cache keeps of the prompt; None: all, or those of the windows where
            all layers slide, or no such cache was asked for.
        kept: kvwinnow's cache after the prompt; None: none was asked for.
        kept_later: the same after the new tokens.
        prefill: the peak of kvwinnow's cache while the prompt is read in chunks; None: none was asked for.
        prefill_whole: the same if the prompt is read in one piece.
        prefill_evicting_later: the least of an engine that evicts once the prompt is read: the prompt's full cache.
        needed_per_gpu: the most that the cache asked for takes of one GPU; of the full cache its blocks.
        fits: whether that is no more than is free; None: no GPU was named.
        requests: how many requests of one row fit at once; None: no GPU was named.
        beyond_trained: whether this is more than the model was trained to.
    """

    context: int
    full: int
    full_blocks: int
    budget: int | None
    kept: int | None
    kept_later: int | None
    prefill: int | None
    prefill_whole: int | None
    prefill_evicting_later: int
    needed_per_gpu: int
    fits: bool | None
    requests: int | None
    beyond_trained: bool


@dataclass(frozen=True)
class ContextFit:
    """What would make one context fit.

    Attributes:
        context: tokens of each row's prompt.
        gpus_for_full: the least number of such GPUs, a power of two, on which the full cache fits; None: none up to 64.
        options: caches that fit on the GPUs there are, from the safest format to the smallest.
    """

    context: int
    gpus_for_full: int | None
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Fit:
    """What would fit, as asked by ``fit=True``.

    Attributes:
        longest_context: the largest context of the cache asked for; 0: none fits; None: any.
        longest_full_context: the same of the full cache.
        contexts: ways to make each context fit.
    """

    longest_context: int | None
    longest_full_context: int | None
    contexts: tuple[ContextFit, ...]


@dataclass(frozen=True)
class Plan:
    """The answer of ``plan``. All sizes are whole bytes.

    Attributes:
        model: the model.
        policy: text form of the policy asked for; None: the full cache was asked for.
        budget_assumed: whether its budget is the default, since none was named.
        k_dtype: how keys are stored.
        v_dtype: how values are stored.
        batch: rows in the cache.
        new: tokens decoded after each prompt.
        chunk: tokens of a prompt read at once; None: all.
        block: tokens in a block of a paged cache.
        parameters: of the weights; None: not known.
        weights_dtype: format of the weights.
        weights: bytes of all weights; None: not known.
        gpu: the GPUs; None: none were named.
        contexts: the cache at each context.
        fit: what would fit; None: not asked for.
        units: what the units mean.
    """

    model: ModelPlan
    policy: str | None
    budget_assumed: bool
    k_dtype: str
    v_dtype: str
    batch: int
    new: int
    chunk: int | None
    block: int
    parameters: int | None
    weights_dtype: str | None
    weights: int | None
    gpu: GPUPlan | None
    contexts: tuple[ContextPlan, ...]
    fit: Fit | None
    units: str = UNITS

    def to_json(self) -> dict[str, Any]:
        """The same as a document of JSON's types."""
        return dataclasses.asdict(self)


def plan(  # noqa: PLR0913 - each is one thing that a user may ask
    model: str | os.PathLike[str] | Mapping[str, Any] | ConfigLike | Architecture,
    *,
    context: int | str | Iterable[int | str] | None = None,
    batch: int | str = 1,
    gpu: str | GPU | None = None,
    policy: str | Policy | None = None,
    dtype: str | Codec | None = None,
    k_dtype: str | Codec | None = None,
    v_dtype: str | Codec | None = None,
    weights_dtype: str | None = None,
    parameters: int | str | None = None,
    new: int | str = 0,
    chunk: int | str | None = CHUNK,
    block: int | str = BLOCK,
    overhead: float | str = OVERHEAD,
    fit: bool = False,
) -> Plan:
    """Compute the memory of a model, of its cache at some contexts, and what fits on a GPU. Needs no torch.

    Args:
        model: a built-in name (``catalogue.find``), a folder, a config.json, a cached hub id, the content of a config,
            a config of transformers, or an ``Architecture``.
        context: tokens of the prompt, or several numbers of them, such as 4096 or "128k" (1k = 1,024 tokens); None: the
            trained length.
        batch: prompts that are read together as one batch.
        gpu: such as "H100-80GB", "H100-80GBx8" or "24GiB"; several share the model by tensor parallelism.
        policy: which tokens kvwinnow's cache keeps; None with no dtypes: the full cache.
        dtype: how keys and values are stored, as in ``CompressedCache``; None: in the model's dtype.
        k_dtype: the same for keys alone.
        v_dtype: the same for values alone.
        weights_dtype: a name of ``weights.FORMATS``; None: as the weights are published.
        parameters: of the weights, such as "70B", where the model's config does not tell.
        new: tokens decoded after each prompt.
        chunk: tokens of the prompt read at once; None: all.
        block: tokens in a block of a paged cache (vLLM's).
        overhead: of each GPU, kept free of weights and cache: a share (0.1, "10%") or a size ("2GiB").
        fit: whether to look for what would fit.

    Raises:
        KvwinnowError: an input that cannot be planned, in one sentence.
    """
    architecture = _architecture(model)
    if parameters is not None:
        known = architecture.parameters or Parameters(0)
        total = parse_parameters(parameters)
        small = Parameters(total, min(known.embeddings, total), min(known.experts, total))
        architecture = dataclasses.replace(architecture, parameters=small, checkpoint=None)
    load = Load(parse_count("batch", batch), parse_tokens(new, "new tokens", least=0), _chunk(chunk))
    machine = _machine(gpu, overhead)
    gpus = 1 if machine is None else machine.count
    full = FullCache(architecture, gpus, parse_count("block", block))
    cache = _cache(architecture, policy, (dtype, k_dtype, v_dtype), gpus)
    wanted, codecs = cache or full, cache.codecs if cache else (parse_codec(architecture.dtype),) * 2
    contexts = _contexts(context, architecture)
    weights_name, weights = _weights(architecture, weights_dtype)
    gpu_plan = None if machine is None else _gpu(architecture, machine, overhead, weights)
    if fit and gpu_plan is None:
        raise KvwinnowError(
            "what fits depends on a GPU, and none is named; add one, such as --gpu H100-80GB or --gpu 24GiB"
        )
    free = None if gpu_plan is None else gpu_plan.free
    planned = tuple(_at(tokens, full, cache, load, free) for tokens in contexts)
    return Plan(
        model=_model(architecture),
        policy=None if cache is None else str(cache.policy),
        budget_assumed=cache is not None and isinstance(policy, str) and has_default_budget(policy, cache.policy),
        k_dtype=str(codecs[0]),
        v_dtype=str(codecs[1]),
        batch=load.batch,
        new=load.new,
        chunk=load.chunk,
        block=full.block,
        parameters=None if architecture.parameters is None else architecture.parameters.total,
        weights_dtype=weights_name,
        weights=weights,
        gpu=gpu_plan,
        contexts=planned,
        fit=None if not fit or gpu_plan is None else _fit(wanted, full, contexts, load, gpu_plan),
    )


def _architecture(model: object) -> Architecture:
    if isinstance(model, Architecture):
        return model
    if isinstance(model, Mapping):
        return read_config(model)
    if isinstance(model, str | os.PathLike):
        return find(os.fspath(model))
    if isinstance(model, ConfigLike):
        return read_config(model.to_dict())
    raise KvwinnowError(
        f"the model is a {type(model).__name__}; give a name, a path, the content of a config.json or an Architecture"
    )


def _cache(
    architecture: Architecture,
    policy: str | Policy | None,
    dtypes: tuple[str | Codec | None, str | Codec | None, str | Codec | None],
    gpus: int,
) -> CompressedCachePlan | None:
    """kvwinnow's cache as asked for; None: nothing of it was."""
    both, *parts = dtypes
    if both is not None and any(part is not None for part in parts):
        raise KvwinnowError(
            f"dtype {both} names both dtypes, and k_dtype or v_dtype is beside it; give it alone, or those two"
        )
    if policy is None and all(dtype is None for dtype in dtypes):
        return None
    check_served(architecture, "the policy" if policy is not None else "the cache's dtypes")
    chosen = Full() if policy is None else policy if isinstance(policy, Policy) else parse(policy)
    common = architecture.dtype if both is None else both
    k_codec, v_codec = (parse_codec(common if part is None else part) for part in parts)
    cache = CompressedCachePlan(architecture, chosen, (k_codec, v_codec), gpus)
    cache.check()
    return cache


def _contexts(asked: int | str | Iterable[int | str] | None, architecture: Architecture) -> tuple[int, ...]:
    if asked is None:
        if architecture.trained is None:
            raise KvwinnowError(
                f"{architecture.name} does not say how long a context it was trained to; give one, such as 128k"
            )
        return (architecture.trained,)
    several: tuple[Any, ...] = (asked,)
    if not isinstance(asked, int | str | bytes):
        with contextlib.suppress(TypeError):  # a single number of another kind
            several = tuple(asked)
    if not several:
        raise KvwinnowError("there is no context to plan; give one, such as 128k")
    return tuple(dict.fromkeys(parse_tokens(one) for one in several))


def _chunk(asked: int | str | None) -> int | None:
    if asked is None or (isinstance(asked, str) and asked.strip().lower() == "none"):
        return None
    return parse_tokens(asked, "prefill chunk")


def _machine(gpu: str | GPU | None, overhead: float | str) -> GPU | None:
    if gpu is None:
        parse_overhead(overhead, MOST)  # which is of no use then, but may be a slip of the hand
        return None
    if isinstance(gpu, GPU):
        return gpu
    if not isinstance(gpu, str):
        raise KvwinnowError(f"the GPU is a {type(gpu).__name__}; give a name or a size, such as 'H100-80GB' or '24GiB'")
    return parse_gpu(gpu)


def _weights(architecture: Architecture, asked: str | None) -> tuple[str | None, int | None]:
    """Their format and their bytes, as far as they are known."""
    if asked is None and architecture.checkpoint is not None:
        return architecture.weights, architecture.checkpoint
    name = architecture.weights if asked is None else asked
    if architecture.parameters is None or name is None:
        if asked is not None:
            weights_bytes(Parameters(1, 0, 1), asked)  # an unknown format is an error even so
        return name, None
    return name, weights_bytes(architecture.parameters, name)


def _gpu(architecture: Architecture, gpu: GPU, overhead: float | str, weights: int | None) -> GPUPlan:
    if weights is None:
        raise KvwinnowError(
            f"how large the weights of {architecture.name} are is not known, so neither is what they leave of {gpu}; "
            "give their number, such as --parameters 70B, and --weights-dtype"
        )
    reserved = parse_overhead(overhead, gpu.memory)
    each = -(-weights // gpu.count)
    usable = gpu.memory - reserved
    found = GPUPlan(gpu.name, gpu.count, gpu.source, gpu.memory, reserved, each, usable - each)
    if found.free >= 0:
        return found
    return dataclasses.replace(
        found,
        lighter=lighter(architecture.parameters, gpu.count, usable),
        gpus_for_weights=gpus_for_weights(architecture, weights, usable),
    )


def _model(architecture: Architecture) -> ModelPlan:
    kinds: dict[str, int] = {}
    for layer in architecture.layers:
        kinds[str(layer)] = kinds.get(str(layer), 0) + 1
    return ModelPlan(
        name=architecture.name,
        source=architecture.source,
        layers=kinds,
        dtype=architecture.dtype,
        trained=architecture.trained,
        bytes_per_token=architecture.bytes_per_token,
        bytes_per_late_token=architecture.bytes_per_late_token,
        state_bytes=architecture.state_bytes,
        unserved=unserved(architecture),
        notes=architecture.notes,
        dtype_assumed=architecture.dtype_assumed,
        windows=tuple(dict.fromkeys(filter(None, (getattr(layer, "window", None) for layer in architecture.layers)))),
    )


def _at(context: int, full: FullCache, cache: CompressedCachePlan | None, load: Load, free: int | None) -> ContextPlan:
    batch, new, gpus = load.batch, load.new, full.gpus
    exact = FullCache(full.architecture, gpus)
    wanted: Cache = cache or full
    needed = load.needed(wanted, context)
    return ContextPlan(
        context=context,
        full=gpus * exact.held(context, batch=batch, new=new),
        full_blocks=gpus * full.held(context, batch=batch, new=new),
        budget=None if cache is None or cache.idle else cache.budget(context, batch=batch),
        kept=None if cache is None else gpus * cache.held(context, batch=batch),
        kept_later=None if cache is None else gpus * cache.held(context, batch=batch, new=new),
        prefill=None if cache is None else gpus * cache.peak(context, batch=batch, chunk=load.chunk),
        prefill_whole=None if cache is None else gpus * cache.peak(context, batch=batch),
        prefill_evicting_later=gpus * exact.held(context, batch=batch),
        needed_per_gpu=needed,
        fits=None if free is None else needed <= free,
        requests=None if free is None else _requests(wanted, context, load, free),
        beyond_trained=context + new > (full.architecture.trained or context + new),
    )


def _requests(cache: Cache, context: int, load: Load, free: int) -> int:
    try:
        return requests(cache, context, load, free)
    except PolicyError:  # a budget in bytes that does not hold a request of its own
        return 0


def _fit(cache: Cache, full: FullCache, contexts: tuple[int, ...], load: Load, gpu: GPUPlan) -> Fit:
    def free(count: int) -> int:
        return gpu.memory - gpu.overhead - -(-gpu.weights * gpu.count // count)

    def at(context: int) -> ContextFit:
        possible = tuple(options(cache, context, load, gpu.free)) if served else ()
        return ContextFit(context, gpus_for(full, context, load, free), possible)

    served = unserved(full.architecture) is None
    return Fit(longest_context(cache, load, gpu.free), longest_context(full, load, gpu.free), tuple(map(at, contexts)))
