"""Storing new keys and values: kvwinnow's native kernels against its codecs in torch, which write the same bytes.

One decoded token, which goes into the first empty slot of each KV head, and the tokens of a prompt. Both ways take
turns over the same slots, and each figure is a median; a ratio is the median of those of the rounds. On one thread its
own time counts, on several that of the clock.

    python benchmarks/quantize.py
    python benchmarks/quantize.py --threads 1 --tokens 2048 --json quantize.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import machine
import torch

from kvwinnow import ops
from kvwinnow.codecs import parse_codec
from kvwinnow.codecs.vectors import Vectors
from kvwinnow.ops.cpu.level import LEVELS, OFF, VARIABLE, current

HEADS, DIM = 8, 128
CODECS = ("bf16", "int8", "int4", "fp8", "fp4", "fp4:style=mx")
TURN = 20  # tokens decoded one after the other


@contextmanager
def without_kernels() -> Iterator[None]:
    """Torch serves."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = OFF
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def empty_slots(name: str, count: int) -> ops.Slots:
    codec, shape = parse_codec(name), (1, HEADS, count, DIM)
    device = torch.device("cpu")
    keys, values = (
        Vectors.allocate(codec, shape, exact=4, centred=centred, dtype=torch.bfloat16, device=device)
        for centred in (True, False)
    )
    return ops.Slots(keys, values, torch.full(shape[:3], -1, dtype=torch.int32))


def measure(name: str, tokens: int, rounds: int, clock: Callable[[], float]) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round: of one token, and of all tokens of a prompt; of each way."""
    # As a model makes them: the heads of one token side by side.
    k, v = (torch.randn(1, tokens, HEADS, DIM).to(torch.bfloat16).transpose(1, 2) for _ in "kv")
    slots = empty_slots(name, tokens)
    new = torch.zeros(1, 1, dtype=torch.int32)

    def token() -> float:
        slots.positions.fill_(1)
        slots.positions[:, :, 100 : 100 + TURN] = -1
        begin = clock()
        for index in range(TURN):
            ops.write_token(slots, k[:, :, index : index + 1], v[:, :, index : index + 1], new)
        return (clock() - begin) / TURN

    def prompt() -> float:
        begin = clock()
        ops.write_first(slots, k, v, None)
        return clock() - begin

    taken: dict[str, dict[str, list[float]]] = {"token": {}, "prompt": {}}
    for number in range(rounds + 1):
        for what, run in (("token", token), ("prompt", prompt)):
            native = run()
            with without_kernels():
                plain = run()
            if number:  # the first round warms up
                taken[what].setdefault("kvwinnow", []).append(native)
                taken[what].setdefault("torch", []).append(plain)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=machine.whole, default=8192, help="tokens of the prompt (8192)")
    machine.add_turn_options(parser, rounds=7)
    machine.add_json_option(parser)
    options = parser.parse_args()

    number = current()
    if number is None:
        raise SystemExit("there are no native kernels to measure: `kvwinnow doctor` says why")
    rows, figures = [], []
    for threads in options.threads:
        machine.pin(threads)
        clock = time.thread_time if threads == 1 else time.perf_counter
        for name in CODECS:
            machine.progress(f"{name}, {threads} thread(s)")
            taken = measure(name, max(options.tokens, 128), options.rounds, clock)
            figures.append({"codec": name, "threads": threads, "seconds": taken})
            rows.append([name, str(threads), *shown(taken["token"], 1e6), *shown(taken["prompt"], 1e3)])
    told = {**machine.facts(), "threads": options.threads, "level": LEVELS[number]}
    title = f"Keys and values of one token, and of {options.tokens:,}, in {HEADS} KV heads, d {DIM}, from bfloat16"
    columns = ("codec", "threads", "token us", "torch us", "x", "prompt ms", "torch ms", "x")
    notes = ["x: how many times as long torch takes."]
    machine.show(title, columns, rows, notes, told)
    machine.write_json(options.json, {"machine": told, "figures": figures})


def shown(taken: dict[str, list[float]], unit: float) -> list[str]:
    ratio = statistics.median(plain / own for plain, own in zip(taken["torch"], taken["kvwinnow"], strict=True))
    own, plain = (statistics.median(taken[way]) * unit for way in ("kvwinnow", "torch"))
    return [f"{own:.1f}", f"{plain:.1f}", f"{ratio:.1f}"]


if __name__ == "__main__":
    main()
