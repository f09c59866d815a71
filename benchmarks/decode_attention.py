"""One decode step's attention over a cache, in every format: how near it comes to reading the bytes and no more.

All ways take turns, over buffers that together are larger than the caches, and each figure is a median. Reading is
torch.dot of a buffer with itself, of as many bytes as the bfloat16 cache has.

    python benchmarks/decode_attention.py
    python benchmarks/decode_attention.py --tokens 4096 32768 131072 --dims 64 128 --threads 1 2 --json decode.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import machine
import torch
import torch.nn.functional as F
from torch import Tensor

from kvwinnow.codecs import parse_codec
from kvwinnow.codecs.vectors import Vectors
from kvwinnow.ops import Slots, Variant, attention
from kvwinnow.ops.cpu.level import LEVELS, current

KV_HEADS, GROUP = 8, 4
READ, SDPA, WHOLE = "read alone", "torch SDPA, bf16, enable_gqa", "dequantise int4, then SDPA"


@dataclass(frozen=True)
class Way:
    """One way to do the step.

    Attributes:
        run: does it on one of the buffers.
        nbytes: of the keys and values that it reads.
    """

    run: Callable[[int], object]
    nbytes: int


def stored(spec: str, tokens: int, dim: int, *, keys: bool) -> Vectors:
    """Random vectors in a codec's form, encoded a few thousand at a time."""
    shape = (1, KV_HEADS, tokens, dim)
    vectors = Vectors.allocate(
        parse_codec(spec), shape, exact=0, centred=keys, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    heads = torch.arange(KV_HEADS)
    for start in range(0, tokens, 4096):
        x = torch.randn(1, KV_HEADS, min(4096, tokens - start), dim)
        vectors.freeze(x, [0])
        rows = heads.repeat_interleave(x.shape[2])
        vectors.write_many(rows, torch.arange(start, start + x.shape[2]).repeat(KV_HEADS), x.flatten(0, 2))
    return vectors


def copied(vectors: Vectors) -> Vectors:
    return Vectors(
        vectors.codec,
        vectors.exact,
        tuple(part.clone() for part in vectors.parts),
        vectors.mean,
        vectors.scale,
        vectors.frozen,
    )


def ways(specs: list[str], tokens: int, dim: int, megabytes: int) -> tuple[dict[str, Way], int]:
    """Every way, and the number of buffers they go through."""
    positions = torch.arange(tokens, dtype=torch.int32).expand(1, KV_HEADS, tokens).contiguous()
    variant, q = Variant(dim**-0.5), torch.randn(1, KV_HEADS * GROUP, 1, dim, dtype=torch.bfloat16)
    whole = 2 * KV_HEADS * tokens * dim * 2
    buffers = max(2, megabytes * 2**20 // whole)
    plain = [torch.randn(2, KV_HEADS, tokens, dim).bfloat16() for _ in range(buffers)]
    floats = [torch.randn(whole // 4) for _ in range(buffers)]
    found = {READ: Way(lambda i: torch.dot(floats[i], floats[i]), whole)}

    def of(spec: str) -> Way:
        keys, values = stored(spec, tokens, dim, keys=True), stored(spec, tokens, dim, keys=False)
        slots = [Slots(copied(keys), copied(values), positions) for _ in range(buffers)]
        nbytes = sum(part.numel() * part.element_size() for part in (*keys.parts, *values.parts))
        return Way(lambda i: attention(q, slots[i], variant=variant), nbytes)

    for spec in specs:
        machine.progress(f"filling {spec}, {tokens} tokens, d {dim}")
        found[spec] = of(spec)
    found[SDPA] = Way(
        lambda i: F.scaled_dot_product_attention(q, plain[i][:1], plain[i][1:], enable_gqa=True, scale=variant.scale),
        whole,
    )
    keys, values = stored("int4", tokens, dim, keys=True), stored("int4", tokens, dim, keys=False)

    def dequantised(_: int) -> Tensor:
        k, v = (side.unstored().bfloat16() for side in (keys, values))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=variant.scale)

    nbytes = sum(part.numel() * part.element_size() for part in (*keys.parts, *values.parts))
    found[WHOLE] = Way(dequantised, nbytes)
    return found, buffers


def measure(found: dict[str, Way], buffers: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round: the median over the buffers, once for the slow ones."""
    taken: dict[str, list[float]] = {name: [] for name in found}
    for number in range(rounds + 1):
        for name, way in found.items():
            some = range(buffers) if name not in (SDPA, WHOLE) else range(1)
            times = []
            for i in some:
                begin = time.perf_counter()
                way.run((i + number) % buffers)
                times.append(time.perf_counter() - begin)
            if number:  # the first round warms up
                taken[name].append(statistics.median(times))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokens", type=machine.whole, nargs="+", default=[4096, 32768], help="slots of a KV head (4096 32768)"
    )
    parser.add_argument("--dims", type=machine.whole, nargs="+", default=[128, 64], help="head dimensions (128 64)")
    machine.add_turn_options(parser, rounds=9)
    parser.add_argument("--formats", nargs="+", default=["bf16", "int8", "int4", "fp4:group=64", "fp4"], help="in turn")
    parser.add_argument(
        "--megabytes", type=machine.whole, default=256, help="of bfloat16 buffers gone through in turn (256)"
    )
    machine.add_json_option(parser)
    options = parser.parse_args()

    rows, figures = [], []
    with torch.inference_mode():
        for dim in options.dims:
            for tokens in options.tokens:
                found, buffers = ways(options.formats, tokens, dim, options.megabytes)
                for threads in options.threads:
                    machine.pin(threads)
                    machine.progress(f"{tokens} tokens, d {dim}, {threads} thread(s)")
                    taken = measure(found, buffers, options.rounds)
                    rows.extend(rows_of(found, taken, tokens, dim, threads))
                    medians = {name: statistics.median(times) for name, times in taken.items()}
                    sizes = {name: way.nbytes for name, way in found.items()}
                    figures.append(
                        {"tokens": tokens, "dim": dim, "threads": threads, "seconds": medians, "bytes": sizes}
                    )
    number = current()
    told = {**machine.facts(), "threads": options.threads, "level": "off" if number is None else LEVELS[number]}
    title = f"Attention of one token over a cache: {KV_HEADS} KV heads, {KV_HEADS * GROUP} query heads"
    columns = ("tokens", "d", "threads", "format", "ms", "GB/s", "of reading", "over bf16", "over SDPA")
    notes = [
        "'of reading': bytes per second as a share of reading alone, in the same rounds. 'over': times as fast.",
        "The calls are those of a cache layer: the query's rotation and Python's part are in the figures.",
    ]
    machine.show(title, columns, rows, notes, told)
    machine.write_json(options.json, {"machine": told, "figures": figures})


def rows_of(
    found: dict[str, Way], taken: dict[str, list[float]], tokens: int, dim: int, threads: int
) -> list[list[str]]:
    def over(name: str, other: str) -> str:
        if other not in taken:
            return "-"
        return f"{statistics.median(b / a for a, b in zip(taken[name], taken[other], strict=True)):.2f}x"

    rows = []
    for name, way in found.items():
        seconds = statistics.median(taken[name])
        pairs = zip(taken[name], taken[READ], strict=True)
        share = statistics.median((way.nbytes / own) / (found[READ].nbytes / read) for own, read in pairs)
        rows.append(
            [
                f"{tokens:,}",
                str(dim),
                str(threads),
                name,
                f"{seconds * 1e3:.3f}",
                f"{way.nbytes / seconds / 1e9:.2f}",
                f"{share:.2f}",
                over(name, "bf16"),
                over(name, SDPA),
            ]
        )
    return rows


if __name__ == "__main__":
    main()
