"""Peak memory of taking in a long prompt: SnapKV at 1/8 against transformers' DynamicCache.

Two independent figures for each case, both above what the process held with the model loaded and warmed up:

  tensors   the most bytes of tensors that were alive at once, from the events of torch's CPU allocator
  resident  growth of the resident set at its peak (getrusage), the median of several processes, one case each

A forward pass needs memory for its activations whatever the cache, so each way of feeding the prompt is also measured
without any cache. What comes on top of that is the cache's own share of the peak. The bound it is held against is what
the design promises: what the cache holds after the prompt, and one layer's keys and values of one chunk.

    python benchmarks/prefill_memory.py
    python benchmarks/prefill_memory.py --tokens 4096 --chunk 1024 --runs 3
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import machine

MIB = 2**20
SHARE = 0.125
# Memory that was freed and that glibc kept would otherwise count as resident; above this size it is given back at once.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(256 * 1024), "MALLOC_TRIM_THRESHOLD_": str(256 * 1024)}


@dataclass(frozen=True)
class Case:
    """One row of the table: a cache and a way of feeding the prompt.

    Attributes:
        cache: "none", "dynamic" or the dtype of a compressed cache.
        chunked: whether the prompt comes in chunks.
    """

    cache: str
    chunked: bool

    def label(self, chunk: int) -> str:
        cache = {"none": "no cache at all", "dynamic": "DynamicCache fp32"}.get(self.cache, f"SnapKV 1/8 {self.cache}")
        return f"{cache}, {f'chunks of {chunk:,}' if self.chunked else 'one piece'}"


# Without a cache a chunk sees nothing before it: only its activations matter.
CASES = tuple(Case(cache, chunked) for chunked in (False, True) for cache in ("none", "dynamic", "bf16", "int4"))


@dataclass(frozen=True)
class Figures:
    """What one case took, in bytes.

    Attributes:
        tensors: peak of live tensors.
        resident: growth of the resident set at its peak.
        cache: what the cache holds after the prompt.
        chunk: one layer's keys and values of one chunk.
    """

    tensors: int
    resident: int
    cache: int
    chunk: int


# -- one case, in a process of its own -------------------------------------------------------------


def resident_now() -> int:
    """Bytes resident now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def resident_peak() -> int:
    """Most bytes that were ever resident, since ``forget_peak`` where the system grants that."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak() -> None:
    """Start the peak anew, where the system grants that."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        machine.progress("this system does not let a process reset its peak; the figure may include loading the model")


def prefill(model: Any, cache: Any, ids: Any, chunk: int) -> None:
    """Feed the whole prompt; the logits of its last token only."""
    declared = cache.prompt(length=ids.shape[1]) if hasattr(cache, "prompt") else nullcontext()
    with declared:
        for piece in ids.split(chunk, dim=1):
            model(piece, past_key_values=cache, use_cache=cache is not None, logits_to_keep=1)


def make_cache(name: str, model: Any) -> Any:
    from transformers import DynamicCache

    from kvwinnow import CompressedCache, SnapKV

    if name == "none":
        return None
    return DynamicCache() if name == "dynamic" else CompressedCache(model, SnapKV(budget=SHARE), dtype=name)


def held(cache: Any) -> int:
    """Bytes that a cache holds."""
    if cache is None:
        return 0
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes())
    return sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))


def measure_case(case: Case, tokens: int, chunk: int, *, with_tensors: bool) -> dict[str, int]:
    """One prefill in this process."""
    import texts
    import torch

    from kvwinnow.integrations.loading import load

    model, tokenizer = load(None, torch.float32, device="cpu")
    ids = texts.tokens(tokenizer, texts.help_text(), tokens)
    step = chunk if case.chunked else tokens
    config = model.config
    with torch.inference_mode():
        prefill(model, None, ids[:, :64], 64)  # weights mapped into memory, thread pools started
        cache = make_cache(case.cache, model)
        result = {"chunk": 2 * config.num_key_value_heads * config.head_dim * step * 4}
        if with_tensors:
            result["tensors"] = live_peak(lambda: prefill(model, cache, ids, step))
        else:
            before = resident_now()
            forget_peak()
            prefill(model, cache, ids, step)
            result["resident"] = resident_peak() - before
    return {**result, "cache": held(cache)}


def live_peak(work: Any) -> int:
    """The most bytes of CPU tensors alive at once during ``work``, above those alive before it."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    results: Any = profile.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


# -- all cases -------------------------------------------------------------------------------------


def run_case(case: Case, given: argparse.Namespace, *, with_tensors: bool) -> dict[str, int]:
    """One prefill in a fresh process. This process never imports torch, or its own size would count as the child's."""
    command = [sys.executable, __file__, "--tokens", str(given.tokens), "--chunk", str(given.chunk)]
    command += ["--case", json.dumps(asdict(case)), *(["--tensors"] if with_tensors else [])]
    # The profiler reports its own start and stop on the error stream, which is worth reading only if the case failed.
    done = subprocess.run(command, env=os.environ | ALLOCATOR, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case.label(given.chunk)} failed with code {done.returncode}:\n{done.stderr}")
    result: dict[str, int] = json.loads(done.stdout)
    return result


def measure(case: Case, given: argparse.Namespace) -> Figures:
    once = run_case(case, given, with_tensors=True)
    runs = [run_case(case, given, with_tensors=False)["resident"] for _ in range(given.runs)]
    figures = Figures(once["tensors"], int(statistics.median(runs)), once["cache"], once["chunk"])
    machine.progress(f"{case.label(given.chunk)}: tensors {mib(figures.tensors)}, resident {mib(figures.resident)} MiB")
    return figures


def row(case: Case, figures: Figures, without: Figures, chunk: int) -> list[str]:
    """The table's row of one case; ``without``: the same way of feeding, no cache."""
    cells = [case.label(chunk), mib(figures.tensors), mib(figures.resident), mib(figures.cache)]
    if case.cache == "none":
        return [*cells, "-", "-", "-"]
    shares = [mib(figures.tensors - without.tensors), mib(figures.resident - without.resident)]
    return [*cells, *shares, "-" if case.cache == "dynamic" else mib(figures.cache + figures.chunk)]


def mib(size: int) -> str:
    return f"{size / MIB:,.1f}"


def report(given: argparse.Namespace, told: dict[str, Any], measured: dict[Case, Figures]) -> None:
    rows = [row(case, figures, measured[Case("none", case.chunked)], given.chunk) for case, figures in measured.items()]
    columns = ["cache, prompt fed", "tensors", "resident", "held after"]
    columns += ["cache's share: tensors", "cache's share: resident", "bound of the share"]
    notes = [
        f"SmolLM2-135M-Instruct, float32, {given.tokens:,} tokens of Python's help, budget 1/8 = "
        f"{int(given.tokens * SHARE):,} tokens per KV head; resident: median of {given.runs} processes, "
        f"{' '.join(f'{key}={value}' for key, value in ALLOCATOR.items())}",
        "cache's share: above the same forward passes without any cache; "
        "its bound: held after + one layer's K/V of one chunk",
    ]
    machine.show("Peak memory of the prefill above the loaded model, MiB (2^20 bytes)", columns, rows, notes, told)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=machine.whole, default=8192, help="length of the prompt")
    parser.add_argument("--chunk", type=machine.whole, default=2048, help="tokens of a chunk")
    parser.add_argument("--runs", type=machine.whole, default=1, help="processes for each resident figure")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--tensors", action="store_true", help=argparse.SUPPRESS)
    machine.add_json_option(parser)
    return parser.parse_args()


def main() -> int:
    given = arguments()
    if given.case is not None:
        case = Case(**json.loads(given.case))
        print(json.dumps(measure_case(case, given.tokens, given.chunk, with_tensors=given.tensors)))
        return 0
    measured = {case: measure(case, given) for case in CASES}
    told = machine.facts()
    report(given, told, measured)
    figures = [{**asdict(case), **asdict(figures)} for case, figures in measured.items()]
    machine.write_json(given.json, {"machine": told, "tokens": given.tokens, "chunk": given.chunk, "rows": figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
