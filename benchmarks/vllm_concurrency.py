"""Requests at once and tokens per second inside vLLM, from a pool of a fixed size: uncompressed, SnapKV, H2O.

Every case gets the same requests, all at time 0, and the same pool. "None" is vLLM without kvwinnow; in every round the
cases run one after the other, each in an engine of its own in this process, so that the scheduler can be looked at. A
request counts as running at once from the step that admits it to its last one. Prefix caching is off, and end tokens
are ignored.

Beside what was reached the table shows where the time goes: to attention, to kvwinnow's measuring and moving, to the
rest of the model and the engine; and how much of it passed in steps that took in a prompt, which no pool makes cheaper,
and in steps that decoded alone.

On a machine that others use too, measure the process's own CPU time on one thread.

    OMP_NUM_THREADS=2 python benchmarks/vllm_concurrency.py
    OMP_NUM_THREADS=1 python benchmarks/vllm_concurrency.py --models llama --blocks 32 --dtype bfloat16 --clock cpu
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# vLLM reads these when it is imported.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import machine
import texts

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
REACHED = ("case", "at once, peak", "x none", "mean", "x none", "preempted", "steps", "seconds", "tokens/s", "x none")
SPENT = ("case", "prompt steps s", "decode steps s", "decode tokens/s", "x none", "attention s", "kvwinnow s", "rest s")
LLAMA = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
}
"""A Llama of 8 KV heads; its weights are random, since speed does not depend on them."""


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: what it is called.
        settings: ``additional_config["kvwinnow"]``; None: vLLM alone.
    """

    name: str
    settings: dict[str, Any] | None


@dataclass
class Step:
    """One step of the engine.

    Attributes:
        began: seconds, by the clock.
        running: requests that hold blocks.
        decoding: of these, those that decode a token.
        prompt: tokens of prompts that it takes in, those of preempted requests that come again included.
        preempted: requests that lost their blocks.
        seconds: until the next step began, or the last ended.
    """

    began: float
    running: int
    decoding: int
    prompt: int
    preempted: int
    seconds: float = 0.0


@dataclass
class Run:
    """What one case did.

    Attributes:
        seconds: from the first request to the last token.
        new: tokens that were made.
        steps: of the engine.
        parts: seconds spent in each part that is timed.
    """

    seconds: float
    new: int
    steps: list[Step]
    parts: dict[str, float]

    def peak(self) -> float:
        return max(step.running for step in self.steps)

    def mean(self) -> float:
        """Requests running at once, over the steps in which any decodes."""
        return statistics.fmean(step.running for step in self.steps if step.decoding)

    def preempted(self) -> float:
        return sum(step.preempted for step in self.steps)

    def rate(self) -> float:
        return self.new / self.seconds

    def decode_seconds(self) -> float:
        """Of the steps that take in no prompt."""
        return sum(step.seconds for step in self.steps if not step.prompt)

    def prompt_seconds(self) -> float:
        return self.seconds - self.decode_seconds()

    def decode_rate(self) -> float:
        """Tokens per second in the steps that take in no prompt."""
        return sum(step.decoding for step in self.steps if not step.prompt) / self.decode_seconds()

    def rest(self) -> float:
        return self.seconds - sum(self.parts.values())


@dataclass
class Timer:
    """Adds up the seconds spent in methods that it has wrapped.

    Attributes:
        clock: what it goes by.
        seconds: of each part.
    """

    clock: Callable[[], float]
    seconds: dict[str, float] = field(default_factory=dict)

    def wrap(self, owner: Any, method: str, part: str) -> None:
        """Time a method from now on."""
        inner = getattr(owner, method)

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self.clock()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + self.clock() - began

        setattr(owner, method, timed)


def time_parts(clock: Callable[[], float]) -> Timer:
    """Time vLLM's attention and all that is ours."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from kvwinnow.integrations.vllm.attention import EvictingBuilder
    from kvwinnow.integrations.vllm.compaction import Compactor

    timer = Timer(clock)
    timer.wrap(CPUAttentionBackendImpl, "forward", "attention")
    timer.wrap(EvictingBuilder, "_look", "kvwinnow")
    timer.wrap(Compactor, "run", "kvwinnow")
    return timer


def allow_small_blocks() -> None:
    """Have vLLM's CPU back end take blocks of 16 tokens, which its kernels serve and which it refuses from 0.32 on."""
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(lambda *_: [MultipleOf(16)])


class Engine:
    """vLLM in this process, for one case."""

    def __init__(self, folder: Path, case: Case, block: int, given: argparse.Namespace) -> None:
        from vllm import LLM

        self.clock = CLOCKS[given.clock]
        config = {} if case.settings is None else {"kvwinnow": case.settings}
        self.llm = LLM(
            str(folder),
            dtype=given.dtype,
            skip_tokenizer_init=True,
            max_model_len=given.tokens + given.new,
            block_size=block,
            num_gpu_blocks_override=given.pool // block + 1,  # block 0 is nobody's
            kv_cache_memory_bytes=2**30,  # more than that many blocks take
            max_num_batched_tokens=given.step,
            max_num_seqs=max(64, given.requests),
            enable_prefix_caching=False,
            enforce_eager=True,
            additional_config=config,
        )
        self.engine: Any = self.llm.llm_engine
        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler
        self.steps: list[Step] = []
        schedule: Callable[[], Any] = self.scheduler.schedule

        def noted(*args: Any, **kwargs: Any) -> Any:
            began = self.clock()
            scheduled = schedule(*args, **kwargs)
            if scheduled.num_scheduled_tokens:
                self.steps.append(self._step(began, scheduled))
            return scheduled

        self.scheduler.schedule = noted

    def _step(self, began: float, scheduled: Any) -> Step:
        decoding = prompt = 0
        for request_id, count in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            # The scheduler has counted the step's tokens as computed already.
            if count == 1 and request.num_computed_tokens > request.num_prompt_tokens:
                decoding += 1
            else:
                prompt += count
        preempted = len(scheduled.preempted_req_ids or ())
        return Step(began, len(self.scheduler.running), decoding, prompt, preempted)

    def run(self, prompts: list[list[int]], new: int, timer: Timer) -> Run:
        """All requests at once; every token of every request is made."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
        timer.seconds.clear()
        self.steps = []
        made = 0
        began = self.clock()
        for index, ids in enumerate(prompts):
            self.engine.add_request(str(index), {"prompt_token_ids": ids}, params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    made += len(output.outputs[0].token_ids)
        ended = self.clock()
        for step, after in zip(self.steps, [step.began for step in self.steps[1:]] + [ended], strict=True):
            step.seconds = after - step.began
        if made != len(prompts) * new:
            raise SystemExit(f"{made} tokens were made in place of {len(prompts) * new}")
        pool = self.scheduler.kv_cache_manager.block_pool
        if pool.get_num_free_blocks() != pool.num_gpu_blocks - 1:
            raise SystemExit("not every block has come back to the pool")
        return Run(ended - began, made, self.steps, dict(timer.seconds))

    def close(self) -> None:
        """Give the pool's memory back."""
        del self.scheduler.schedule
        self.engine.engine_core.shutdown()
        del self.llm, self.engine, self.scheduler
        gc.collect()


def model_folder(name: str, parent: Path) -> Path:
    """Where a model's weights are; the random one is made."""
    from kvwinnow.integrations import default_model

    if name == "smollm2":
        return Path(default_model.ensure())
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = parent / name
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder)
    return folder


def cases_of(given: argparse.Namespace) -> list[Case]:
    budget = round(given.tokens / given.times)
    cases = [Case("none", None)]
    for policy in ("snapkv", "h2o"):
        text = f"{policy}:budget={budget}"
        cases.append(Case(text, {"policy": text}))
    for chunk in given.prefill_budgets:
        text = f"snapkv:budget={budget}"
        cases.append(Case(f"{text}, prefill_budget={chunk}", {"policy": text, "prefill_budget": chunk}))
    return cases


def measure(
    folder: Path, block: int, prompts: list[list[int]], timer: Timer, given: argparse.Namespace
) -> dict[str, list[Run]]:
    """All rounds of one model and block size."""
    runs: dict[str, list[Run]] = {case.name: [] for case in cases_of(given)}
    for number in range(given.rounds):
        for case in cases_of(given):
            engine = Engine(folder, case, block, given)
            engine.run([ids[:300] for ids in prompts[:2]], 4, timer)  # the first steps of an engine are slower
            run = engine.run(prompts, given.new, timer)
            engine.close()
            runs[case.name].append(run)
            machine.progress(
                f"{folder.name}, blocks of {block}, round {number + 1}, {case.name}: {run.seconds:.1f} s, "
                f"{run.peak():.0f} at once, load {os.getloadavg()[0]:.1f}"
            )
    return runs


def row(runs: dict[str, list[Run]], name: str, of: Sequence[tuple[Callable[[Run], float], str]]) -> list[str]:
    """The table's row of one case.

    Args:
        runs: of all cases.
        name: of this one.
        of: a figure of each column and its format; "x": over that of the case "none" in the same round.
    """
    cells = [name]
    for figure, form in of:
        if form == "x":
            ratios = [figure(run) / figure(base) for run, base in zip(runs[name], runs["none"], strict=True)]
            cells.append(f"{statistics.median(ratios):.2f}")
        else:
            cells.append(format(statistics.median(map(figure, runs[name])), form))
    return cells


def part(which: str) -> Callable[[Run], float]:
    return lambda run: run.parts.get(which, 0.0)


def seconds(run: Run) -> float:
    return run.seconds


def steps(run: Run) -> float:
    return len(run.steps)


REACHED_OF = (
    *((Run.peak, ".0f"), (Run.peak, "x"), (Run.mean, ".1f"), (Run.mean, "x"), (Run.preempted, ".0f"), (steps, ".0f")),
    *((seconds, ".1f"), (Run.rate, ".1f"), (Run.rate, "x")),
)
SPENT_OF = (
    *((Run.prompt_seconds, ".1f"), (Run.decode_seconds, ".1f"), (Run.decode_rate, ".1f"), (Run.decode_rate, "x")),
    *((part("attention"), ".1f"), (part("kvwinnow"), ".1f"), (Run.rest, ".1f")),
)


def notes_on(given: argparse.Namespace) -> list[str]:
    return [
        f"{given.requests} requests of {given.tokens:,} tokens and {given.new} new ones, {given.dtype}, a pool of "
        f"{given.pool:,} slots, steps of {given.step:,} tokens at most, prefix caching off; {given.clock} time; "
        f"medians of {given.rounds} rounds, ratios within a round",
        "At once: requests that hold blocks; mean over the steps in which any request decodes. Preempted: how often a "
        "request lost its blocks and had to begin again.",
        "Prompt steps: those that take in tokens of a prompt, whatever they decode beside it. Decode tokens/s: of the "
        "others. Attention: vLLM's kernels and its writing to the pool. Kvwinnow: all that is ours in the worker.",
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("smollm2", "llama"), default=["smollm2", "llama"])
    parser.add_argument("--blocks", type=machine.whole, nargs="+", default=[16, 32], help="tokens of a block")
    parser.add_argument("--requests", type=machine.whole, default=32)
    parser.add_argument("--tokens", type=machine.whole, default=2000, help="of each prompt")
    parser.add_argument("--new", type=machine.whole, default=64, help="tokens to make for each request")
    parser.add_argument("--times", type=float, default=8, help="how many times smaller the budget is than the prompt")
    parser.add_argument("--pool", type=machine.whole, default=8192, help="slots of the pool")
    parser.add_argument("--step", type=machine.whole, default=2048, help="max_num_batched_tokens")
    parser.add_argument(
        "--prefill-budgets", type=machine.whole, nargs="*", default=[], help="one more case of SnapKV for each"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="what to measure time by")
    parser.add_argument("--rounds", type=machine.whole, default=1, help="runs of each case")
    machine.add_json_option(parser)
    return parser.parse_args()


def main() -> int:
    given = arguments()
    import vllm
    from transformers import AutoTokenizer

    from kvwinnow.integrations import default_model

    told = machine.facts() | {"vllm": vllm.__version__}
    tokenizer = AutoTokenizer.from_pretrained(default_model.ensure())
    ids = texts.tokens(tokenizer, texts.library_code(), given.requests * given.tokens)[0].tolist()
    prompts = [ids[start : start + given.tokens] for start in range(0, len(ids), given.tokens)]
    if any(block % 32 for block in given.blocks):
        allow_small_blocks()
    timer = time_parts(CLOCKS[given.clock])
    results = {}
    with tempfile.TemporaryDirectory() as parent:
        for name in given.models:
            folder = model_folder(name, Path(parent))
            for block in given.blocks:
                runs = results[f"{name}/{block}"] = measure(folder, block, prompts, timer, given)
                for what, columns, of in (("reached", REACHED, REACHED_OF), ("spent", SPENT, SPENT_OF)):
                    rows = [row(runs, case.name, of) for case in cases_of(given)]
                    machine.show(f"{name}, blocks of {block}: {what}", columns, rows, notes_on(given), told)
    figures = {key: {name: list(map(asdict, of)) for name, of in runs.items()} for key, runs in results.items()}
    machine.write_json(given.json, {"machine": told, "settings": vars(given) | {"json": None}, "runs": figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
