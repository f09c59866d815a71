"""Linear layers of a decode step: how fast their weights are read by kvwinnow's kernel, by torch, and by reading alone.

The layers are those of one block and the head of SmolLM2-135M, and of one block of a Llama of 1B shape; layers of one
input are computed at once, as a compiled step does. Weights are taken in turn from more than the caches hold, all
ways take turns, and each figure is a median. Reading is torch.dot over as many bytes.

    python benchmarks/linear.py
    python benchmarks/linear.py --threads 1 --rows 1 2 4 --dtype float32 --json linear.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import machine
import torch
from torch.nn import functional

from kvwinnow.ops.cpu.level import LEVELS, current
from kvwinnow.ops.cpu.linear import MOST_VECTORS, linear

LAYERS = {
    "135M q, k, v": (576, (576, 192, 192)),
    "135M o": (576, (576,)),
    "135M gate, up": (576, (1536, 1536)),
    "135M down": (1536, (576,)),
    "135M head": (576, (49152,)),
    "1B q, k, v": (2048, (2048, 512, 512)),
    "1B o": (2048, (2048,)),
    "1B gate, up": (2048, (8192, 8192)),
    "1B down": (8192, (2048,)),
}
"""K, and N of each matrix."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WAYS = ("kvwinnow", "torch", "reading")


def measure(width: int, counts: tuple[int, ...], vectors: int, given: argparse.Namespace) -> dict[str, list[float]]:
    """GB/s of each round and way."""
    dtype = DTYPES[given.dtype]
    size = sum(counts) * width * dtype.itemsize
    sets = max(2, -(-given.megabytes * 2**20 // size))
    weights = [[torch.randn(count, width).to(dtype) for count in counts] for _ in range(sets)]
    plain = [torch.randn(size // 4) for _ in range(sets)]
    x, none = torch.randn(1, vectors, width).to(dtype), [None] * len(counts)
    ways: dict[str, Callable[[int], Any]] = {
        "kvwinnow": lambda i: linear(x, weights[i], none),
        "torch": lambda i: [functional.linear(x, weight) for weight in weights[i]],
        "reading": lambda i: torch.dot(plain[i], plain[i]),
    }
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(given.rounds + 1):
        for way in WAYS:
            begin = time.perf_counter()
            for i in range(sets):
                ways[way](i)
            if number:  # the first round warms up
                taken[way].append(sets * size / (time.perf_counter() - begin) / 1e9)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=machine.whole, nargs="+", default=[1], help=f"1 to {MOST_VECTORS} (default: 1)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: %(default)s")
    machine.add_turn_options(parser, rounds=7)
    parser.add_argument("--megabytes", type=machine.whole, default=256, help="of weights, more than caches hold (256)")
    machine.add_json_option(parser)
    given = parser.parse_args()
    if max(given.rows) > MOST_VECTORS:
        parser.error(f"--rows {max(given.rows)}: kernels take {MOST_VECTORS} at most, and torch serves more")
    number = current()
    if number is None:
        raise SystemExit("there are no native kernels to measure: `kvwinnow doctor` says why")
    rows, figures = [], []
    for threads in given.threads:
        machine.pin(threads)
        for name, (width, counts) in LAYERS.items():
            for vectors in given.rows:
                machine.progress(f"{name}, {vectors} row(s), {threads} thread(s)")
                with torch.inference_mode():
                    taken = measure(width, counts, vectors, given)
                figures.append({"layers": name, "rows": vectors, "threads": threads, "gb_s": taken})
                shown = [f"{statistics.median(taken[way]):.1f}" for way in WAYS]
                pairs = zip(taken["kvwinnow"], taken["torch"], strict=True)
                gain = statistics.median(own / other for own, other in pairs)
                rows.append([name, str(vectors), str(threads), *shown, f"{gain:.1f}"])
    told = {**machine.facts(), "threads": given.threads, "level": LEVELS[number]}
    title = f"Weights read by the linear layers of a decode step, {given.dtype}, GB/s"
    columns = ("layers", "rows", "threads", *WAYS, "x torch")
    machine.show(title, columns, rows, ["x torch: how many times as fast as torch's products."], told)
    machine.write_json(given.json, {"machine": told, "dtype": given.dtype, "figures": figures})


if __name__ == "__main__":
    main()
