"""A simulation on a terminal: marks tell what colours tell, so that either alone suffices."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvwinnow.simulation.states import HEAVY, KEPT, SINK, WINDOW, Head, State, ranges
from kvwinnow.simulation.sweep import Point, Sweep
from kvwinnow.simulation.trace import Trace
from kvwinnow.statistics import Kind

MARKS = {SINK: ("S", "cyan"), HEAVY: ("H", "yellow"), WINDOW: ("W", "green"), KEPT: ("K", "none")}
_GONE = ("x", "red strike")

FEW_TOKENS = 32
"""Up to as many tokens, held or evicted at that moment, are shown one by one, at every arrival."""
FEW_ARRIVALS = 80
"""Up to as many arrivals are shown one by one."""
_LINES = 40
_SHOWN = 4
_RUNS = 40


def legend(head: Head) -> Text:
    """What the marks mean."""
    policy = head.simulation.policy
    # Only accumulated attention makes a heavy hitter.
    heavy = "heavy hitter, kept for its score" if Kind.MASS in policy.running() else "kept for its score"
    parts: tuple[tuple[str, str, str], ...] = (
        (*MARKS[SINK], "sink, among the first"),
        (*MARKS[HEAVY], heavy),
        (*MARKS[WINDOW], "window, among the latest"),
        (*_GONE, "evicted (its score)"),
    )
    if policy.limit is None:
        parts = ((*MARKS[KEPT], "kept: this policy evicts nothing"),)
    text = Text()
    for mark, style, meaning in parts:
        text.append(mark, style).append(f" {meaning}   ")
    text.rstrip()
    return text


def is_small(head: Head) -> bool:
    """Whether every state of the cache can be shown token by token."""
    return len(head.arrivals) <= FEW_ARRIVALS and all(
        len(state.roles) + len(state.evicted) <= FEW_TOKENS for state in head.states(head.arrivals)
    )


def arrivals(head: Head) -> RenderableType:
    """The cache after each arrival; of a long trace some moments, and what was evicted between them."""
    return _in_full(head) if is_small(head) else _in_short(head)


def final(head: Head) -> Iterator[Text]:
    """What is held in the end."""
    trace = head.trace
    state = head.state(len(trace.tokens))
    runs = ranges(list(state.roles)).split(", ")
    left = f", and {len(runs) - _RUNS:,} more stretches" if len(runs) > _RUNS else ""
    yield Text(
        f"In the end {len(state.roles):,} of {len(trace.tokens):,} tokens are held ({_counts(state)}): positions "
        f"{', '.join(runs[:_RUNS])}{left}"
    )
    yield _excerpt(trace, state)


def _in_full(head: Head) -> Table:
    table = Table(title=_title(head), title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("tokens", justify="right")
    table.add_column("arrives", no_wrap=True)
    table.add_column("the cache then", overflow="fold")
    for state in head.states(head.arrivals):
        shown = Text()
        for position in sorted({*state.roles, *state.evicted}):
            gone = position not in state.roles
            mark, style = _GONE if gone else MARKS[state.roles[position]]
            shown.append(f"{mark}:{plain(head.trace.tokens[position])}", style)
            score = head.score(position) if gone else None
            shown.append("" if score is None else f" ({score:.3g})").append("  ")
        shown.rstrip()
        table.add_row(f"{state.seen:,}", _arrived(head.trace, state), shown)
    return table


def _in_short(head: Head) -> Table:
    moments = head.arrivals
    if len(moments) > FEW_ARRIVALS:
        picked = {round(line * (len(moments) - 1) / (_LINES - 1)) for line in range(_LINES)}
        moments = [moments[place] for place in sorted(picked)]
    table = Table(title=_title(head), title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("tokens", justify="right")
    table.add_column("arrived", no_wrap=True)
    table.add_column("held", justify="right")
    table.add_column("of them", no_wrap=True)
    table.add_column("evicted since the line above (position: score)", overflow="fold")
    for state in head.states(moments):
        gone = Text()
        for position in state.evicted[:_SHOWN]:
            gone.append(f"{_GONE[0]}:{plain(head.trace.tokens[position])}", _GONE[1])
            score = head.score(position)
            gone.append(f" ({position:,})  " if score is None else f" ({position:,}: {score:.3g})  ")
        if len(state.evicted) > _SHOWN:
            gone.append(f"and {len(state.evicted) - _SHOWN:,} more")
        gone.rstrip()
        table.add_row(f"{state.seen:,}", _arrived(head.trace, state), f"{len(state.roles):,}", _counts(state), gone)
    return table


def _title(head: Head) -> str:
    budget = head.simulation.budgets[head.trace.layers.index(head.number)]
    holds = "no limit" if budget is None else f"{budget:,} tokens"
    where = (
        ""
        if head.trace.model is None
        else f", layer {head.number}, KV head {head.head} of {plain(head.trace.model.name)}"
    )
    return f"{head.simulation.policy}: {holds}{where}"


def _arrived(trace: Trace, state: State) -> Text:
    count = state.seen - state.first
    if count == 1:
        return Text(plain(trace.tokens[state.first]), "bold")
    if state.seen == trace.prompt:
        return Text(f"the prompt, {count:,} tokens")
    if count <= _SHOWN:
        return Text(" ".join(plain(token) for token in trace.tokens[state.first : state.seen]), "bold")
    return Text(f"{count:,} tokens")


def _counts(state: State) -> Text:
    every = KEPT in state.roles.values()
    return Text(
        ", ".join(f"{state.count(role):,} {mark}" for role, (mark, _) in MARKS.items() if (role == KEPT) == every)
    )


def _excerpt(trace: Trace, state: State) -> Text:
    """The text that is left, with ... where tokens are missing."""
    text, before = Text(), -1
    for position, role in state.roles.items():
        token = _printable(trace.tokens[position], but="\n\t")
        if position != before + 1:
            text.append(" ..." if token[:1].isspace() else " ... ", "dim")
        text.append(token, MARKS[role][1])
        before = position
    return text


def plain(token: str) -> str:
    """A token on one line, without the spaces around it."""
    return _printable(token).strip() or repr(token)


def _printable(text: str, but: str = "") -> str:
    """Text in which what is no visible character, but for some, is spelt out: a file must not steer the terminal."""
    return "".join(letter if letter.isprintable() or letter in but else repr(letter)[1:-1] for letter in text)


def sweep_table(found: Sweep) -> Table:
    """Policies by budgets: the share of attention retained, the tokens held, and the memory."""
    table = Table(show_lines=True)
    table.add_column("policy", overflow="fold")
    for budget in found.budgets:
        table.add_column(budget_text(budget), justify="right")
    for name in dict.fromkeys(point.name for point in found.points):
        own = [point for point in found.points if point.name == name]
        cells = [next((point for point in own if point.budget in (None, b)), None) for b in found.budgets]
        table.add_row(Text(name), *(Text("-", "dim") if point is None else _cell(point) for point in cells))
    return table


def budget_text(budget: int | float) -> str:
    """A budget as a heading: tokens as they are, a share as a percentage."""
    return f"{budget:,}" if isinstance(budget, int) else f"{budget:.4g} of prompt"


def size_text(nbytes: int) -> str:
    """Bytes in units of 10^3, three digits: 1.23 MB."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def _cell(point: Point) -> Text:
    memory = f"{point.tokens:,.0f} tok" if point.nbytes is None else size_text(point.nbytes)
    return Text(f"{point.retained:.1%}", "bold").append(f"\n{memory}", "not bold dim")
