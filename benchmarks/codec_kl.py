"""How much each storage format changes the model's predictions: KL divergence and perplexity.

Every token of 2 segments of 1,024 tokens each of prose and of code is stored by the product's own storage before
anything attends to it, and the model's predictions are compared with those of the float32 model that stores nothing:
KL(float32 || stored), mean over positions. Prose is Python's own help unless --text names a file; code is the
top-level modules of the standard library, joined in the order of their names.

    python benchmarks/codec_kl.py
    python benchmarks/codec_kl.py --text emma.txt --reference

With --reference the text must be Jane Austen's Emma (Project Gutenberg 158): the figures are then held against those
of an independent implementation, and the exit code is 1 if one lies neither within 20% nor within .002 of it.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import machine
import texts
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from kvwinnow.codecs import BF16, FP4, FP8, FP16, Codec, Int4, Int8
from kvwinnow.codecs.vectors import Vectors
from kvwinnow.integrations.loading import load

TOKENS = 1024
SINKS = 4
PROSE_STARTS = (100_000, 600_000)  # characters
CODE_STARTS = (100_000, 1_500_000)
NAME = "codec_kl"


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: what it is called there.
        keys: codec of the keys.
        values: codec of the values.
        exact: first tokens stored unquantised.
        reference: KL on prose and on code by an independent implementation; None: there is none.
    """

    name: str
    keys: Codec
    values: Codec
    exact: int = 0
    reference: tuple[float, float] | None = None


def same(name: str, codec: Codec, exact: int = 0, reference: tuple[float, float] | None = None) -> Case:
    """A row that stores keys and values alike."""
    return Case(name, codec, codec, exact, reference)


# The independent implementation kept float32 scales, an asymmetric int8 and fp4 without a tensor scale; "plain" is
# neither centred nor rotated.
CASES = (
    same("fp16", FP16()),
    same("bf16", BF16()),
    same("int8 g64", Int8(group=64), reference=(0.0005, 0.0003)),
    same("fp8", FP8(), reference=(0.0087, 0.0053)),
    Case("K int8 g64, V int4 g64", Int8(group=64), Int4(group=64), reference=(0.0061, 0.0067)),
    same("int4 g64 plain", Int4(group=64, rotate=False, centre=False), reference=(0.138, 0.126)),
    same("int4 g32 plain", Int4(group=32, rotate=False, centre=False), reference=(0.073, 0.056)),
    same("int4 g64, sinks exact", Int4(group=64), exact=SINKS, reference=(0.033, 0.027)),
    same("int4 g32, sinks exact", Int4(group=32), exact=SINKS, reference=(0.025, 0.019)),
    same("fp4 nv, sinks exact", FP4(), exact=SINKS, reference=(0.045, 0.040)),
    same("fp4 mx, sinks exact", FP4(style="mx"), exact=SINKS),
)


@dataclass(frozen=True)
class Result:
    """What a row measured, on prose and on code."""

    kl: tuple[float, float]
    perplexity: tuple[float, float]


# -- attention over what was stored ----------------------------------------------------------------


def stored(codec: Codec, x: Tensor, exact: int, *, keys: bool) -> Vectors:
    """All of x (B, Hkv, n, D) in the product's storage, written as a prompt is."""
    batch, heads, count, dim = x.shape
    size = (batch, heads, count, dim)
    vectors = Vectors.allocate(codec, size, exact=exact, centred=keys, dtype=x.dtype, device=x.device)
    vectors.freeze(x, [0] * batch)
    rows = torch.arange(batch * heads).repeat_interleave(count)
    vectors.write_many(rows, torch.arange(count).repeat(batch * heads), x.reshape(-1, dim))
    return vectors


def attend(case: Case, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal attention over stored keys and values, in stored space as the product's is: (B, Hq, n, D)."""
    keys, values = stored(case.keys, k, case.exact, keys=True), stored(case.values, v, case.exact, keys=False)
    count = k.shape[2]
    # q.mean is the same for all keys of a query, so softmax does not see it.
    queries, _ = keys.query(q.reshape(*k.shape[:2], -1, k.shape[3]))
    out = F.scaled_dot_product_attention(
        queries.reshape(q.shape).float(),
        keys.read(0, count).float(),
        values.read(0, count).float(),
        is_causal=True,
        scale=scale,
        enable_gqa=True,
    )
    return values.restore(out).to(q.dtype)


@contextmanager
def storing(model: PreTrainedModel, case: Case) -> Iterator[None]:
    """The model's attention reads what ``case`` stored."""

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float | None = None, **rest: Any
    ) -> tuple[Tensor, None]:
        return attend(case, q, k, v, scaling).transpose(1, 2).contiguous(), None

    AttentionInterface.register(NAME, attention)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


# -- measuring -------------------------------------------------------------------------------------


@torch.inference_mode()
def log_probabilities(model: Any, ids: Tensor) -> Tensor:
    """(n, vocabulary) float32: what the model predicts after each token."""
    return torch.log_softmax(model(ids, use_cache=False).logits[0].float(), -1)


def loss(predicted: Tensor, ids: Tensor) -> float:
    """Mean negative log-likelihood of the tokens that follow."""
    return -predicted[:-1].gather(1, ids[0, 1:, None]).mean().item()


def divergence(reference: Tensor, predicted: Tensor) -> float:
    """KL(reference || predicted), mean over positions."""
    return (reference.exp() * (reference - predicted)).sum(-1).mean().item()


Predict = Callable[[Tensor], Tensor]


def measure(predict: Predict, segments: list[list[Tensor]], references: list[list[Tensor]]) -> Result:
    """Means over the segments of each text."""
    kls, perplexities = [], []
    for ids_of_text, references_of_text in zip(segments, references, strict=True):
        pairs = [(predict(ids), ids, kept) for ids, kept in zip(ids_of_text, references_of_text, strict=True)]
        kls.append(sum(divergence(kept, predicted) for predicted, _, kept in pairs) / len(pairs))
        perplexities.append(math.exp(sum(loss(predicted, ids) for predicted, ids, _ in pairs) / len(pairs)))
    return Result((kls[0], kls[1]), (perplexities[0], perplexities[1]))


def segments_of(tokenizer: Any, prose: str) -> list[list[Tensor]]:
    """Prose and code, two segments each."""
    starts = PROSE_STARTS
    if len(prose) < starts[1] + TOKENS * texts.CHARACTERS_PER_TOKEN:
        starts = (len(prose) // 8, len(prose) * 5 // 8)
    sources = ((prose, starts), (texts.library_code(), CODE_STARTS))
    return [[texts.tokens(tokenizer, text, TOKENS, start=start) for start in starts] for text, starts in sources]


def within(measured: float, reference: float) -> bool:
    """Whether a figure agrees with the independent one: within 20%, or within .002."""
    return abs(measured - reference) <= max(0.2 * reference, 0.002)


def agrees(case: Case, result: Result) -> bool:
    """Whether a row agrees with its reference; a row without one always does."""
    return case.reference is None or all(map(within, result.kl, case.reference))


# -- the command -----------------------------------------------------------------------------------


def pair(values: tuple[float, float], digits: int) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in values)


def row(case: Case, result: Result, *, compared: bool) -> list[str]:
    """The table's row of one case."""
    bits = (case.keys.bytes_per_vector(64) + case.values.bytes_per_vector(64)) * 8 / 128
    cells = [case.name, f"{bits:.3g}", pair(result.kl, 4), pair(result.perplexity, 2)]
    if compared and case.reference is None:
        cells += ["-", "-"]
    elif compared and case.reference is not None:
        cells += [pair(case.reference, 4), "yes" if agrees(case, result) else "NO"]
    return cells


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, metavar="FILE", help="prose to measure on")
    parser.add_argument("--reference", action="store_true", help="the text is Emma: compare, and fail on a difference")
    machine.add_json_option(parser)
    given = parser.parse_args()
    if given.reference and given.text is None:
        parser.error("--reference compares figures for Emma; name its file with --text")
    return given


def run(prose: str) -> tuple[tuple[float, float], list[Result]]:
    """The float32 model's perplexities, and each case's result."""
    model, tokenizer = load(None, torch.float32, device="cpu")
    segments = segments_of(tokenizer, prose)
    predict = functools.partial(log_probabilities, model)
    machine.progress("float32 model")
    references = [[predict(ids) for ids in of_text] for of_text in segments]
    results = []
    for case in CASES:
        machine.progress(case.name)
        with storing(model, case):
            results.append(measure(predict, segments, references))
    return measure(predict, segments, references).perplexity, results


def main() -> int:
    given = arguments()
    told = machine.facts()
    base, results = run(texts.help_text() if given.text is None else given.text.read_text(encoding="utf-8"))
    columns = ["stored as", "bits", "KL prose / code", "perplexity prose / code"]
    columns += ["reference KL", "agrees"] if given.reference else []
    rows = [row(case, result, compared=given.reference) for case, result in zip(CASES, results, strict=True)]
    notes = [
        f"SmolLM2-135M-Instruct, float32, head dimension 64; 2 x {TOKENS:,} tokens of each text, every one stored; "
        f"perplexity of the float32 model: {pair(base, 2)}",
        "bits: per element, scales and zero points included, keys and values averaged",
    ]
    machine.show("KL(float32 || stored), mean over positions", columns, rows, notes, told)
    figures = [
        {"name": case.name, **asdict(result), "reference": case.reference, "agrees": agrees(case, result)}
        for case, result in zip(CASES, results, strict=True)
    ]
    machine.write_json(given.json, {"machine": told, "perplexity_float32": base, "rows": figures})
    return int(given.reference and not all(map(agrees, CASES, results)))


if __name__ == "__main__":
    raise SystemExit(main())
