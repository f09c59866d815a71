"""What requests hold of the pool at every step, and that losing blocks, sharing them and giving them up is harmless."""

from __future__ import annotations

import pytest

from kvwinnow.integrations.vllm.plan import plan
from kvwinnow.integrations.vllm.settings import Settings, terms_of
from tests.vllm.conftest import Reference, TinyEngines
from tests.vllm.engines import BLOCK, Ask, Engine

POLICIES = ("snapkv:budget=96", "h2o:budget=96", "streamingllm:budget=96", "compose:budget=96", None)


@pytest.fixture(scope="module")
def batch(noise: list[int]) -> list[Ask]:
    """Requests of different prompts and policies."""
    return [Ask(noise[i * 400 : i * 400 + 300 + 19 * i], policy) for i, policy in enumerate(POLICIES)]


@pytest.fixture(scope="module")
def alone(tiny_engines: TinyEngines, batch: list[Ask]) -> list[list[int]]:
    """What each request of the batch is answered when it is alone and its prompt one chunk."""
    return [tiny_engines().text(ask) for ask in batch]


def expected_blocks(ask: Ask, before: int, after: int, settings: Settings) -> int:
    """Blocks held when a step that began with ``before`` tokens computed has computed ``after``."""
    terms = terms_of({"kvwinnow": ask.policy}, settings, len(ask.prompt), BLOCK)
    return -(-after // BLOCK) - plan(terms, before).gone // BLOCK


def counters() -> list[float]:
    """What prometheus says: blocks given back, tokens evicted, seconds of compaction."""
    from prometheus_client import REGISTRY

    names = ("blocks_freed", "tokens_evicted", "compaction_seconds")
    return [REGISTRY.get_sample_value(f"kvwinnow_{name}_total") or 0.0 for name in names]


@pytest.mark.smoke
def test_a_long_prompt_s_blocks_are_in_the_pool_while_it_is_answered(
    tiny_engines: TinyEngines, noise: list[int]
) -> None:
    engine = tiny_engines()
    counted = counters()
    (record,) = engine.requests(engine.add(Ask(noise[:1817], "snapkv:budget=256")))
    engine.step()
    assert engine.blocks_held(record) == engine.blocks_out() == 57  # 1,817 tokens
    held = []
    while engine.busy():
        held.append((engine.blocks_held(record), engine.blocks_out()))
        engine.step()
    assert held[1] == (9, 9)  # of 256 tokens and 25 that fill no block, and the first that was generated
    assert held[-1] == (10, 10)  # SnapKV evicts nothing while decoding: 281 tokens and 39 more
    freed, evicted, seconds = (now - before for now, before in zip(counters(), counted, strict=True))
    assert (freed, evicted) == (48, 48 * BLOCK)
    assert seconds > 0


@pytest.mark.parametrize("prefill_budget", [None, 128])
def test_at_every_step_a_request_holds_what_its_plan_says(
    tiny_engines: TinyEngines, batch: list[Ask], prefill_budget: int | None
) -> None:
    settings = Settings(prefill_budget=prefill_budget)
    entry = {} if prefill_budget is None else {"prefill_budget": prefill_budget}
    engine = tiny_engines(additional_config={"kvwinnow": entry}, max_num_batched_tokens=100)
    records = {engine.requests(engine.add(ask))[0]: ask for ask in batch}
    seen = 0
    while engine.busy():
        before = {record: record.num_computed_tokens for record in records}
        engine.step()
        total = 0
        for record, ask in records.items():
            held, after = engine.blocks_held(record), record.num_computed_tokens
            if after > before[record] and not record.is_finished():
                assert held == expected_blocks(ask, before[record], after, settings), (ask.policy, after)
                seen += 1
            total += held
        assert engine.blocks_out() == total
    assert seen > 5 * 39


# -- preemption ------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("chunk", [None, 90])
def test_requests_that_lost_their_blocks_go_on_as_if_they_had_not(
    tiny_engines: TinyEngines, batch: list[Ask], alone: list[list[int]], chunk: int | None
) -> None:
    engine = tiny_engines(**({} if chunk is None else {"max_num_batched_tokens": chunk}))
    steps = 0

    def take_all_blocks() -> None:
        nonlocal steps
        steps += 1
        if steps % 9 == 4 and engine.busy():  # amid a prompt's chunks, and while tokens are generated
            engine.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)

    answers = engine.run(batch, take_all_blocks)
    assert all(answer.preemptions >= 2 for answer in answers)
    assert [answer.texts[0] for answer in answers] == alone


# -- aborts ----------------------------------------------------------------------------------------


def test_a_request_that_is_given_up_takes_nothing_with_it(
    tiny_engines: TinyEngines, batch: list[Ask], alone: list[list[int]]
) -> None:
    engine = tiny_engines(max_num_batched_tokens=90)
    for steps in (2, 4, 5, 20, 50):  # within the first prompt, at its end, within a later one, while decoding
        names = [engine.add(ask) for ask in batch]
        for _ in range(steps):
            engine.step()
        for name in names:
            engine.abort(name)
        assert not engine.busy()
        assert engine.blocks_out() == 0
    assert engine.texts(batch) == alone


def test_others_go_on_when_a_request_is_given_up(
    tiny_engines: TinyEngines, batch: list[Ask], alone: list[list[int]]
) -> None:
    engine = tiny_engines(max_num_batched_tokens=90)
    names = [engine.add(ask) for ask in (batch[1], batch[0], batch[3], batch[0])]
    for victim, steps in ((3, 3), (0, 20)):
        for _ in range(steps):
            engine.step()
        engine.abort(names[victim])
    while engine.busy():
        engine.step()
    assert [engine.answer(names[i]).texts[0] for i in (1, 2)] == [alone[0], alone[3]]


def test_a_pool_that_is_too_small_for_all_takes_blocks_from_some(
    tiny_engines: TinyEngines, noise: list[int], tiny_cache: Reference
) -> None:
    """All three are admitted, 10 blocks and what is left of 10 and of 6, and then have no room to grow."""
    asks = [
        Ask(noise[:300]),
        Ask(noise[400:700], "snapkv:budget=96"),
        Ask(noise[800:980], "snapkv:budget=96"),
    ]
    answers = tiny_engines(num_gpu_blocks_override=21, max_model_len=448).run(asks)
    assert answers[2].preemptions > 0
    expected = [tiny_cache(ask.prompt, ask.policy or "full") for ask in asks]
    assert [answer.texts[0] for answer in answers] == expected


# -- prefix caching --------------------------------------------------------------------------------


def cached(engine: Engine, asks: list[Ask]) -> list[tuple[list[int], int]]:
    """Each request's tokens, and how many of its prompt came from the prefix cache, one request after another."""
    answers = [engine.run([ask])[0] for ask in asks]
    return [(answer.texts[0], answer.cached) for answer in answers]


@pytest.fixture
def sharing(tiny_engines: TinyEngines) -> Engine:
    """An engine whose prefix cache is on, and empty."""
    engine = tiny_engines(enable_prefix_caching=True)
    assert engine.llm.llm_engine.reset_prefix_cache()
    return engine


KEPT = {None: 288, "snapkv:budget=96": 192, "h2o:budget=96": 0, "streamingllm:budget=96": 192, "compose:budget=96": 0}
"""Tokens of a cached prompt of 300 that may be read: all whole blocks but the last token's; those before the blocks
that a cut writes to, 32 * floor((300 - 96) / 32); none where attention is summed up beside the slots."""


@pytest.mark.smoke
@pytest.mark.parametrize("first", ["none", "snapkv", "h2o"])
def test_requests_share_a_prefix_as_far_as_no_cut_is_changed_by_it(
    sharing: Engine, noise: list[int], tiny_cache: Reference, first: str
) -> None:
    prompt = noise[:300]
    order = {
        "none": [None, "snapkv:budget=96", "h2o:budget=96", None, "snapkv:budget=96", "compose:budget=96"],
        "snapkv": ["snapkv:budget=96", None, "snapkv:budget=96", "streamingllm:budget=96", "h2o:budget=96", None],
        "h2o": ["h2o:budget=96", "h2o:budget=96", None, "h2o:budget=96", None, "snapkv:budget=96"],
    }[first]
    found = cached(sharing, [Ask(prompt, policy) for policy in order])
    assert [text for text, _ in found] == [tiny_cache(prompt, policy or "full") for policy in order]
    offered, hits = 0, []
    for policy in order:
        hits.append(min(offered, KEPT[policy]))
        # Each leaves what no cut of its own writes to, which is what it may read itself, or the blocks before its cut.
        offered = max(offered, 288 if policy is None else 192)
    assert [count for _, count in found] == hits


def test_requests_that_share_a_prefix_at_once(sharing: Engine, noise: list[int], tiny_cache: Reference) -> None:
    prompt = noise[:300]
    policies = ["snapkv:budget=96", None, "h2o:budget=96", "snapkv:budget=96", "streamingllm:budget=96", None]
    expected = [tiny_cache(prompt, policy or "full") for policy in policies]
    warm = sharing.text(Ask(prompt))
    assert warm == expected[1]
    answers = sharing.run([Ask(prompt, policy) for policy in policies])
    assert [answer.texts[0] for answer in answers] == expected
    assert [answer.cached for answer in answers] == [KEPT[policy] for policy in policies]


def test_a_short_prompt_found_in_part_may_end_in_several_chunks(
    tiny_engines: TinyEngines, noise: list[int], tiny_cache: Reference
) -> None:
    """A prompt that SnapKV leaves whole: its window's first queries came from the cache, and nobody asks for them."""
    engine = tiny_engines(enable_prefix_caching=True, max_num_batched_tokens=256)
    assert engine.llm.llm_engine.reset_prefix_cache()
    short = Ask(noise[:95], "snapkv:budget=64", tokens=8)
    other = Ask(noise[1000:1240], tokens=8)
    expected = [tiny_cache(other.prompt, "full", tokens=8), tiny_cache(short.prompt, short.policy, tokens=8)]
    assert engine.text(short) == expected[1]
    assert engine.texts([other, short]) == expected


def test_sums_of_attention_are_nobody_else_s(sharing: Engine, noise: list[int], tiny_cache: Reference) -> None:
    """Two requests that begin alike, are left whole at first, and sum up attention while they are decoded."""
    policy, tokens = "compose:budget=128", 200
    prompts = [noise[:120], [*noise[:40], *noise[600:660]]]
    asks = [Ask(prompt, policy, tokens=tokens) for prompt in prompts]
    assert sharing.texts(asks) == [tiny_cache(prompt, policy, tokens=tokens) for prompt in prompts]


def test_a_second_turn_reads_what_the_first_left(sharing: Engine, noise: list[int], tiny_cache: Reference) -> None:
    first = noise[:300]
    text = sharing.text(Ask(first, "snapkv:budget=96"))
    second = [*first, *text, *noise[1000:1100]]
    for policy, least in (("snapkv:budget=96", 192), ("none", 320), ("snapkv:budget=96", 320)):
        (answer,) = sharing.run([Ask(second, policy)])
        expected = tiny_cache(second, "full" if policy == "none" else policy)
        assert (answer.texts[0], answer.cached) == (expected, least)


def test_a_prompt_that_grows_stays_uncompressed(tiny_engines: TinyEngines, noise: list[int]) -> None:
    """A session whose input comes as a stream: no cut could be taken back when the prompt turns out longer."""
    engine = tiny_engines()
    found = [engine.session([noise[:200], noise[300:400]], policy) for policy in (None, "snapkv:budget=64")]
    assert found[0] == found[1]
    assert len(found[0]) == 2


# -- prompts longer than the pool ------------------------------------------------------------------


def test_a_prompt_of_four_pools_is_answered(tiny_engines: TinyEngines, noise: list[int], tiny_cache: Reference) -> None:
    """Its chunks are cut as the transformers cache cuts the same chunks of a declared prompt."""
    entry = {"policy": "snapkv:budget=128", "prefill_budget": 128}
    engine = tiny_engines(
        additional_config={"kvwinnow": entry},
        num_gpu_blocks_override=16,
        max_num_batched_tokens=128,
        max_num_seqs=4,
        max_model_len=4096,
    )
    capacity = (engine.pool.num_gpu_blocks - 1) * BLOCK
    prompt = noise[: 4 * capacity + 11]
    assert capacity == 480
    for policy in ("snapkv:budget=128", "h2o:budget=128", "streamingllm:budget=128"):
        expected = tiny_cache(prompt, policy, chunk=128)
        assert engine.text(Ask(prompt, policy)) == expected, policy
    # Several at once share the tokens of a step, so that their chunks end elsewhere and other tokens stay.
    answers = engine.run([Ask(prompt[i:], policy) for i, policy in enumerate(("snapkv:budget=128", "h2o:budget=96"))])
    assert [len(answer.texts[0]) for answer in answers] == [40, 40]
