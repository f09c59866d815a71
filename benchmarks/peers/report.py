"""The figures of all rows as tables, for the terminal and for a page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from contract import Answer
from harness import Outcome
from rows import BASELINE, FULL

COLUMNS = ("cache", "first token s", "decode tokens/s", "x DynamicCache", "peak RSS MiB", "cache MiB", "same tokens")
MISSING = "-"
MIB = 2**20


def table(outcomes: Mapping[str, Outcome]) -> list[list[str]]:
    """One line for each row that gave a figure."""
    return [_line(name, outcomes) for name, outcome in outcomes.items() if outcome.runs]


def notes(outcomes: Mapping[str, Outcome], asked: int) -> list[str]:
    """What the figures do not say: who is missing and why, versions, and the first token of kvwinnow's caches.

    Args:
        outcomes: of all rows.
        asked: new tokens that each was to make.
    """
    said = [f"{name}: skipped, {outcome.skipped}" for name, outcome in outcomes.items() if outcome.skipped]
    said += [f"{name}: failed, {outcome.failed}" for name, outcome in outcomes.items() if outcome.failed]
    for name, outcome in outcomes.items():
        fewest = min((len(run.tokens) for run in outcome.runs), default=asked)
        if fewest < asked:
            said.append(f"{name}: {fewest} of {asked} tokens, then its time was up")
    versions = {name.partition("/")[0]: run.version for name, outcome in outcomes.items() for run in outcome.runs[:1]}
    if versions:
        said.append("versions: " + ", ".join(f"{peer} {version}" for peer, version in versions.items()))
    return said + _first_tokens(outcomes)


def markdown(title: str, outcomes: Mapping[str, Outcome], asked: int) -> str:
    """The same table for a page."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|---|{'---:|' * (len(COLUMNS) - 1)}"]
    lines += [f"| {' | '.join(cells)} |" for cells in table(outcomes)]
    return "\n".join([f"**{title}**", "", *lines, "", *(f"- {note}" for note in notes(outcomes, asked))])


def _line(name: str, outcomes: Mapping[str, Outcome]) -> list[str]:
    runs = outcomes[name].runs
    first = _median(runs, lambda run: run.first_token_s)
    against = _ratios(outcomes, name, BASELINE, lambda run: run.decode_tokens_per_s)
    rss = _median(runs, lambda run: run.peak_rss_bytes)
    held = _median(runs, lambda run: run.cache_bytes)
    return [
        name,
        MISSING if first is None else f"{first:.2f}",
        f"{statistics.median(run.decode_tokens_per_s for run in runs):.1f}",
        f"{statistics.median(against):.2f}" if against else MISSING,
        MISSING if rss is None else f"{rss / MIB:,.0f}",
        MISSING if held is None else f"{held / MIB:,.1f}",
        _agreement(runs[0], outcomes.get(BASELINE)),
    ]


def _median(runs: Sequence[Answer], of: Callable[[Answer], float | None]) -> float | None:
    known = [figure for figure in map(of, runs) if figure is not None]
    return statistics.median(known) if known else None


def _ratios(outcomes: Mapping[str, Outcome], name: str, base: str, of: Callable[[Answer], float | None]) -> list[float]:
    """A row's figure over the base's, round by round, as far as both are known."""
    if base not in outcomes:
        return []
    pairs = zip(outcomes[name].runs, outcomes[base].runs, strict=False)
    figures = ((of(run), of(beside)) for run, beside in pairs)
    return [ours / theirs for ours, theirs in figures if ours is not None and theirs]


def _agreement(run: Answer, base: Outcome | None) -> str:
    """Tokens that are DynamicCache's before the first that is not. A filled cache has no text to agree on."""
    if base is None or not base.runs or base.runs[0].first_token_s is None or run.first_token_s is None:
        return MISSING
    other = base.runs[0].tokens
    same = next((i for i, (a, b) in enumerate(zip(run.tokens, other, strict=False)) if a != b), None)
    return str(min(len(run.tokens), len(other)) if same is None else same)


def _first_tokens(outcomes: Mapping[str, Outcome]) -> list[str]:
    """How much later kvwinnow's compressed caches have the first token than its full one."""
    said = []
    for name in outcomes:
        if name.startswith("kvwinnow/") and name != FULL:
            ratios = _ratios(outcomes, name, FULL, lambda run: run.first_token_s)
            if ratios:
                said.append(
                    f"{name}: first token {statistics.median(ratios):.3f} times as late as with {FULL}, round by round "
                    f"{min(ratios):.3f} to {max(ratios):.3f}{_confidence(len(ratios))}"
                )
    return said


def _confidence(rounds: int) -> str:
    """How surely the range of that many independent rounds holds their distribution's median."""
    return f" (holds the true median with {1 - 2 ** (1 - rounds):.0%})" if rounds > 4 else ""
