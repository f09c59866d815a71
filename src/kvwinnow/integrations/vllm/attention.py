"""What every attention back end gets in addition: shifted block tables, and the cuts after attention.

vLLM numbers a request's slots by its tokens. Once slots [0, gone) are given back, attention must start at slot
``gone``: the block table is shifted by whole blocks and the length is shortened by as much. Where new tokens are
written (slot mapping) and their positions stay as they are.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvwinnow.errors import UnsupportedSetupError
from kvwinnow.integrations.vllm import runner
from kvwinnow.integrations.vllm.compaction import Compactor
from kvwinnow.integrations.vllm.paged import Paged
from kvwinnow.integrations.vllm.paged_dense import PagedDense
from kvwinnow.integrations.vllm.plan import Cut, Terms, cuts, observes, plan
from kvwinnow.integrations.vllm.settings import Settings, read_settings, terms_of
from kvwinnow.ops import Variant
from kvwinnow.policies import Phase
from kvwinnow.statistics import Kind

_NOT_SERVED = {
    "alibi_slopes": "ALiBi, whose biases go by positions in the cache",
    "sinks": "sinks in the softmax",
    "kv_sharing_target_layer_name": "layers that read another layer's cache",
}
"""What vLLM's attention layers may be made with, by the attribute that holds it."""


@dataclass(frozen=True)
class Job:
    """What is to be done for one request after a layer's attention.

    Attributes:
        request: its id.
        terms: what was agreed for it.
        start: tokens computed before this step.
        stop: tokens computed after it.
        first: row of its first query in the step.
        gone: slots gone before this step.
        end: slots [gone, end) hold tokens of earlier cuts.
        cuts: what is cut in this step.
        blocks: (blocks,) int64, all of its blocks, those gone included.
    """

    request: str
    terms: Terms
    start: int
    stop: int
    first: int
    gone: int
    end: int
    cuts: tuple[Cut, ...]
    blocks: Tensor

    def rows(self, start: int, stop: int) -> slice:
        """The rows of the step's queries of tokens [start, stop)."""
        return slice(self.first + start - self.start, self.first + stop - self.start)


@dataclass
class Step:
    """All that is to be done after each layer's attention in one step.

    Attributes:
        jobs: one for each request with something to do.
        builder: the metadata builder, which knows how this group of layers attends.
    """

    jobs: list[Job] = field(default_factory=list)
    builder: Any = None


def needs_job(terms: Terms, start: int, stop: int, found: tuple[Cut, ...]) -> bool:
    """Whether a request has anything to do after attention, beside being attended to."""
    policy = terms.policy
    if found or Kind.MASS in policy.running():
        return True
    if start >= terms.prompt:
        return False
    # A chunk that ends inside the observation window keeps its queries; if each chunk may be cut, each has a window.
    window = policy.statistics(Phase.PROMPT).window
    return terms.prefill_budget is not None or (observes(terms) and terms.prompt - window < stop < terms.prompt)


class EvictingBuilder:
    """For metadata builders: reads each row's plan, and shows attention what is left.

    A mixin: the builder itself is the other base class.
    """

    block_size: int
    vllm_config: Any
    # Which slots are cut depends on the step, so vLLM must not use metadata again, or freeze attention in a graph.
    supports_update_block_table = False

    @classmethod
    def get_cudagraph_support(cls, *_: Any, **__: Any) -> Any:
        """None for attention itself; what lies between two attentions may be captured as ever."""
        from vllm.v1.attention.backend import AttentionCGSupport

        return AttentionCGSupport.NEVER

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = read_settings(self.vllm_config.additional_config) or Settings()

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """The back end's metadata of the shifted step, and in it ``kvwinnow``: what is to be done afterwards."""
        step, shifted = self._look(common_attn_metadata)
        metadata = super().build(0, shifted, fast_build)  # type: ignore[misc]
        metadata.kvwinnow = step
        return metadata

    def _look(self, common: Any) -> tuple[Step, Any]:
        step = Step(builder=self)
        rows = runner.rows(common)
        # The bound on the host is exact without speculative decoding, and asking for it does not wait for the device.
        known = getattr(common, "seq_lens_cpu_upper_bound", None)
        lengths = (common.seq_lens if known is None else known).tolist()
        starts = common.query_start_loc_cpu.tolist()
        shifts = [0] * common.num_reqs
        for index, row in enumerate(rows):
            stop = int(lengths[index])
            start = stop - int(starts[index + 1] - starts[index])
            terms = terms_of(row.extra_args, self.settings, row.prompt, self.block_size)
            if terms is None or start == stop:
                continue
            now, found = plan(terms, start), tuple(cuts(terms, start, stop))
            shifts[index] = now.gone
            if needs_job(terms, start, stop, found):
                blocks = common.block_table_tensor[index, : -(-stop // self.block_size)].long()
                step.jobs.append(
                    Job(row.request, terms, start, stop, starts[index], now.gone, now.end, found, blocks.clone())
                )
        return step, shift(common, shifts, self.block_size) if any(shifts) else common


def shift(common: Any, gone: list[int], block: int) -> Any:
    """The step's metadata without the slots that are gone; the original is left as it is."""
    common = copy.copy(common)
    table, lengths = common.block_table_tensor.clone(), common.seq_lens.clone()
    for index, slots in enumerate(gone):
        if slots:
            table[index, : -(slots // block)] = table[index, slots // block :].clone()
            lengths[index] -= slots
    common.block_table_tensor, common.seq_lens = table, lengths
    common._num_computed_tokens_cache = None  # what vLLM keeps once it has derived it from the lengths
    bound = getattr(common, "seq_lens_cpu_upper_bound", None)
    if bound is not None:
        bound = common.seq_lens_cpu_upper_bound = bound[: len(gone)] - torch.tensor(gone, dtype=bound.dtype)
    common.max_seq_len = int((lengths if bound is None else bound).max())  # the bound's does not wait for the device
    return common


class EvictingImpl:
    """For a layer's attention: does the step's jobs when attention is done.

    A mixin: the implementation itself is the other base class. The pool is taken to lie as most back ends have it.

    Raises:
        UnsupportedSetupError: the layer adds something to attention that the cuts know nothing of.
    """

    compactor: Compactor | None = None

    scale: float
    logits_soft_cap: float | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, what in _NOT_SERVED.items():
            if getattr(self, name, None) is not None:
                raise UnsupportedSetupError(
                    f"kvwinnow in vLLM is not tested with {what}, so it is refused; leave kvwinnow out"
                )

    def paged(self, layer: Any, cache: Tensor, step: Step) -> Paged:
        """This layer's part of the pool."""
        return PagedDense(cache, self.variant())

    def variant(self) -> Variant:
        """How this layer attends."""
        return Variant(float(self.scale), self.logits_soft_cap or None)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Attention as the back end computes it, then the cuts."""
        out: Tensor = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)  # type: ignore[misc]
        step: Step | None = getattr(attn_metadata, "kvwinnow", None)
        if step is not None and step.jobs:
            if self.compactor is None:
                self.compactor = Compactor(self.variant())
            paged = self.paged(layer, kv_cache, step)
            with torch.no_grad():
                self.compactor.run(step.jobs, query, out, paged, kv_cache.shape[0])
        return out
