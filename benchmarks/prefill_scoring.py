"""What scoring a prompt costs beside its attention: SnapKV's window scores and H2O's exact column sums.

One layer of one shape at a time, random bfloat16 queries and keys, all of a prompt in one piece. Every column is
measured in turn, round by round, so that what else the machine does falls on all of them; figures are medians.

  flash     torch's flash attention over the prompt (for CPU), which any cache has to compute
  SnapKV    column sums of the last queries over all keys, given flash's log-sum-exp
  anew      the same, where it is not known since the last queries come from more than one chunk
  H2O       column sums of all queries over all keys, given flash's log-sum-exp
  torch     SnapKV and H2O by the torch back end (KVWINNOW_CPU_LEVEL=off)

    python benchmarks/prefill_scoring.py
    python benchmarks/prefill_scoring.py --tokens 8192 --threads 1 --shapes 32x8x128 --level avx512
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields

import machine

SHAPES = ("32x8x128", "9x3x64")
VARIABLE, OFF = "KVWINNOW_CPU_LEVEL", "off"


@dataclass(frozen=True)
class Case:
    """Attributes: query heads, KV heads, head dimension, tokens of the prompt, threads."""

    heads: int
    kv_heads: int
    dim: int
    tokens: int
    threads: int


@dataclass(frozen=True)
class Figures:
    """Medians in seconds; None: not measured."""

    flash: float
    snapkv: float
    anew: float
    h2o: float
    torch_snapkv: float | None
    torch_h2o: float | None


def parts(case: Case, window: int) -> dict[str, Callable[[], object]]:
    """What is measured, by name."""
    import torch

    from kvwinnow.codecs import BF16
    from kvwinnow.codecs.vectors import Vectors
    from kvwinnow.ops import Chunk, Slots, Variant
    from kvwinnow.ops.column_sums import column_sums, log_sum_exp

    torch.manual_seed(0)
    n, dim = case.tokens, case.dim
    # As a model makes them: the heads of one token side by side.
    q = torch.randn(1, n, case.heads, dim).bfloat16().transpose(1, 2)
    k, v = (torch.randn(1, n, case.kv_heads, dim).bfloat16().transpose(1, 2) for _ in range(2))
    places = torch.arange(n, dtype=torch.int32).unsqueeze(0)
    shape = 1, case.kv_heads, 0, dim
    empty = [Vectors.allocate(BF16(), shape, exact=0, centred=False, dtype=q.dtype, device=q.device) for _ in "kv"]
    slots = Slots(*empty, positions=torch.zeros(1, case.kv_heads, 0, dtype=torch.int32))
    chunk, variant = Chunk(k, v, places, (0,)), Variant(dim**-0.5)
    last, own = q[:, :, -window:], places[:, -window:]

    def flash() -> tuple[torch.Tensor, torch.Tensor]:
        pair: tuple[torch.Tensor, torch.Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, True, scale=variant.scale
        )
        return pair

    lse = flash()[1]

    def snapkv() -> object:
        return column_sums(last, own, lse[:, :, -window:], slots, chunk, variant)

    def anew() -> object:
        return column_sums(last, own, log_sum_exp(last, own, slots, chunk, variant), slots, chunk, variant)

    def h2o() -> object:
        return column_sums(q, None, lse, slots, chunk, variant)

    work = {"flash": flash, "snapkv": snapkv, "anew": anew, "h2o": h2o}
    return work | {f"torch_{name}": work[name] for name in ("snapkv", "h2o")}


def measure(case: Case, given: argparse.Namespace) -> Figures:

    machine.pin(case.threads)
    work = parts(case, given.window)
    if case.tokens > given.torch_tokens:
        work = {name: run for name, run in work.items() if not name.startswith("torch")}
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(given.rounds + 1):
        for name, run in work.items():
            os.environ[VARIABLE] = OFF if name.startswith("torch") else given.level
            # What is short is repeated, or the clock and the caches would be measured.
            for _ in range(given.repeats if name in ("snapkv", "anew") else 1):
                start = time.perf_counter()
                run()
                if turn:  # the first one warms up
                    times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    machine.progress(f"{case}: " + ", ".join(f"{name} {value * 1e3:.1f} ms" for name, value in medians.items()))
    return Figures(*(medians.get(field.name) for field in fields(Figures)))


def row(case: Case, figures: Figures) -> list[str]:
    cells = [f"{case.heads}/{case.kv_heads} heads, d {case.dim}", f"{case.tokens:,}", str(case.threads)]
    cells.append(f"{figures.flash * 1e3:,.1f}")
    for own, theirs in ((figures.snapkv, figures.torch_snapkv), (figures.anew, None), (figures.h2o, figures.torch_h2o)):
        cells += [f"{own * 1e3:,.2f}", f"{own / figures.flash:.2%}"]
        if own is not figures.anew:
            cells.append("-" if theirs is None else f"{theirs * 1e3:,.1f}")
    return cells


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", nargs="+", default=SHAPES, metavar="QxKVxD", help="query heads, KV heads, dimension"
    )
    parser.add_argument("--tokens", nargs="+", type=machine.whole, default=[8192, 32768], help="lengths of the prompt")
    parser.add_argument("--threads", nargs="+", type=machine.whole, default=[1, 2])
    parser.add_argument("--window", type=machine.whole, default=32, help="SnapKV's observing queries")
    parser.add_argument("--rounds", type=machine.whole, default=5, help="measured rounds, after one that is not")
    parser.add_argument("--repeats", type=machine.whole, default=5, help="SnapKV's measurements in a round")
    parser.add_argument("--torch-tokens", type=int, default=8192, help="the longest prompt that torch scores too")
    parser.add_argument("--level", default="", help="KVWINNOW_CPU_LEVEL for the native kernels")
    machine.add_json_option(parser)
    return parser.parse_args()


def main() -> int:
    given = arguments()
    cases = [
        Case(*map(int, shape.split("x")), tokens=tokens, threads=threads)
        for shape in given.shapes
        for threads in given.threads
        for tokens in given.tokens
    ]
    os.environ[VARIABLE] = given.level
    told = machine.facts() | {"threads": " and ".join(map(str, given.threads)), "native": native()}
    measured = {case: measure(case, given) for case in cases}
    columns = ["shape", "tokens", "threads", "flash ms", "SnapKV ms", "of flash", "torch ms"]
    columns += ["anew ms", "of flash", "H2O ms", "of flash", "torch ms"]
    notes = [
        f"bfloat16, one layer, causal; SnapKV with a window of {given.window}; medians of {given.rounds} rounds, "
        f"columns measured in turn; torch ms: the torch back end, to {given.torch_tokens:,} tokens",
    ]
    rows = [row(case, figures) for case, figures in measured.items()]
    machine.show("Scoring a prompt, beside its attention", columns, rows, notes, told)
    figures = [{**asdict(case), **asdict(figures)} for case, figures in measured.items()]
    machine.write_json(given.json, {"machine": told, "window": given.window, "rows": figures})
    return 0


def native() -> str:
    """The level that runs."""
    from kvwinnow.ops.cpu import level

    number = level.current()
    return OFF if number is None else level.LEVELS[number]


if __name__ == "__main__":
    raise SystemExit(main())
