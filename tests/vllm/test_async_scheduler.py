"""The scheduler that plans a step while the one before still runs. vLLM's CPU platform turns it off; here it is on."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.offline import BLOCK, model_folder, run_engine, single_process, tokens_of

pytestmark = [pytest.mark.smollm2, pytest.mark.slow, pytest.mark.usefixtures("smollm2")]

POOL = 64
"""Enough for all at once: vLLM takes the blocks of a preempted request away from steps that still run."""
BUDGET = 128


def test_tokens_are_those_of_the_other_scheduler() -> None:
    in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    assert tokens_of(run_engine(in_process, enforce_eager=True, async_scheduling=True)) == single_process()


def make(policy: str) -> Any:
    """The scheduler as the engine core makes it, over a small pool and without a model.

    Its prompts come in chunks of 160 tokens, not a whole number of blocks.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from kvwinnow.integrations.vllm.scheduler import EvictingAsyncScheduler
    from kvwinnow.integrations.vllm.spec import EvictingSpec

    config = EngineArgs(
        model=model_folder(),
        dtype="float32",
        max_model_len=1024,
        block_size=BLOCK,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_batched_tokens=160,
        max_num_seqs=8,
        kv_cache_memory_bytes=2**26,
        additional_config={"kvwinnow": {"policy": policy}},
    ).create_engine_config()
    config.scheduler_config.async_scheduling = True
    config.cache_config.num_gpu_blocks = POOL
    spec = EvictingSpec(block_size=BLOCK, num_kv_heads=3, head_size=64, dtype=torch.float32)
    groups = KVCacheConfig(num_blocks=POOL, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    with set_current_vllm_config(config):
        return EvictingAsyncScheduler(config, groups, StructuredOutputManager(config), block_size=BLOCK)


@pytest.mark.parametrize("policy", [f"h2o:budget={BUDGET}", f"snapkv:budget={BUDGET}", f"streamingllm:budget={BUDGET}"])
@pytest.mark.parametrize("depth", [2, 3])
def test_no_block_is_freed_while_a_step_that_reads_it_runs(policy: str, depth: int) -> None:
    """Steps are scheduled up to ``depth`` ahead of their results. What a step reads stays its request's until then."""
    from vllm import SamplingParams
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from kvwinnow.integrations.vllm.plan import plan

    scheduler = make(policy)
    pool = scheduler.kv_cache_manager.block_pool
    manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    prompts, new = {"a": 400, "b": 500, "c": 330}, {"a": 90, "b": 60, "c": 80}
    for name, prompt in prompts.items():
        params = SamplingParams(max_tokens=new[name], temperature=0, ignore_eos=True)
        scheduler.add_request(Request(name, list(range(10, 10 + prompt)), params, None))
    running: deque[tuple[Any, dict[str, list[int]], dict[str, list[int]]]] = deque()
    most_ahead, freed, steps = 0, 0, 0
    made = dict.fromkeys(new, 0)
    while scheduler.requests or running:
        steps += 1
        assert steps < 2000
        step = scheduler.schedule()
        reads: dict[str, list[int]] = {}
        answers: dict[str, list[int]] = {}
        for name, count in step.num_scheduled_tokens.items():
            stop = scheduler.requests[name].num_computed_tokens  # already counts this step
            gone = plan(manager.terms(name), stop - count).gone
            blocks = manager.req_to_blocks[name]
            reads[name] = [block.block_id for block in blocks[gone // BLOCK : -(-stop // BLOCK)]]
            assert 0 not in reads[name], "the null block holds nothing"
            freed = max(freed, gone // BLOCK)
            # A chunk that does not end its prompt gives no token.
            answers[name] = [5] if stop >= prompts[name] else []
        if answers:
            running.append((step, reads, answers))
        for _, earlier, _ in running:
            for name, blocks in earlier.items():
                if name not in scheduler.requests:
                    continue  # it has ended; what steps ahead of the end compute is thrown away
                owned = {block.block_id for block in manager.req_to_blocks[name]}
                assert set(blocks) <= owned
                assert all(pool.blocks[block].ref_cnt == 1 for block in blocks)
        most_ahead = max(most_ahead, len(running))
        if len(running) == depth or (running and not answers):
            done, _, tokens = running.popleft()
            rows = {name: at for at, name in enumerate(tokens)}
            outputs = scheduler.update_from_output(done, ModelRunnerOutput(list(rows), rows, list(tokens.values())))
            for output in (output for client in outputs.values() for output in client.outputs):
                made[output.request_id] += len(output.new_token_ids)
    assert most_ahead == depth
    assert freed > (400 - BUDGET) // BLOCK or policy.startswith("snapkv")
    assert made == new
    assert pool.get_num_free_blocks() == POOL - 1
