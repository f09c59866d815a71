"""Compacting a cache: of each KV head the tokens that stay, against a contiguous copy of as many bytes.

All ways take turns, over buffers that together are larger than most caches, and each figure is a median. What
is copied goes into memory at hand, so that neither side pays for new pages, which cost more than either copy. On one
thread its own time counts, on several that of the clock.

    python benchmarks/compaction.py
    python benchmarks/compaction.py --threads 1 --tokens 32768 --keep 4096 --json compaction.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import machine
import torch
from torch import Tensor

from kvwinnow.codecs import parse_codec
from kvwinnow.ops.cpu.gather import gather_into
from kvwinnow.ops.cpu.level import LEVELS, current

HEADS, DIM = 8, 128
COPY = "contiguous copy"


@dataclass(frozen=True)
class Source:
    """What is compacted.

    Attributes:
        name: for people.
        tensors: for each of the buffers that are gone through in turn its tensors (1, H, n, width).
    """

    name: str
    tensors: Sequence[Sequence[Tensor]]


def slots(name: str, buffers: int, tokens: int) -> Source:
    """Slots of a codec, filled with any bits."""
    codec = parse_codec(name)
    parts = [
        [torch.zeros(1, HEADS, tokens, part.width, dtype=part.dtype) for part in codec.layout(DIM)]
        for _ in range(buffers)
    ]
    for part in (part for same in parts for part in same):
        part.view(torch.uint8).random_(0, 100)
    return Source(f"slots {name}", parts)


def made(buffers: int, tokens: int) -> Source:
    """Keys as a model makes them: the heads of one token side by side."""
    keys = [torch.zeros(1, tokens, HEADS, DIM, dtype=torch.bfloat16) for _ in range(buffers)]
    for key in keys:
        key.view(torch.uint8).random_(0, 100)
    return Source("keys of a prompt, bf16", [[key.transpose(1, 2)] for key in keys])


def by_kernel(out: Sequence[Tensor], parts: Sequence[Tensor], order: Tensor, level: int) -> None:
    for new, part in zip(out, parts, strict=True):
        assert gather_into(new, part, order, level)


def by_gather(out: Sequence[Tensor], parts: Sequence[Tensor], order: Tensor) -> None:
    for new, part in zip(out, parts, strict=True):
        torch.gather(part, 2, order.unsqueeze(-1).expand(-1, -1, -1, part.shape[3]), out=new)


def by_index_select(out: Sequence[Tensor], parts: Sequence[Tensor], order: Tensor) -> None:
    for new, part in zip(out, parts, strict=True):
        for head in range(HEADS):
            torch.index_select(part[0, head], 0, order[0, head], out=new[0, head])


def measure(source: Source, keep: int, rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median seconds of each way, one after the other in every round."""
    first = source.tensors[0]
    out = [torch.zeros(1, HEADS, keep, part.shape[3], dtype=part.dtype) for part in first]
    order = torch.rand(1, HEADS, first[0].shape[2], generator=torch.Generator().manual_seed(0))
    order = order.topk(keep, -1).indices.sort(-1).values.contiguous()
    level = current()
    ways: dict[str, Callable[[Sequence[Tensor]], None]] = {COPY: partial(copy_from_the_front, out, keep)}
    if level is not None:
        ways["kvwinnow"] = lambda parts: by_kernel(out, parts, order, level)
    ways["torch gather"] = lambda parts: by_gather(out, parts, order)
    ways["torch index_select"] = lambda parts: by_index_select(out, parts, order)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for place, (name, way) in enumerate(ways.items()):
            parts = source.tensors[(number + place) % len(source.tensors)]
            begin = clock()
            way(parts)
            if number:  # the first round warms up
                taken[name].append(clock() - begin)
    return {name: statistics.median(times) for name, times in taken.items()}


def copy_from_the_front(out: Sequence[Tensor], keep: int, parts: Sequence[Tensor]) -> None:
    """As many bytes, from where they lie side by side."""
    for new, part in zip(out, parts, strict=True):
        whole = part if part.is_contiguous() else part.transpose(1, 2)
        new.view(-1).copy_(whole.view(-1)[: HEADS * keep * part.shape[3]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=machine.whole, default=131072, help="tokens of each KV head before (131072)")
    parser.add_argument("--keep", type=machine.whole, default=16384, help="tokens of each KV head that stay (16384)")
    machine.add_turn_options(parser, rounds=11)
    parser.add_argument("--buffers", type=machine.whole, default=2, help="buffers gone through in turn (2)")
    machine.add_json_option(parser)
    options = parser.parse_args()
    if options.keep > options.tokens:
        parser.error(f"--keep {options.keep}: there are --tokens {options.tokens} of them; take so many at most")

    sources = [
        made(options.buffers, options.tokens),
        *(slots(name, options.buffers, options.tokens) for name in ("bf16", "int8", "int4")),
    ]
    rows, figures = [], []
    for threads in options.threads:
        machine.pin(threads)
        clock = time.thread_time if threads == 1 else time.perf_counter
        for source in sources:
            machine.progress(f"{source.name}, {threads} thread(s)")
            times = measure(source, options.keep, options.rounds, clock)
            size = sum(part[:, :, : options.keep].numel() * part.element_size() for part in source.tensors[0])
            figures.append({"source": source.name, "threads": threads, "bytes": size, "seconds": times})
            rows.append(row(source.name, threads, size, times))
    number = current()
    level = "off" if number is None else LEVELS[number]
    told = {**machine.facts(), "threads": options.threads, "level": level}
    title = f"{options.tokens:,} -> {options.keep:,} tokens in each of {HEADS} KV heads, d {DIM}"
    columns = ("what is compacted", "threads", "MB", "copy ms", "copy GB/s", "kvwinnow", "gather", "index_select")
    notes = ["Ratios are to the contiguous copy of as many bytes; less is better. GB/s counts what is copied once."]
    machine.show(title, columns, rows, notes, told)
    machine.write_json(options.json, {"machine": told, "figures": figures})


def row(name: str, threads: int, size: int, times: dict[str, float]) -> list[str]:
    copy = times[COPY]

    def ratio(way: str) -> str:
        return f"{times[way] / copy:.2f}x" if way in times else "-"

    speed = f"{size / copy / 1e9:.1f}"
    ways = (ratio(way) for way in ("kvwinnow", "torch gather", "torch index_select"))
    return [name, str(threads), f"{size / 1e6:.1f}", f"{copy * 1e3:.2f}", speed, *ways]


if __name__ == "__main__":
    main()
