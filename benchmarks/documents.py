"""One digested document and ten questions to it: what forks and files cost beside one prefill and the answers.

A document is given to a cache once. Each question is then answered four ways, in turns: from a deep copy of the cache,
whose making is not counted (the baseline: nothing but reading the question and decoding the answer); from a fork; and
from forks of a cache that was saved and loaded. Everything that forks and files need is counted, and so is the check
that the prompt begins with the document. All answers must be equal, or the exit code is 1.

    python benchmarks/documents.py
    python benchmarks/documents.py --tokens 2000 --threads 1 --clock cpu
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import machine
import texts
import torch
from torch import Tensor

from kvwinnow import CompressedCache, Full, Policy, SnapKV
from kvwinnow.integrations.loading import load

SHARE = 0.125
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
CASES: dict[str, tuple[Policy, str]] = {
    "snapkv 1/8 bf16": (SnapKV(budget=SHARE), "bf16"),
    "snapkv 1/8 int4": (SnapKV(budget=SHARE), "int4"),
    "full int4": (Full(), "int4"),
}
QUESTIONS = (
    "What is an object?",
    "What does the import statement do?",
    "Which types are mutable?",
    "What is a metaclass?",
    "When is an object deleted?",
    "What is a namespace?",
    "What does __slots__ do?",
    "What is a generator?",
    "How are names bound?",
    "What is a descriptor?",
)
COLUMNS = ("cache", "prefill s", "10 answers s", "from forks s", "save + load s", "after load s")
COLUMNS += ("x forks", "x load", "document MiB", "a fork adds MiB", "file MiB")


@dataclass(frozen=True)
class Run:
    """Seconds and bytes of one case.

    Attributes:
        prefill: to take in the document.
        answers: to read and answer the questions, the caches given.
        forked: the same from forks, forking included.
        filed: to save and to load.
        loaded: to answer from forks of the loaded cache.
        document: bytes of the digested document.
        adds: bytes that a fork holds by itself after its answer, mean.
        file: bytes of the file.
        equal: whether all answers were.
    """

    prefill: float
    answers: float
    forked: float
    filed: float
    loaded: float
    document: int
    adds: float
    file: int
    equal: bool

    @property
    def fork_ratio(self) -> float:
        """Document and all questions from forks, over one prefill and the answers."""
        return (self.prefill + self.forked) / (self.prefill + self.answers)

    @property
    def load_ratio(self) -> float:
        """The same with a file between document and questions."""
        return (self.prefill + self.filed + self.loaded) / (self.prefill + self.answers)


class Questions:
    """The questions as prompts that begin with the document."""

    def __init__(self, model: Any, tokenizer: Any, document: Tensor, new: int) -> None:
        self.model, self.new = model, new
        ends = [
            tokenizer(f"\n\nQuestion: {question}\nAnswer:", return_tensors="pt").input_ids for question in QUESTIONS
        ]
        self.prompts = [torch.cat([document, end], 1) for end in ends]

    def answer(self, index: int, cache: CompressedCache) -> list[int]:
        """The tokens of one answer."""
        prompt = self.prompts[index]
        out = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=cache,
            max_new_tokens=self.new,
            min_new_tokens=self.new,
            do_sample=False,
        )
        tokens: list[int] = out[0, prompt.shape[1] :].tolist()
        return tokens


def timed(clock: Callable[[], float], act: Callable[[], Any]) -> tuple[float, Any]:
    begin = clock()
    result = act()
    return clock() - begin, result


def measure(name: str, model: Any, tokenizer: Any, document: Tensor, given: argparse.Namespace) -> Run:
    """One case from the document to the last answer."""
    policy, dtype = CASES[name]
    clock, questions = CLOCKS[given.clock], Questions(model, tokenizer, document, given.new)
    cache = CompressedCache(model, policy, dtype=dtype)
    machine.progress(f"{name}: prefill")
    with torch.inference_mode():
        prefill, _ = timed(clock, lambda: model(document, past_key_values=cache, logits_to_keep=1))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "document.safetensors"
        saving, _ = timed(clock, lambda: cache.save(file))
        size = file.stat().st_size
        loading, loaded = timed(clock, lambda: CompressedCache.load(file, model))
    sums, equal, adds = [0.0, 0.0, 0.0], True, 0.0
    for index in range(len(QUESTIONS)):
        machine.progress(f"{name}: question {index + 1}")
        twin, forks = copy.deepcopy(cache), []

        def from_fork(of: CompressedCache, index: int = index, forks: list[CompressedCache] = forks) -> list[int]:
            forks.append(of.fork())
            return questions.answer(index, forks[-1])

        ways = [lambda index=index, twin=twin: questions.answer(index, twin)]
        ways += [lambda of=of, ask=from_fork: ask(of) for of in (cache, loaded)]
        taken = [timed(clock, way) for way in ways]
        sums = [total + seconds for total, (seconds, _) in zip(sums, taken, strict=True)]
        equal = equal and all(answer == taken[0][1] for _, answer in taken)
        adds += (forks[0].nbytes() - forks[0].report().shared_nbytes) / len(QUESTIONS)
    return Run(prefill, sums[0], sums[1], saving + loading, sums[2], cache.nbytes(), adds, size, equal)


def row(name: str, run: Run) -> list[str]:
    """The table's row of one case."""
    seconds = (run.prefill, run.answers, run.forked, run.filed, run.loaded)
    sizes = (run.document, run.adds, run.file)
    cells = [f"{value:.2f}" for value in (*seconds, run.fork_ratio, run.load_ratio)]
    return [name, *cells, *(f"{size / 2**20:.2f}" for size in sizes)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=machine.whole, default=6000, help="length of the document")
    parser.add_argument("--new", type=machine.whole, default=8, help="tokens of each answer")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="which caches")
    parser.add_argument("--threads", type=machine.whole, help="threads of torch; default: its own choice")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="what to measure time by")
    machine.add_json_option(parser)
    return parser.parse_args()


def main() -> int:
    given = arguments()
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    warnings.filterwarnings("ignore", message=".*past_key_values.*")
    told = machine.facts()
    model, tokenizer = load(None, torch.float32, device="cpu")
    with torch.inference_mode():
        model(texts.tokens(tokenizer, texts.help_text(), 256))  # the first pass of a process is slower
    document = texts.tokens(tokenizer, texts.help_text(), given.tokens)
    runs = {name: measure(name, model, tokenizer, document, given) for name in given.cases}
    notes = [
        f"{given.clock} time; {len(QUESTIONS)} questions, {given.new} tokens decoded for each",
        "x forks: (prefill + from forks) / (prefill + 10 answers); x load: with a file between, over the same",
        f"answers equal: {', '.join(f'{name} {run.equal}' for name, run in runs.items())}",
    ]
    title = f"SmolLM2-135M-Instruct, float32: a document of {given.tokens:,} tokens of Python's help, digested once"
    machine.show(title, COLUMNS, [row(name, run) for name, run in runs.items()], notes, told)
    machine.write_json(given.json, {"machine": told, "runs": {name: asdict(run) for name, run in runs.items()}})
    return int(not all(run.equal for run in runs.values()))


if __name__ == "__main__":
    raise SystemExit(main())
