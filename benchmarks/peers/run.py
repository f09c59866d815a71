"""kvwinnow beside its peers: time to the first token, decoding, memory, with the same weights and the same prompt.

Every row runs in a process of its own, in its peer's own environment, which the first run makes in .venv-peers (or
where KVWINNOW_PEERS says). A peer that cannot be installed is skipped with a line, a row that fails is told with its
last words. Rows take turns over the rounds; figures are medians, ratios are taken within a round first.

    python benchmarks/peers/run.py
    python benchmarks/peers/run.py --model llama-1b --json 1b.json
    python benchmarks/peers/run.py --contexts 512 --only kvwinnow transformers/dynamic --rounds 5
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import machine
import models
import report
import texts
from contract import Task
from harness import Outcome, interpreters, measure
from rows import PEERS, chosen

from kvwinnow.errors import KvwinnowError

CONTEXTS = {models.SMOLLM2: [512, 4096, 8192], models.LLAMA_1B: [32768]}
# A prompt of 32k tokens takes a model of this size minutes, so caches are filled where they can be.
FILLED = {models.SMOLLM2: False, models.LLAMA_1B: True}
MOST_SECONDS = {models.SMOLLM2: 60.0, models.LLAMA_1B: 30.0}
"""Of decoding, for each row. Only rows with less than about two tokens a second do not come to their end."""
LEFT_OUT = {"transformers/hqq-int4": "to quantise 32k tokens of this model takes it minutes; --only can name it"}
"""Rows that the model of 1B shape does without, and why."""
TITLES = {
    models.SMOLLM2: "SmolLM2-135M, bfloat16, {context:,} tokens of Python's help",
    models.LLAMA_1B: "Llama of 1B shape with random weights, bfloat16, {context:,} tokens",
}


def prompts(folder: Path, contexts: list[int]) -> dict[int, list[int]]:
    """The same text for all, cut to each number of tokens."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids: list[int] = texts.tokens(tokenizer, texts.help_text(), max(contexts))[0].tolist()
    return {context: ids[:context] for context in contexts}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(peer.name for peer in PEERS)
    parser.add_argument("--model", choices=CONTEXTS, default=models.SMOLLM2, help="what all run (default: %(default)s)")
    parser.add_argument(
        "--contexts", type=machine.whole, nargs="+", help="lengths of the prompt (default: 512 4096 8192; 32768)"
    )
    parser.add_argument("--new-tokens", type=machine.whole, default=128, help="tokens to make (default: %(default)s)")
    parser.add_argument("--rounds", type=machine.whole, default=1, help="runs of each row (default: %(default)s)")
    parser.add_argument("--threads", type=machine.whole, default=2, help="threads of each row (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"of {names}, or a row as kvwinnow/full")
    machine.add_json_option(parser)
    given = parser.parse_args()
    given.contexts = given.contexts or CONTEXTS[given.model]
    for name, value, least in (
        ("contexts", min(given.contexts), 128),
        ("new-tokens", given.new_tokens, 2),
        ("rounds", given.rounds, 1),
        ("threads", given.threads, 1),
    ):
        if value < least:
            parser.error(f"--{name} {value} is too little; {least} is the least")
    if given.json is not None and not given.json.absolute().parent.is_dir():
        parser.error(f"--json {given.json}: there is no folder {given.json.parent} to write it to")
    return given


def main() -> int:
    given = arguments()
    left_out = LEFT_OUT if given.model == models.LLAMA_1B and not given.only else {}
    rows = [row for row in chosen(given.only) if row.name not in left_out]
    try:
        folder = models.made(given.model, machine.progress)
    except (KvwinnowError, OSError) as error:
        print(f"the model cannot be made: {error}", file=sys.stderr)
        return 1
    told = {**machine.facts(), "threads": given.threads, "rounds": given.rounds}
    found = interpreters(dict.fromkeys(row.peer for row in rows), machine.progress)
    results: dict[int, dict[str, Outcome]] = {}
    for context, prompt in prompts(folder, given.contexts).items():
        task = Task(
            str(folder),
            prompt,
            given.new_tokens,
            "",
            given.threads,
            filled=FILLED[given.model],
            most_seconds=MOST_SECONDS[given.model],
        )
        results[context] = measure(rows, task, given.rounds, found, machine.progress)
        results[context] |= {name: Outcome(skipped=why) for name, why in left_out.items()}
        _show(given, context, results[context], told)
        # After each length, so that what has been measured stays if somebody stops the rest.
        figures = {length: {name: of.told() for name, of in made.items()} for length, made in results.items()}
        content = {"machine": told, "model": given.model, "new_tokens": given.new_tokens, "contexts": figures}
        machine.write_json(given.json, content)
    return 0 if any(of.runs for made in results.values() for of in made.values()) else 1


def _show(given: argparse.Namespace, context: int, outcomes: dict[str, Outcome], told: dict[str, Any]) -> None:
    title = TITLES[given.model].format(context=context)
    machine.show(title, report.COLUMNS, report.table(outcomes), report.notes(outcomes, given.new_tokens), told)
    print(f"\n{report.markdown(title, outcomes, given.new_tokens)}\n", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
