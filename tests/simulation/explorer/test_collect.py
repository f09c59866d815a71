"""What the explorer collects is what the cache did, at every step and in every family of models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from kvwinnow import CompressedCache, parse
from kvwinnow.errors import KvwinnowError
from kvwinnow.evaluation.generation import greedy
from kvwinnow.simulation.explorer.collect import explore, label
from kvwinnow.simulation.explorer.exploration import NEVER, Exploration, Run
from kvwinnow.simulation.explorer.watch import Watch
from tests.cli.conftest import byte_tokenizer
from tests.models import WINDOW, shown, tiny_model, tiny_tokens
from tests.running import FULL_WIDTH, IN_BLOCKS, held

PROMPT, NEW = 60, 6
FAMILIES = ("llama", "gemma3", "gpt2", "falcon, new", "gpt_oss", "qwen2_5_vl")


class Plain:
    """A tokenizer as far as answers need one, for models whose tokens mean nothing."""

    eos_token_id = None

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [7]}

    def decode(self, ids: list[int], **options: Any) -> str:
        return " ".join(f"t{token}" for token in ids)


def kept_by(run: Run, step: int) -> list[list[list[int]]]:
    """The positions that each head of each layer holds after a step, by what was collected."""
    return [[np.flatnonzero(head).tolist() for head in layer] for layer in run.kept(step)]


def kept_really(model: PreTrainedModel, policy: str, ids: torch.Tensor) -> list[list[list[list[int]]]]:
    """The same for all steps, as a cache that nobody looks on tells."""
    cache, steps = CompressedCache(model, policy), []
    for _ in greedy(model, Plain(), cache, ids, max_new_tokens=NEW):
        heads = range(cache.structure.kv_heads)
        steps.append([[held(cache, layer, head=head) for head in heads] for layer in range(len(cache))])
    return steps


def explored(model: PreTrainedModel, policy: str, **options: Any) -> Exploration:
    ids, _ = tiny_tokens(PROMPT)
    return explore(model, Plain(), ids, [parse(policy)], name="tiny", new_tokens=NEW, **options)


@pytest.mark.filterwarnings("ignore:all layers of this model see")
@pytest.mark.parametrize("policy", [*FULL_WIDTH.values(), *IN_BLOCKS.values()], ids=[*FULL_WIDTH, *IN_BLOCKS])
def test_every_policy_keeps_what_the_cache_holds_at_every_step(policy: str) -> None:
    model = tiny_model(layers=3)
    run = explored(model, policy).runs[-1]
    assert [kept_by(run, step) for step in range(NEW)] == kept_really(model, policy, tiny_tokens(PROMPT)[0])


@pytest.mark.parametrize("kind", FAMILIES, ids=map(shown, FAMILIES))
@pytest.mark.parametrize("policy", ["h2o:budget=24,evict_every=3", "pyramidkv:budget=30,window=8,kernel=3"])
def test_every_family_keeps_what_the_cache_holds_at_every_step(kind: str, policy: str) -> None:
    model = tiny_model(kind, layers=4)
    made = explored(model, policy)
    assert [kept_by(made.runs[-1], step) for step in range(NEW)] == kept_really(model, policy, tiny_tokens(PROMPT)[0])
    assert made.sliding == CompressedCache(model, policy).structure.sliding


def test_looking_on_changes_nothing() -> None:
    model = tiny_model()
    ids, _ = tiny_tokens(PROMPT)
    alone = CompressedCache(model, "h2o:budget=24")
    bytes_alone = []
    answer = []
    for token in greedy(model, Plain(), alone, ids, max_new_tokens=NEW):
        answer.append(token)
        bytes_alone.append(alone.nbytes())
    run = explored(model, "h2o:budget=24").runs[-1]
    assert "".join(run.answer) == " ".join(f"t{token}" for token in answer)
    assert len(run.answer) == NEW
    assert run.nbytes.tolist() == bytes_alone
    assert run.text == " ".join(f"t{token}" for token in answer)


def test_steps_scores_and_budgets_of_a_policy_that_can_be_told_by_hand() -> None:
    made = explored(tiny_model(layers=2), "streamingllm:budget=24")
    full, run = made.runs
    # The prompt's tokens 0 to 59: 4 sinks and the last 20 stay. Each step k takes in token 59 + k and loses 39 + k.
    expected = [NEVER] * 4 + [0] * 36 + [1, 2, 3, 4, 5] + [NEVER] * (PROMPT - 45) + [NEVER] * (NEW - 1)
    assert (run.evicted == expected).all()
    assert run.budgets == (24, 24)
    # The score is the distance from the newest token, 59 at the prompt's end.
    assert np.isposinf(run.scores[:, :, :4]).all()
    assert (run.scores[:, :, 4:40] == np.arange(4, 40) - 59).all()
    assert (run.scores[:, :, 40:45] == 40 - 60).all()
    assert (run.scores[:, :, 45:] == np.arange(45, 65) - 64).all()
    assert full.policy == "full"
    assert full.budgets == (None, None)
    assert (full.evicted == NEVER).all()
    assert np.isnan(full.scores).all()


@pytest.mark.parametrize("policy", [p for n, p in FULL_WIDTH.items() if n not in ("full", "snapkv-avg", "h2o-bare")])
def test_no_token_was_lost_that_scored_above_one_that_stayed(policy: str) -> None:
    run = explored(tiny_model(), policy).runs[-1]
    prompt = slice(0, PROMPT)
    lost = run.evicted[:, :, prompt] == 0
    assert (lost.sum(-1) == PROMPT - 24).all()
    assert np.isfinite(run.scores[:, :, prompt][lost]).all()
    # Scores of tokens that stayed are those of the prompt's cut only where nothing was scored later.
    if policy.startswith(("snapkv", "expected")):
        highest_lost = np.where(lost, run.scores[:, :, prompt], -np.inf).max(-1)
        lowest_kept = np.where(lost, np.inf, run.scores[:, :, prompt]).min(-1)
        assert (highest_lost <= lowest_kept).all()
        assert (np.isposinf(run.scores[:, :, prompt]) == [i < 4 or i >= 52 for i in range(PROMPT)]).all() or (
            "expected" in policy
        )


FORETOLD = {
    **FULL_WIDTH,
    "pyramid": "pyramidkv:budget=30,window=8,kernel=3",
    "share": "h2o:budget=0.25",
    "bytes": "tova:budget=24KiB",
    **IN_BLOCKS,
}


@pytest.mark.filterwarnings("ignore:all layers of this model see")
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("policy", FORETOLD.values(), ids=FORETOLD)
def test_what_is_foretold_of_prompts_is_what_caches_take(kind: str, policy: str) -> None:
    model, (ids, _) = tiny_model(kind, layers=4), tiny_tokens(PROMPT)
    run = explored(model, policy).runs[-1]
    told = dict(run.foretold)
    assert sorted(told) == list(told)
    assert (min(told), max(told)) == (1, PROMPT)
    assert told[PROMPT] == run.nbytes[0]
    for length in list(told)[::9]:
        cache = CompressedCache(model, policy)
        next(greedy(model, Plain(), cache, ids[:, :length], max_new_tokens=1))
        assert cache.nbytes() == told[length], length


def test_sliding_layers_keep_their_own_window() -> None:
    made = explored(tiny_model("gemma3", layers=4), "streamingllm:budget=24")
    assert made.sliding == (WINDOW, None, WINDOW, None)
    run = made.runs[-1]
    assert run.budgets == (WINDOW - 1, 24, WINDOW - 1, 24)
    assert kept_by(run, 0)[0] == [list(range(PROMPT - WINDOW + 1, PROMPT))] * 2


def test_a_prompt_within_the_budget_loses_nothing_and_is_not_scored() -> None:
    run = explored(tiny_model(), "snapkv:budget=100,window=8").runs[-1]
    assert (run.evicted == NEVER).all()
    assert np.isnan(run.scores).all()


def test_prompts_in_chunks_are_cut_at_step_0() -> None:
    model = tiny_model()
    ids, _ = tiny_tokens(PROMPT)
    cache = CompressedCache(model, "h2o:budget=24")
    watch = Watch(cache, tokens=PROMPT)
    next(greedy(model, Plain(), cache, ids, max_new_tokens=1, prefill_chunk=7))
    evicted = watch.evicted(PROMPT)
    assert set(np.unique(evicted)) == {0, NEVER}
    assert np.flatnonzero(evicted[1, 1] == NEVER).tolist() == held(cache, 1, head=1)


def test_an_exploration_in_chunks_keeps_what_such_a_cache_holds() -> None:
    model, (ids, _) = tiny_model(), tiny_tokens(PROMPT)
    run = explored(model, "h2o:budget=24", prefill_chunk=7).runs[-1]
    cache = CompressedCache(model, "h2o:budget=24")
    for step, _ in enumerate(greedy(model, Plain(), cache, ids, max_new_tokens=NEW, prefill_chunk=7)):
        assert kept_by(run, step) == [[held(cache, layer, head=head) for head in range(2)] for layer in range(2)]
        assert run.nbytes[step] == cache.nbytes()


def test_an_answer_ends_with_its_end_token() -> None:
    model = tiny_model(vocab_size=257)
    tokenizer = byte_tokenizer()
    ids = torch.tensor([tokenizer("We met. " * 5).input_ids])
    long = explore(model, tokenizer, ids, [], name="tiny", new_tokens=NEW).runs[0]
    ending = next(i for i, token in enumerate(long.answer) if i and token not in long.answer[:i])
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(tokenizer(long.answer[ending]).input_ids[0])
    short = explore(model, tokenizer, ids, [], name="tiny", new_tokens=NEW).runs[0]
    assert short.answer == long.answer[: ending + 1]
    assert short.steps == ending
    assert short.evicted.shape == (2, 2, ids.shape[1] + ending)


@pytest.mark.parametrize(
    ("policy", "short"),
    [
        ("full", "full"),
        ("snapkv:budget=0.125", "snapkv:budget=0.125"),
        ("h2o:sinks=4,budget=64", "h2o:budget=64,sinks=4"),
        ("snapkv:budget=8,window=4,sinks=0", "snapkv:budget=8,window=4,sinks=0"),
        ("compose:budget=64", "compose:budget=64"),
        ("blocks:policy=knorm(budget=64)", "blocks:policy=knorm(budget=64,evict_every=1,sinks=0,recent=0)"),
        ("compose:budget=64,decode=tova", "compose:budget=64,decode=tova(evict_every=1,sinks=0,recent=1)"),
    ],
)
def test_labels_tell_what_differs_from_the_defaults(policy: str, short: str) -> None:
    assert label(parse(policy)) == short


def test_numbers_and_policies_that_cannot_be_are_refused() -> None:
    model, (ids, _) = tiny_model(), tiny_tokens(PROMPT)
    for new in (0, 4097):
        with pytest.raises(KvwinnowError, match=f"answer of {new} tokens"):
            explore(model, Plain(), ids, [], name="tiny", new_tokens=new)
    with pytest.raises(KvwinnowError, match=r"'tova:budget=24,.*' is given twice"):
        explore(model, Plain(), ids, [parse("tova:budget=24")] * 2, name="tiny", new_tokens=1)
    given = [parse("full"), parse("tova:budget=24")]
    runs = explore(model, Plain(), ids, given, name="tiny", new_tokens=1).runs
    assert [run.policy.partition(":")[0] for run in runs] == ["full", "tova"]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("policy", ["snapkv:budget=24,window=8,kernel=3", "h2o:budget=24"])
def test_retained_is_the_share_of_the_models_own_attention_on_what_was_held(kind: str, policy: str) -> None:
    model = tiny_model(kind, layers=4, attn_implementation="eager")
    ids, _ = tiny_tokens(PROMPT)
    full, run = explored(model, policy).runs
    answer = [int(text.strip().removeprefix("t")) for text in full.answer]
    with torch.no_grad():
        whole = torch.cat([ids, torch.tensor([answer])], dim=1)
        layers = model(whole, output_attentions=True, use_cache=False).attentions
    for layer, weights in enumerate(layers):
        if kind == "gemma3" and layer % 2 == 0:
            assert np.isnan(run.retained[layer]).all()
            continue
        by_head = weights[0].unflatten(0, (2, -1)).mean(1).double().numpy()  # (Hkv, n, n)
        for head in range(2):
            held = paid = 0.0
            for step in range(1, NEW + 1):  # the query of step k stands at position n + k - 1
                row = by_head[head, PROMPT + step - 1]
                paid += row.sum()
                # What was held before this query, and its own token.
                before = set(np.flatnonzero(run.kept(step - 1)[layer, head]).tolist()) | {PROMPT + step - 1}
                held += row[sorted(before)].sum()
            assert run.retained[layer, head] == pytest.approx(held / paid, rel=1e-4)
    following = [layer for layer in range(4) if kind == "llama" or layer % 2]
    assert (full.retained[following] == 1).all()


@pytest.mark.filterwarnings("ignore:all layers of this model see")
def test_where_every_layer_slides_nothing_is_retained_or_not() -> None:
    made = explored(tiny_model("mistral, sliding"), "h2o:budget=24")
    assert made.sliding == (WINDOW, WINDOW)
    assert made.runs[-1].retained is None
