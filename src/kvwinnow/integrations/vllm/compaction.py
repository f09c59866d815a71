"""Cuts in one layer of the paged cache: measure, let the policy choose, gather what stays into the last slots.

What is measured and how the policy is asked is what ``LayerCache`` does; here the slots are vLLM's.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvwinnow.errors import CacheStateError
from kvwinnow.integrations.vllm import metrics, runner
from kvwinnow.integrations.vllm.paged import Paged
from kvwinnow.integrations.vllm.plan import Cut, cuts_while_decoding, observes
from kvwinnow.ops import Variant, causal_sums
from kvwinnow.ops.variant import capped
from kvwinnow.policies import LayerView, Lengths, Phase
from kvwinnow.statistics import Kind

if TYPE_CHECKING:
    from kvwinnow.integrations.vllm.attention import Job


class Compactor:
    """One layer's statistics and cuts.

    Attributes:
        variant: how the layer attends.
        mass: (blocks, Hkv, block size) float32, the attention that the token in each slot has received; None until a
            policy asks for it.
        positions: (blocks, Hkv, block size) int32, which token lies in each slot of those that a cut has written;
            None until the first cut whose outcome is cut again.
        windows: for requests whose prompt is not complete, the last queries (w, Hq, D) and the tokens computed then.
    """

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.mass: Tensor | None = None
        self.positions: Tensor | None = None
        self.windows: dict[str, tuple[Tensor, int]] = {}

    def run(self, jobs: list[Job], query: Tensor, output: Tensor, paged: Paged, blocks: int) -> None:
        """Do all jobs of a step.

        Args:
            jobs: of the step.
            query: (tokens, Hq, D) the step's queries.
            output: (tokens, Hq, D) or (tokens, Hq * D), what attention gave; rows that attended to tokens which a
                cut in the same step takes away are computed anew.
            paged: the layer's part of the pool.
            blocks: blocks of the pool.
        """
        began = time.perf_counter()
        for request in [known for known in self.windows if not runner.is_alive(known)]:
            del self.windows[request]
        decoding = []
        for job in jobs:
            if job.stop - job.start == 1 and job.start >= job.terms.prompt and Kind.MASS in job.terms.policy.running():
                decoding.append(job)
            else:
                _Request(self, job, query, output, paged, blocks).run()
        if decoding:
            self._decode(decoding, query, paged, blocks)
            for job in decoding:
                if job.cuts:
                    _Request(self, job, query, output, paged, blocks).cut(job.cuts[0])
        metrics.add(metrics.SECONDS, time.perf_counter() - began)

    def table(self, kind: Kind, paged_blocks: int, kv_heads: int, block: int, device: torch.device) -> Tensor:
        """The numbers stored beside the slots, allocated when they are first needed."""
        shape = (paged_blocks, kv_heads, block)
        if kind is Kind.MASS:
            if self.mass is None:
                self.mass = torch.zeros(shape, dtype=torch.float32, device=device)
            return self.mass
        if self.positions is None:
            self.positions = torch.zeros(shape, dtype=torch.int32, device=device)
        return self.positions

    def _decode(self, jobs: list[Job], query: Tensor, paged: Paged, blocks: int) -> None:
        """Add the weights of one new query of each request to the mass of what it sees, all requests at once."""
        block, device = jobs[0].terms.block, query.device
        held = [job.stop - job.gone for job in jobs]
        width = -(-max(held) // block)
        table = torch.zeros(len(jobs), width, dtype=torch.long, device=device)
        for index, job in enumerate(jobs):
            own = job.blocks[job.gone // block :]
            table[index, : len(own)] = own
        keys = paged.keys(table.flatten()).float()  # (R * W, Hkv, block, D)
        kv_heads, dim = paged.kv_heads, keys.shape[-1]
        rows = torch.tensor([job.first for job in jobs], device=device)
        q = query[rows].view(len(jobs), kv_heads, -1, dim).float() * self.variant.scale
        # Each block meets its request's query where it lies; only the logits, which are few, are put in a row.
        logits = capped(q.repeat_interleave(width, 0) @ keys.mT, self.variant.softcap)
        logits = logits.view(len(jobs), width, *logits.shape[1:]).permute(0, 2, 3, 1, 4).flatten(3)  # (R, Hkv, G, S)
        lengths = torch.tensor(held, device=device).view(-1, 1, 1, 1)
        places = torch.arange(logits.shape[-1], device=device)
        weights = logits.masked_fill_(places >= lengths, -torch.inf).softmax(-1).mean(2)
        mass = self.table(Kind.MASS, blocks, kv_heads, block, device)
        last = torch.tensor([job.blocks[-1] for job in jobs], device=device)
        mass[last, :, torch.tensor([(job.stop - 1) % block for job in jobs], device=device)] = 0.0
        # Blocks beyond a request's own are block 0, which is nobody's, and get zeros.
        added = weights.view(len(jobs), kv_heads, width, block).transpose(1, 2).flatten(0, 1)
        mass.index_add_(0, table.flatten(), added)


class _Request:
    """One request in one layer and one step."""

    def __init__(self, layer: Compactor, job: Job, query: Tensor, output: Tensor, paged: Paged, blocks: int) -> None:
        self.layer, self.job, self.query, self.output, self.paged, self.pool = layer, job, query, output, paged, blocks
        self.terms, self.policy = job.terms, job.terms.policy
        self.block = job.terms.block
        self.gone, self.end = job.gone, job.end
        self.summing = Kind.MASS in self.policy.running()
        self.wanted = self.policy.statistics(Phase.PROMPT)

    def run(self) -> None:
        """Go through the step's tokens from one cut to the next, as if they had come in as many steps."""
        job, prompt = self.job, self.terms.prompt
        stops = {cut.at: cut for cut in job.cuts}
        points = sorted({*stops, job.stop, *([prompt] if job.start < prompt < job.stop else [])})
        if job.start < prompt:
            self._begin(min(job.stop, prompt))
            if self.terms.prefill_budget is not None:  # a later cut asks which tokens these are
                self._number(job.start, min(job.stop, prompt))
        start = job.start
        for stop in points:
            if self.gone != job.gone:
                self._attend_again(start, stop)
            if self.summing:
                self._sum(start, stop)
            cut = stops.get(stop)
            if cut is not None:
                self.cut(cut)
            start = stop

    def cut(self, cut: Cut) -> None:
        """Let the policy choose, and gather what stays into the slots before ``cut.at``."""
        keys, values = self._read(cut.at)
        kv_heads, count, dim = keys.shape
        keep = cut.at - cut.after
        places = self._slots(cut.before, cut.at)
        positions = self._positions(cut.at, places, kv_heads)
        statistic = self._statistic(cut, keys, places)
        view = LayerView(
            cut.phase,
            positions.unsqueeze(0),
            None if statistic is None else statistic.unsqueeze(0),
            torch.tensor([[[cut.at - 1]]], dtype=torch.int32, device=keys.device),
            self._since(),
            lambda: keys.float().unsqueeze(0),
            lambda: values.float().unsqueeze(0),
        )
        chosen = self.policy.select(view, [Lengths(cut.at, count, cut.budget)], [keep])[0]
        stays = chosen.nonzero()[:, 1].view(kv_heads, keep)
        wide = stays.unsqueeze(-1).expand(-1, -1, dim)
        target = self._slots(cut.after, cut.at)
        self.paged.write(target, keys.gather(1, wide), values.gather(1, wide))
        block, place = target // self.block, target % self.block
        if self.summing:
            mass = self._table(Kind.MASS, kv_heads)
            mass[block, :, place] = self._stored(mass, places).gather(1, stays).T
        if self._cut_again():
            self._table(Kind.NONE, kv_heads)[block, :, place] = positions.gather(1, stays).T
        self.gone, self.end = cut.after, cut.at

    # -- what is measured --------------------------------------------------------------------------

    def _begin(self, stop: int) -> None:
        """Take in the queries of a prompt's chunk up to ``stop``, as far as the observation window may need them."""
        if not observes(self.terms):
            return
        job, width = self.job, self.wanted.window
        new = self.query[job.rows(max(job.start, stop - width), stop)]
        earlier = self.layer.windows.pop(job.request, None)
        if earlier is not None and earlier[1] == job.start and len(new) < width:
            new = torch.cat([earlier[0], new])[-width:]
        # Without cuts between chunks only those are asked for that look at the whole prompt.
        first = max(0, self.terms.prompt - width if self.terms.prefill_budget is None else stop - width)
        if len(new) < stop - first:
            raise CacheStateError(
                f"request {job.request}: {len(new)} of the {stop - first} queries before token {stop} are known, "
                "so its cut would be another one; this is a bug of kvwinnow's"
            )
        self.window = new
        if stop < self.terms.prompt:
            self.layer.windows[job.request] = (new.clone(), stop)

    def _sum(self, start: int, stop: int) -> None:
        """Bring the mass up to date with the queries of tokens [start, stop)."""
        job = self.job
        keys = self._keys(stop)
        mass = self._table(Kind.MASS, keys.shape[0])
        places = self._slots(self.gone, stop)
        block, place = places // self.block, places % self.block
        fresh = self._slots(start, stop)
        mass[fresh // self.block, :, fresh % self.block] = 0.0
        if start < self.terms.prompt and self.wanted.kind is Kind.WINDOW:
            if stop == self.terms.prompt or self.terms.prefill_budget is not None:
                # The sums over the prompt's window stand for all before.
                mass[block, :, place] = causal_sums(self.window, keys, self.layer.variant).T
            return
        rows = job.rows(start, stop)
        sums = self._stored(mass, places) + causal_sums(self.query[rows], keys, self.layer.variant)
        mass[block, :, place] = sums.T

    def _statistic(self, cut: Cut, keys: Tensor, places: Tensor) -> Tensor | None:
        """(Hkv, S) float32, what the policy scores by at this cut."""
        kind = self.policy.statistics(cut.phase).kind
        if kind is Kind.MASS:
            return self._stored(self._table(Kind.MASS, keys.shape[0]), places)
        if kind is not Kind.WINDOW:
            return None
        queries = self.window if cut.phase is Phase.PROMPT else self.query[self.job.rows(cut.at - 1, cut.at)]
        return causal_sums(queries, keys, self.layer.variant)

    def _since(self) -> int:
        """Position of the first query that the mass holds."""
        if self.summing and self.wanted.kind is Kind.WINDOW:
            return max(0, self.terms.prompt - self.wanted.window)
        return 0

    # -- slots -------------------------------------------------------------------------------------

    def _slots(self, start: int, stop: int) -> Tensor:
        """(stop - start,) int64: where the pool has the request's slots [start, stop)."""
        places = torch.arange(start, stop, device=self.query.device)
        return self.job.blocks[places // self.block] * self.block + places % self.block

    def _blocks(self, stop: int) -> Tensor:
        """(blocks,) int64: the blocks of the slots [gone, stop)."""
        return self.job.blocks[self.gone // self.block : -(-stop // self.block)]

    def _read(self, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values (Hkv, S, D) of the slots [gone, stop)."""
        keys, values = self.paged.read(self._blocks(stop))
        return keys[:, : stop - self.gone], values[:, : stop - self.gone]

    def _keys(self, stop: int) -> Tensor:
        """Keys (Hkv, S, D) of the slots [gone, stop)."""
        return self.paged.keys(self._blocks(stop)).transpose(0, 1).flatten(1, 2)[:, : stop - self.gone]

    def _table(self, kind: Kind, kv_heads: int) -> Tensor:
        return self.layer.table(kind, self.pool, kv_heads, self.block, self.query.device)

    def _stored(self, table: Tensor, places: Tensor) -> Tensor:
        """(Hkv, S): what a table holds for the slots."""
        return table[places // self.block, :, places % self.block].T.contiguous()

    def _positions(self, stop: int, places: Tensor, kv_heads: int) -> Tensor:
        """(Hkv, S) int32: which token lies in each of the slots [gone, stop)."""
        index = torch.arange(self.gone, stop, dtype=torch.int32, device=self.query.device)
        positions = index.expand(kv_heads, -1).clone()
        moved = self.end - self.gone
        if moved > 0:
            positions[:, :moved] = self._stored(self._table(Kind.NONE, kv_heads), places[:moved])
        return positions

    def _number(self, start: int, stop: int) -> None:
        """Note that the slots [start, stop) hold the tokens of these positions."""
        places = self._slots(start, stop)
        table = self._table(Kind.NONE, self.paged.kv_heads)
        index = torch.arange(start, stop, dtype=torch.int32, device=table.device)
        table[places // self.block, :, places % self.block] = index.unsqueeze(1).expand(-1, table.shape[1])

    def _cut_again(self) -> bool:
        """Whether what a cut leaves may be cut again, so that it must be known which tokens they are."""
        return self.terms.prefill_budget is not None or cuts_while_decoding(self.terms)

    def _attend_again(self, start: int, stop: int) -> None:
        """Attention of tokens [start, stop) over what the cuts before them in this very step have left."""
        rows = self.job.rows(start, stop)
        self.paged.attend(self.query[rows], self.output[rows], self._blocks(stop), stop - self.gone)
