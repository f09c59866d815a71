"""The worker's side against the oracle, on a pool of plain tensors: all of the plugin that lies between vLLM's calls.

Requests come and go in random steps: chunks of prompts, batches, preemptions after which a request begins anew, blocks
that are given back and filled by others at once. What attention gives, which tokens each KV head keeps and the mass
beside them are the oracle's, which knows of no pool.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from kvwinnow.integrations.vllm import runner
from kvwinnow.integrations.vllm.attention import EvictingBuilder, EvictingImpl, Step
from kvwinnow.integrations.vllm.plan import Terms, plan
from kvwinnow.integrations.vllm.settings import Settings, terms_of
from kvwinnow.ops import Variant
from kvwinnow.statistics import Kind
from tests.oracle import Row, masked_attention
from tests.streams import LEAST, Method, methods, search

TOLERANCE = 1e-5
PLAIN = ("slidingwindow", "streamingllm", "h2o", "hybrid", "snapkv", "tova", "keydiff")
DIM = 8


class Pool:
    """A ``Paged`` of (blocks, block, Hkv, D)."""

    def __init__(self, keys: Tensor, values: Tensor, variant: Variant) -> None:
        self.held, self.variant, self.kv_heads = (keys, values), variant, keys.shape[2]

    def keys(self, blocks: Tensor) -> Tensor:
        return self.held[0][blocks].transpose(1, 2)

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(part[blocks].flatten(0, 1).transpose(0, 1) for part in self.held)  # type: ignore[return-value]

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        for part, new in zip(self.held, (keys, values), strict=True):
            part.flatten(0, 1)[slots] = new.transpose(0, 1)

    def attend(self, query: Tensor, output: Tensor, blocks: Tensor, length: int) -> None:
        keys, values = (part[:, :length] for part in self.read(blocks))
        n, places = len(query), torch.arange(length)
        visible = (places <= places[length - n :].unsqueeze(1)).expand(len(keys), -1, -1)
        variant = self.variant
        out, _ = masked_attention(query.transpose(0, 1), keys, values, visible, variant.scale, variant.softcap)
        output.copy_(out.transpose(0, 1))


class PlainBuilder:
    """Stands where vLLM's metadata builder does."""

    def __init__(self, block_size: int, vllm_config: Any) -> None:
        self.block_size, self.vllm_config = block_size, vllm_config

    def build(self, common_prefix_len: int, common: Any, fast_build: bool) -> Any:
        return SimpleNamespace(common=common)


class PlainImpl:
    """Stands where vLLM's attention does: over the blocks and lengths that it is shown, request by request."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.scale, self.logits_soft_cap = pool.variant.scale, pool.variant.softcap

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, metadata: Any, output: Tensor
    ) -> Tensor:
        common = metadata.common
        starts = common.query_start_loc_cpu.tolist()
        self.pool.write(common.slots, key.transpose(0, 1), value.transpose(0, 1))
        for i in range(common.num_reqs):
            rows, length = slice(starts[i], starts[i + 1]), int(common.seq_lens[i])
            blocks = common.block_table_tensor[i, : -(-length // self.pool.held[0].shape[1])]
            self.pool.attend(query[rows], output[rows], blocks.long(), length)
        return output


class Builder(EvictingBuilder, PlainBuilder):
    pass


class Impl(EvictingImpl, PlainImpl):
    def paged(self, layer: Any, cache: Tensor, step: Step) -> Pool:
        return self.pool


@dataclass
class Request:
    """One request with all tokens it will ever have, q (Hq, N, D), k and v (Hkv, N, D), and its oracle."""

    name: str
    text: str
    method: Method
    terms: Terms | None
    prompt: int
    q: Tensor
    k: Tensor
    v: Tensor
    variant: Variant
    block: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    known: int = 0

    def __post_init__(self) -> None:
        self.known = self.prompt
        self.out = torch.zeros_like(self.q)
        self.begin()

    def begin(self) -> None:
        """From the start, as after a preemption."""
        self.computed = 0
        rule = dataclasses.replace(self.method.rule(), multiple_of=self.block)
        variant = self.variant
        self.row = Row(rule, len(self.q), len(self.k), DIM, variant.scale, variant.softcap)

    def check_outputs(self, start: int, stop: int, *, prompt: bool, budget: int | None) -> bool:
        """Step the oracle and compare; whether it is sure of what it keeps."""
        piece = (x[:, start:stop] for x in (self.q, self.k, self.v))
        expected = self.row.step(*piece, prompt=prompt, budget=budget)
        torch.testing.assert_close(self.out[:, start:stop].double(), expected, atol=TOLERANCE, rtol=0)
        return not any(self.row.near)

    def follow(self, start: int, stop: int) -> bool:
        """Let the oracle take the tokens of a step; whether it was sure of all it kept."""
        sure, terms = True, self.terms
        budget = None if terms is None else terms.budget
        if start < self.prompt:
            end, between = min(stop, self.prompt), None if terms is None else terms.prefill_budget
            if between is not None:
                sure &= self.check_outputs(start, end, prompt=True, budget=budget if end == self.prompt else between)
            elif end == self.prompt:  # the chunks before it cut nothing
                sure &= self.check_outputs(0, end, prompt=True, budget=budget)
        for token in range(max(start, self.prompt), stop):
            sure &= self.check_outputs(token, token + 1, prompt=False, budget=budget)
        return sure


@dataclass(frozen=True)
class Case:
    """Requests (method, budget, tokens of the prompt, tokens in all) of one model in one pool."""

    kv_heads: int
    group: int
    block: int
    prefill_budget: int | None
    softcap: float | None
    requests: tuple[tuple[Method, int, int, int], ...]
    chunk: int
    seed: int


@st.composite
def asked(draw: st.DrawFn, name: str) -> tuple[Method, int, int, int]:
    if name == "compose":
        names = {"prompt": (*PLAIN, "full"), "decode": PLAIN}
        pair = {role: draw(methods(draw(st.sampled_from(those)))) for role, those in names.items()}
        if pair["decode"].name == "snapkv":
            pair["decode"] = draw(methods("h2o"))
        method = Method("compose", pair)
    else:
        method = draw(methods(name))
    budget = LEAST[method.name](method.params) + draw(st.integers(0, 4))
    prompt = draw(st.integers(4, 24))
    return method, budget, prompt, prompt + draw(st.integers(1, 16))


@st.composite
def cases(draw: st.DrawFn, name: str) -> Case:
    others = draw(st.lists(st.sampled_from((*PLAIN, "compose")), max_size=1))
    requests = tuple(draw(asked(each)) for each in (name, *others))
    largest = max(budget for _, budget, _, _ in requests)
    return Case(
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 3, 4])),
        block=draw(st.integers(1, 6)),
        prefill_budget=largest + draw(st.integers(0, 6)) if draw(st.booleans()) else None,
        softcap=draw(st.sampled_from([None, None, 3.0])),
        requests=requests,
        chunk=draw(st.sampled_from([2, 5, 9, 16, 40])),
        seed=draw(st.integers(0, 2**31)),
    )


class Server:
    """Schedules requests at random, and gives blocks back as the plan says."""

    def __init__(self, case: Case, tally: Counter[str]) -> None:
        self.case, self.tally, self.random = case, tally, random.Random(case.seed)
        self.generator = torch.Generator().manual_seed(case.seed)
        variant = Variant(DIM**-0.5, case.softcap)
        settings = Settings("none", case.prefill_budget)
        self.requests = []
        for index, (method, budget, prompt, total) in enumerate(case.requests):
            text = str(method.policy(budget))
            terms = terms_of({"kvwinnow": text}, settings, prompt, case.block)
            q, k, v = (
                torch.randn(heads, total, DIM, generator=self.generator)
                for heads in (case.kv_heads * case.group, case.kv_heads, case.kv_heads)
            )
            self.requests.append(Request(f"r{index}", text, method, terms, prompt, 2 * q, k, v, variant, case.block))
        count = 1 + sum(-(-total // case.block) for *_, total in case.requests)
        shape = (count, case.block, case.kv_heads, DIM)
        self.pool = Pool(torch.full(shape, 1e4), torch.full(shape, 1e4), variant)
        self.free = list(range(1, count))  # block 0 is nobody's
        config = SimpleNamespace(additional_config={"kvwinnow": {"prefill_budget": case.prefill_budget}})
        self.builder, self.impl = Builder(case.block, config), Impl(self.pool)

    def run(self) -> None:
        """Until every request has all its tokens."""
        while waiting := [r for r in self.requests if r.computed < r.q.shape[1]]:
            if self.random.random() < 0.15:
                lost = self.random.choice(waiting)
                self.give_back(lost, len(lost.blocks))
                lost.blocks = []
                lost.begin()
                self.tally["preemptions"] += 1
            self.step([r for r in waiting if self.random.random() < 0.7])

    def give_back(self, request: Request, count: int) -> None:
        """The first ``count`` blocks, whose contents are nobody's from now on."""
        for index in range(count):
            block = request.blocks[index]
            if block:
                self.pool.held[0][block] = self.pool.held[1][block] = 1e4
                self.free.append(block)
                request.blocks[index] = 0

    def step(self, chosen: list[Request]) -> None:
        """One step: what vLLM does, in the order in which it does it."""
        if not chosen:
            return
        self.random.shuffle(chosen)
        sizes = [min(self.random.randint(1, self.case.chunk), max(1, r.known - r.computed)) for r in chosen]
        for request, size in zip(chosen, sizes, strict=True):
            self.give_back(request, plan(request.terms, request.computed).gone // self.case.block)
            self.random.shuffle(self.free)
            while len(request.blocks) * self.case.block < request.computed + size:
                request.blocks.append(self.free.pop())
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + size)
        width = max(len(request.blocks) for request in chosen)
        common = SimpleNamespace(
            num_reqs=len(chosen),
            query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([r.computed + n for r, n in zip(chosen, sizes, strict=True)], dtype=torch.int32),
            block_table_tensor=torch.tensor(
                [r.blocks + [0] * (width - len(r.blocks)) for r in chosen], dtype=torch.int32
            ),
            slots=torch.tensor(
                [
                    r.blocks[t // self.case.block] * self.case.block + t % self.case.block
                    for r, n in zip(chosen, sizes, strict=True)
                    for t in range(r.computed, r.computed + n)
                ]
            ),
        )
        runner._rows = runner.RowsV1(SimpleNamespace(input_batch=SimpleNamespace(req_ids=[r.name for r in chosen])))
        scheduled = SimpleNamespace(
            finished_req_ids=set(),
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=r.name,
                    prompt_token_ids=range(r.prompt),
                    sampling_params=SimpleNamespace(extra_args={"kvwinnow": r.text}),
                )
                for r in chosen
                if r.computed == 0
            ],
        )
        with runner.step(scheduled):
            metadata = self.builder.build(0, common)
        query, key, value = (
            torch.cat([x[:, r.computed : r.computed + n] for r, n, x in zip(chosen, sizes, parts, strict=True)], 1)
            .transpose(0, 1)
            .contiguous()
            for parts in ([r.q for r in chosen], [r.k for r in chosen], [r.v for r in chosen])
        )
        output = torch.zeros_like(query)
        self.impl.forward(None, query, key, value, self.pool.held[0], metadata, output)
        for request, size, first in zip(chosen, sizes, starts, strict=False):
            begin, request.computed = request.computed, request.computed + size
            request.known = max(request.known, request.computed)
            request.out[:, begin : request.computed] = output[first : first + size].transpose(0, 1)
            self.compare(request, begin)

    def compare(self, request: Request, start: int) -> None:
        """What the request's KV heads hold after a step, and the mass of it."""
        sure = request.follow(start, request.computed)
        if not sure:  # float32 may have chosen otherwise: nothing can be said about what comes after
            self.tally["near"] += 1
            self.give_back(request, len(request.blocks))
            self.requests.remove(request)
            return
        self.tally["cuts"] += request.row.cuts
        request.row.cuts = 0
        if request.computed < request.prompt and self.case.prefill_budget is None:
            return
        mass = self.impl.compactor.mass if self.impl.compactor else None
        slots = range(plan(request.terms, request.computed).gone, request.computed)
        for head in range(self.case.kv_heads):
            token_of = {tuple(key): token for token, key in enumerate(request.k[head].tolist())}
            tokens = []
            for slot in slots:
                block, place = request.blocks[slot // self.case.block], slot % self.case.block
                token = token_of[tuple(self.pool.held[0][block, place, head].tolist())]
                assert torch.equal(self.pool.held[1][block, place, head], request.v[head, token])
                tokens.append(token)
                if request.terms is not None and Kind.MASS in request.terms.policy.running():
                    assert mass is not None
                    expected = float(request.row.mass[head, token])
                    assert float(mass[block, head, place]) == pytest.approx(expected, rel=1e-4, abs=1e-5)
                    self.tally["masses"] += 1
            assert tokens == sorted(request.row.held[head])


@pytest.fixture(autouse=True)
def no_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runner a test remembers is forgotten after it."""
    monkeypatch.setattr(runner, "_rows", None)
    monkeypatch.setattr(runner, "_requests", {})


@pytest.mark.parametrize("decode", ["h2o", "streamingllm", "tova"])
def test_a_prompt_that_is_left_whole_is_cut_again_and_again_while_decoding(decode: str) -> None:
    """Of what the first cut leaves, a later one must know which tokens they are."""
    params = {"h2o": {"sinks": 0, "recent": None}, "streamingllm": {"sinks": 1}, "tova": {"sinks": 0, "recent": 0}}
    method = Method("compose", {"prompt": Method("full"), "decode": Method(decode, params[decode])})
    tally: Counter[str] = Counter()
    for seed in range(4):
        Server(Case(2, 3, 3, None, None, ((method, 6, 20, 40),), 9, seed), tally).run()
    assert tally["cuts"] > 4 * 5, tally


@pytest.mark.parametrize("name", [*PLAIN, "compose"])
def test_outputs_kept_tokens_and_mass_are_those_of_the_oracle(name: str) -> None:
    tally: Counter[str] = Counter()
    search(cases(name), lambda case: Server(case, tally).run(), examples=16)
    assert tally["near"] <= max(1, 0.002 * tally["cuts"]), tally
    assert tally["cuts"] > 20, tally
    assert tally["preemptions"] > 1, tally
    assert name not in ("h2o", "hybrid") or tally["masses"] > 100, tally
