"""Speed of the real model with each cache: time to the first token and tokens per second of decoding.

In every round each cache takes in the prompt, one after the other, and then they decode in turns of a few tokens, so
that what else the machine does meets all of them. Figures are medians over the rounds; ratios to DynamicCache are
taken within a round first. Greedy decoding of a fixed number of tokens; end tokens are ignored.

On a machine that others use too, measure the process's own CPU time on one thread: it is what the wall clock would
show if nobody else computed, as far as memory bandwidth is not shared as well.

    python benchmarks/end_to_end.py
    python benchmarks/end_to_end.py --tokens 3072 --rounds 5 --threads 1 --clock cpu
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import machine
import texts
import torch
from torch import Tensor
from transformers import DynamicCache

from kvwinnow import H2O, CompressedCache, Full, Policy, SnapKV, StreamingLLM
from kvwinnow.integrations.loading import load

SHARE = 0.125
TURN = 4  # tokens
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
BASELINE = "DynamicCache, sdpa"
FULL = "kvwinnow full fp32"
HEAVY = "kvwinnow h2o 1/8 bf16"
CASES: dict[str, tuple[Policy, str] | None] = {
    BASELINE: None,
    FULL: (Full(), "fp32"),
    "kvwinnow full bf16": (Full(), "bf16"),
    "kvwinnow snapkv 1/8 fp32": (SnapKV(budget=SHARE), "fp32"),
    "kvwinnow snapkv 1/8 bf16": (SnapKV(budget=SHARE), "bf16"),
    "kvwinnow snapkv 1/8 int4": (SnapKV(budget=SHARE), "int4"),
    HEAVY: (H2O(budget=SHARE), "bf16"),
    "kvwinnow streamingllm 1/8 bf16": (StreamingLLM(budget=SHARE), "bf16"),
}
COLUMNS = ("cache", "first token s", "x baseline", "decode tokens/s", "x baseline", "range", "cache MiB")


@dataclass(frozen=True)
class Run:
    """One prompt and one generation.

    Attributes:
        first: seconds until the first token was known.
        rate: tokens per second after the first.
        cache: bytes the cache held at the end.
    """

    first: float
    rate: float
    cache: int


def new_cache(name: str, model: Any) -> Any:
    made = CASES[name]
    return DynamicCache() if made is None else CompressedCache(model, made[0], dtype=made[1])


def held(cache: Any) -> int:
    """Bytes of a cache, of either kind."""
    if isinstance(cache, CompressedCache):
        return cache.nbytes()
    return sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))


class Generation:
    """One cache, its prompt and the tokens decoded with it, and the time they took."""

    def __init__(self, model: Any, cache: Any, clock: Callable[[], float]) -> None:
        self.model, self.cache, self.clock = model, cache, clock
        self.first = self.decoding = 0.0
        self.tokens = 0

    def start(self, ids: Tensor) -> None:
        """Feed the prompt in one piece."""
        begin = self.clock()
        self.token = self._next(ids)
        self.first = self.clock() - begin

    def go_on(self, count: int) -> None:
        """Decode ``count`` more tokens."""
        begin = self.clock()
        for _ in range(count):
            self.token = self._next(self.token)
        self.decoding += self.clock() - begin
        self.tokens += count

    @torch.inference_mode()
    def _next(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1:].argmax(-1)

    def run(self) -> Run:
        return Run(self.first, self.tokens / self.decoding, held(self.cache))


def one_round(model: Any, ids: Tensor, given: argparse.Namespace) -> dict[str, Run]:
    """Every cache once."""
    clock = CLOCKS[given.clock]
    generations = {name: Generation(model, new_cache(name, model), clock) for name in CASES}
    for name, generation in generations.items():
        machine.progress(f"{ids.shape[1]:,} tokens: {name}")
        generation.start(ids)
    for _ in range(0, given.new, TURN):
        for generation in generations.values():
            generation.go_on(TURN)
    return {name: generation.run() for name, generation in generations.items()}


def measure(model: Any, ids: Tensor, given: argparse.Namespace) -> dict[str, list[Run]]:
    """All rounds at one length."""
    rounds = [one_round(model, ids, given) for _ in range(given.rounds)]
    return {name: [runs[name] for runs in rounds] for name in CASES}


def ratios(runs: dict[str, list[Run]], name: str, of: Callable[[Run], float]) -> list[float]:
    """One case's figure over the baseline's, round by round."""
    return [of(run) / of(base) for run, base in zip(runs[name], runs[BASELINE], strict=True)]


def median(runs: Sequence[Run], of: Callable[[Run], float]) -> float:
    return statistics.median(map(of, runs))


def first_of(run: Run) -> float:
    return run.first


def rate_of(run: Run) -> float:
    return run.rate


def row(runs: dict[str, list[Run]], name: str) -> list[str]:
    """The table's row of one case."""
    rates = ratios(runs, name, rate_of)
    return [
        name,
        f"{median(runs[name], first_of):.2f}",
        f"{statistics.median(ratios(runs, name, first_of)):.2f}",
        f"{median(runs[name], rate_of):.1f}",
        f"{statistics.median(rates):.2f}",
        f"{min(rates):.2f}-{max(rates):.2f}",
        f"{runs[name][0].cache / 2**20:.1f}",
    ]


def notes_on(runs: dict[str, list[Run]], given: argparse.Namespace) -> list[str]:
    extra = [heavy.first - full.first for heavy, full in zip(runs[HEAVY], runs[FULL], strict=True)]
    share = statistics.median(e / full.first for e, full in zip(extra, runs[FULL], strict=True))
    slower = [name for name in CASES if statistics.median(ratios(runs, name, rate_of)) < 1]
    return [
        f"{given.clock} time; medians of {given.rounds} rounds, ratios within a round; {given.new} tokens decoded in "
        f"turns of {TURN}; range: of the decode ratio over the rounds",
        f"H2O's statistic costs {statistics.median(extra):.2f} s of prefill beyond the flash pass alone ({share:+.0%})",
        f"slower than {BASELINE} at decoding: {', '.join(slower) or 'none'}",
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokens", type=machine.whole, nargs="+", default=[1024, 3072, 8192], help="lengths of the prompt"
    )
    parser.add_argument("--new", type=machine.whole, default=32, help="tokens to decode after the first")
    parser.add_argument("--rounds", type=machine.whole, default=3, help="runs of each cache")
    parser.add_argument("--threads", type=machine.whole, help="threads of torch; default: its own choice")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="what to measure time by")
    machine.add_json_option(parser)
    return parser.parse_args()


def main() -> int:
    given = arguments()
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    # One about the newer name of an argument, one about positions beyond the trained length at 8,192 tokens.
    warnings.filterwarnings("ignore", message=".*past_key_values.*|generation goes beyond")
    told = machine.facts()
    # The first pass of a process is slower: it maps the weights into memory.
    model, tokenizer = load(None, torch.float32, device="cpu")
    Generation(model, DynamicCache(), time.perf_counter).start(texts.tokens(tokenizer, texts.help_text(), 256))
    results = {}
    for length in given.tokens:
        ids = texts.tokens(tokenizer, texts.help_text(), length)
        runs = results[length] = measure(model, ids, given)
        title = f"SmolLM2-135M-Instruct, float32, a prompt of {length:,} tokens of Python's help in one piece"
        machine.show(title, COLUMNS, [row(runs, name) for name in CASES], notes_on(runs, given), told)
    figures = {length: {name: list(map(asdict, of)) for name, of in runs.items()} for length, runs in results.items()}
    machine.write_json(given.json, {"machine": told, "new_tokens": given.new, "clock": given.clock, "runs": figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
