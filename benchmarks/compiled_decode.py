"""Milliseconds a decoded token on the real model with a short context: uncompiled, and compiled by compile_decode.

All cases take in the same prompt and then decode in turns of a few tokens, so that what else the machine does meets all
of them. Figures are medians over the turns; ratios to DynamicCache are taken within a turn first. Beside the caches of
kvwinnow stands transformers' StaticCache, compiled as a whole with torch.compile, its weights frozen and not.

Where others use the machine too, measure the thread's own CPU time on one thread. Compiling takes minutes.

    python benchmarks/compiled_decode.py
    python benchmarks/compiled_decode.py --threads 1 --clock cpu --json compiled.json
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import machine
import texts
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from kvwinnow import CompressedCache, compile_decode
from kvwinnow.integrations.loading import load

TURN = 4  # tokens
BUDGET = 64
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
BASELINE = "DynamicCache"
COLUMNS = ("cache", "ms a token", "x DynamicCache", "lower and upper quartile, ms", "first call, s")


class Case:
    """One cache and how it is decoded with."""

    def __init__(self, model: Any, cache: Any, decode: Any = None, *, freeze: bool = False) -> None:
        self.model, self.cache, self.decode, self.freeze = model, cache, decode or model, freeze
        self.turns: list[float] = []
        self.compiling = 0.0

    @torch.no_grad()
    def start(self, ids: Tensor) -> None:
        """Take in the prompt and decode a token, for which a graph may have to be compiled."""
        logits = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        self.token, self.at = logits[:, -1:].argmax(-1), ids.shape[1]
        begin = time.perf_counter()
        with torch._inductor.config.patch(freezing=self.freeze):
            self._step()
        self.compiling = self.compiling or time.perf_counter() - begin

    @torch.no_grad()
    def go_on(self, clock: Callable[[], float]) -> None:
        begin = clock()
        with torch._inductor.config.patch(freezing=self.freeze):
            for _ in range(TURN):
                self._step()
        self.turns.append(1e3 * (clock() - begin) / TURN)

    def _step(self) -> None:
        # Static caches are given a place, not a length, so that one graph serves all steps.
        place = torch.full((1, 1), self.at)
        out = self.decode(self.token, position_ids=place, past_key_values=self.cache, use_cache=True)
        self.token, self.at = out.logits[:, -1:].argmax(-1), self.at + 1


def cases(tokens: int, given: argparse.Namespace) -> dict[str, Case]:
    """Every cache; those compiled have models of their own, since compiling changes a model."""

    def model() -> Any:
        return load(None, torch.bfloat16, device="cpu")[0]

    plain, owners = model(), {}
    for suffix, tune in ((", compile_decode", False), (", tuned", True)):
        if tune and not given.tune:
            continue
        owner = model()
        begin = time.perf_counter()
        compile_decode(owner, tune=tune)
        owners[suffix] = owner, time.perf_counter() - begin

    def static(owner: Any) -> StaticCache:
        return StaticCache(config=owner.config, max_cache_len=tokens + given.new + TURN)

    made = {BASELINE: Case(plain, DynamicCache()), "StaticCache": Case(plain, static(plain))}
    for freeze in (False, True) if given.static else ():
        owner = model()
        decode = torch.compile(owner.forward, dynamic=False)
        made[f"StaticCache, compiled{' and frozen' * freeze}"] = Case(owner, static(owner), decode, freeze=freeze)
    for name, policy, dtype in (
        ("full bf16", "full", "bf16"),
        (f"snapkv {BUDGET} bf16", f"snapkv:budget={BUDGET}", "bf16"),
        (f"snapkv {BUDGET} int4", f"snapkv:budget={BUDGET}", "int4"),
    ):
        for suffix, (owner, seconds) in {"": (plain, 0.0), **owners}.items():
            case = made[f"kvwinnow {name}{suffix}"] = Case(owner, CompressedCache(owner, policy, dtype=dtype))
            case.compiling = seconds
    return made


def row(made: dict[str, Case], name: str) -> list[str]:
    case, base = made[name], made[BASELINE].turns
    low, middle, high = statistics.quantiles(case.turns, n=4)
    ratio = statistics.median(turn / other for turn, other in zip(case.turns, base, strict=True))
    return [name, f"{middle:.1f}", f"{ratio:.2f}", f"{low:.1f}-{high:.1f}", f"{case.compiling:.0f}"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=machine.whole, default=128, help="length of the prompt")
    parser.add_argument("--new", type=machine.whole, default=64, help="tokens to decode")
    parser.add_argument("--threads", type=machine.whole, help="threads of torch; default: its own choice")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="what to measure time by")
    parser.add_argument("--no-static", dest="static", action="store_false", help="do not compile StaticCache")
    parser.add_argument("--tune", action="store_true", help="compile_decode(tune=True) as well, which takes minutes")
    machine.add_json_option(parser)
    return parser.parse_args()


def main() -> int:
    given = arguments()
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    warnings.filterwarnings("ignore", message=".*past_key_values.*")
    told = machine.facts()
    made = cases(given.tokens, given)
    ids = texts.tokens(load(None, torch.bfloat16, device="cpu")[1], texts.help_text(), given.tokens)
    for name, case in made.items():
        machine.progress(name)
        case.start(ids)
    for _ in range(0, given.new, TURN):
        for case in made.values():
            case.go_on(CLOCKS[given.clock])
    notes = [
        f"{given.clock} time; medians of {given.new // TURN} turns of {TURN} tokens, taken by all in turn",
        "first call: with compiling, from inductor's cache on disk where it has one; of compile_decode its whole run",
    ]
    title = f"SmolLM2-135M-Instruct, bfloat16, decoding after a prompt of {given.tokens:,} tokens"
    machine.show(title, COLUMNS, [row(made, name) for name in made], notes, told)
    figures = {name: {"ms": case.turns, "first_call_s": case.compiling} for name, case in made.items()}
    machine.write_json(given.json, {"machine": told, "tokens": given.tokens, "clock": given.clock, "cases": figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
