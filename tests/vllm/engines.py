"""Engines of vLLM inside this process, stepped by hand, so that a test sees what each request holds at every step."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here; `make test-vllm` has it", allow_module_level=True)

# Read when vLLM is imported or its first engine starts, and kept from then on.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# Inductor takes minutes to compile what dynamo has split into graphs; dynamo's own back end runs the same graphs.
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from kvwinnow.integrations import default_model
from kvwinnow.integrations.vllm.settings import KEY

BLOCK = 32
"""Tokens in a block; vLLM's fast attention on CPUs takes multiples of 32."""
BLOCKS = 600
"""Blocks of the pool, which hold all that a test asks for at once."""

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": BLOCK,
    "num_gpu_blocks_override": BLOCKS,
    "kv_cache_memory_bytes": 2**30,
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 16,
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "additional_config": {KEY: {}},
}
"""What engines are started with unless a test says otherwise."""


@dataclass(frozen=True)
class Ask:
    """A request.

    Attributes:
        prompt: its tokens.
        policy: its own policy; None: it names none.
        tokens: new ones.
        n: how many answers.
        temperature: 0: greedily.
        seed: of the first answer; each further one's is one more.
    """

    prompt: Sequence[int]
    policy: str | None = None
    tokens: int = 40
    n: int = 1
    temperature: float = 0.0
    seed: int | None = None


@dataclass(frozen=True)
class Answer:
    """What came of a request.

    Attributes:
        texts: tokens of each of the answers.
        cached: tokens of the prompt that came from the prefix cache.
        preemptions: how often it lost all its blocks.
    """

    texts: list[list[int]]
    cached: int
    preemptions: int


class Engine:
    """One engine.

    Args:
        options: of ``LLM``, beside ``OPTIONS``.
    """

    def __init__(self, **options: Any) -> None:
        given = {"model": str(default_model.ensure()), **OPTIONS, **options}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
            self.llm = LLM(**given)
        self._sent = 0
        self._outputs: dict[str, Any] = {}

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def add(self, ask: Ask) -> str:
        """Send a request; its name."""
        self._sent += 1
        extra_args = None if ask.policy is None else {KEY: ask.policy}
        params = SamplingParams(
            n=ask.n,
            max_tokens=ask.tokens,
            temperature=ask.temperature,
            seed=ask.seed,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=extra_args,
        )
        name = f"request{self._sent}"
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": list(ask.prompt)}, params)
        return name

    def abort(self, name: str) -> None:
        """Take a request back."""
        self.llm.llm_engine.abort_request([name])

    def requests(self, name: str) -> list[Any]:
        """The scheduler's own records of a request that is not finished: one for each answer."""
        # vLLM puts the number of the answer before a request's name and random letters behind it.
        return [found for key, found in self.scheduler.requests.items() if name in key.replace("-", "_").split("_")]

    def step(self) -> None:
        """Run one step."""
        for output in self.llm.llm_engine.step():
            self._outputs[output.request_id] = output

    def busy(self) -> bool:
        """Whether a request is not finished."""
        return bool(self.llm.llm_engine.has_unfinished_requests())

    def answer(self, name: str, records: Sequence[Any] = ()) -> Answer:
        """What has come of a request so far."""
        output = self._outputs[name]
        texts = [list(found.token_ids) for found in sorted(output.outputs, key=lambda found: found.index)]
        return Answer(texts, output.num_cached_tokens or 0, min((r.num_preemptions for r in records), default=0))

    def run(self, asks: Sequence[Ask], after_step: Callable[[], object] = lambda: None) -> list[Answer]:
        """Send requests all at once and answer them."""
        names = [self.add(ask) for ask in asks]
        records = {name: self.requests(name) for name in names}
        while self.busy():
            self.step()
            after_step()
        return [self.answer(name, records[name]) for name in names]

    def text(self, ask: Ask) -> list[int]:
        """The answer to one request alone."""
        return self.run([ask])[0].texts[0]

    def texts(self, asks: Sequence[Ask]) -> list[list[int]]:
        """The answers to requests sent all at once."""
        return [answer.texts[0] for answer in self.run(asks)]

    def session(self, turns: Sequence[Sequence[int]], policy: str | None, tokens: int = 10) -> list[list[int]]:
        """What is answered to each turn of a session whose input comes as a stream.

        The offline engine has no such input, so it goes to the core as the asynchronous one sends it.
        """
        core, self._sent = self.llm.llm_engine.engine_core.engine_core, self._sent + 1
        extra_args = None if policy is None else {KEY: policy}
        answers = []
        for turn in [*turns, turns[-1][:1]]:
            params = SamplingParams(
                max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False, extra_args=extra_args
            )
            request = self.llm.llm_engine.input_processor.process_inputs(
                f"session{self._sent}",
                {"prompt_token_ids": list(turn)},
                params,
                supported_tasks=("generate",),
                resumable=len(answers) < len(turns),
            )
            request.external_req_id = request.request_id
            core.add_request(*core.preprocess_add_request(request))
            found: list[int] = []
            for _ in range(tokens + 4):
                outputs, _ = core.step_fn()
                for client in (outputs or {}).values():
                    found += [token for output in client.outputs for token in output.new_token_ids]
            answers.append(found)
        return answers[:-1]

    def blocks_held(self, request: Any) -> int:
        """Blocks that a request holds now."""
        manager = self.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        return sum(not block.is_null for block in manager.req_to_blocks[request.request_id])

    def blocks_out(self) -> int:
        """Blocks that are not in the pool; one is nobody's and never is."""
        return self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()


class Engines:
    """The engine that runs now: two would hold two pools, and vLLM keeps some of its settings once a process."""

    def __init__(self) -> None:
        self.options: dict[str, Any] | None = None
        self.engine: Engine | None = None

    def __call__(self, **options: Any) -> Engine:
        """An engine with these options: the one that runs, or a new one in its place."""
        if self.engine is None or options != self.options:
            self.close()
            self.engine, self.options = Engine(**options), options
        return self.engine

    def close(self) -> None:
        """End the engine that runs."""
        self.engine = self.options = None
        gc.collect()
