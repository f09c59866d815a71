"""A plan as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console, ConsoleRenderable, RichCast
from rich.table import Table
from rich.text import Text

from kvwinnow.codecs import parse_codec
from kvwinnow.planning.architecture import Architecture, Attention
from kvwinnow.planning.catalogue import built_in
from kvwinnow.planning.facts import FACTS
from kvwinnow.planning.gpus import GPUS, sold_size
from kvwinnow.planning.planner import ContextPlan, Fit, GPUPlan, Plan
from kvwinnow.planning.units import show_tokens
from kvwinnow.policies import parse


def show(plan: Plan, console: Console) -> None:
    """Print a plan."""
    for number, part in enumerate(_parts(plan)):
        if number:
            console.print()
        console.print(part, highlight=False, markup=False)


def show_catalogue(console: Console) -> None:
    """Print the built-in models and GPUs."""
    for table in (_models(), _gpus()):
        console.print(table)
        console.print()
    console.print("GB = 10^9 bytes, GiB = 2^30 bytes. Names may be written in any case, with or without -Instruct.")


def _parts(plan: Plan) -> Iterator[ConsoleRenderable | RichCast | str]:
    yield _head(plan)
    yield _sizes(plan)
    if plan.gpu is not None:
        yield _gpu(plan, plan.gpu)
        if plan.gpu.free < 0:
            yield _lighter(plan, plan.gpu)
        yield _fits(plan)
    if plan.fit is not None:
        yield from _fit(plan, plan.fit)
    yield _feet(plan)


def _head(plan: Plan) -> str:
    model = plan.model
    assumed = " (assumed: the config does not say)" if model.dtype_assumed else ""
    layers = "; ".join(f"{count} layers of {what}" for what, count in model.layers.items())
    lines = [
        f"{model.name}: {layers}",
        f"Computes in {model.dtype}{assumed}"
        + (f", trained to {show_tokens(model.trained)} tokens" if model.trained else ""),
    ]
    per_token = f"Full cache: {model.bytes_per_token:,} bytes a token ({model.bytes_per_token / 1024:,.4g} KiB)"
    if model.bytes_per_late_token != model.bytes_per_token:
        per_token += f", {model.bytes_per_late_token:,} once the windows are full"
    if model.state_bytes:
        per_token += f", and {model.state_bytes:,} bytes of states, whatever the length"
    lines.append(per_token)
    lines.extend(f"Note: {note}" for note in model.notes)
    if model.unserved:
        lines.append(
            f"Note: kvwinnow's cache does not serve this model: {model.unserved}; sizes of the full cache only"
        )
    lines.append(f"Source: {model.source}" if model.source else "")
    return "\n".join(filter(None, lines))


def _sizes(plan: Plan) -> Table:
    several = plan.gpu is not None and plan.gpu.count > 1
    table = _table("on all GPUs" if several else "")
    if plan.weights is not None:
        number = f", {plan.parameters:,} parameters" if plan.parameters else ""
        table.add_row(f"weights, {plan.weights_dtype or 'as stored'}{number}", *_both(plan.weights))
    else:
        table.add_row("weights (the number of parameters is not known; give --parameters)", "?", "?")
    table.add_section()
    for at in plan.contexts:
        for what, nbytes in _rows(plan, at):
            table.add_row(what, *_both(nbytes))
        table.add_section()
    return table


def _rows(plan: Plan, at: ContextPlan) -> Iterator[tuple[str, int]]:
    batch = f" x {plan.batch} rows" if plan.batch > 1 else ""
    later = f" and {plan.new:,} new" if plan.new else ""
    context = f"{show_tokens(at.context)} tokens{later}{batch}"
    yield f"{context}: full cache, {plan.model.dtype}", at.full
    yield f"  in blocks of {plan.block} tokens, as vLLM has it", at.full_blocks
    if at.kept is None or at.kept_later is None or at.prefill is None or at.prefill_whole is None:
        return
    yield (
        f"{context}: kvwinnow, {_policy(plan.policy or '')}, {_dtypes(plan.k_dtype, plan.v_dtype)} ({_kept(plan, at)})",
        at.kept,
    )
    if plan.new:
        yield f"  after the {plan.new:,} new tokens", at.kept_later
    if plan.chunk is not None:
        yield f"  peak while the prompt is read, {plan.chunk:,} tokens at once", at.prefill
    yield "  peak while the prompt is read in one piece: one layer's keys and values whole", at.prefill_whole
    yield "  peak of an engine that evicts once the prompt is read, at least", at.prefill_evicting_later


def _kept(plan: Plan, at: ContextPlan) -> str:
    """Which tokens kvwinnow's cache keeps of a prompt."""
    if _all_slide(plan):
        return f"windows of {', '.join(f'{window:,}' for window in plan.model.windows)}"
    if at.budget is None:
        return "every token"
    average = " on average" if parse(plan.policy or "full").layered else ""
    return f"{min(at.budget, at.context):,} tokens per KV head{average}"


def _all_slide(plan: Plan) -> bool:
    return bool(plan.model.windows) and plan.model.bytes_per_late_token == 0


def _gpu(plan: Plan, gpu: GPUPlan) -> Table:
    name = gpu.name if gpu.count == 1 else f"each of {gpu.count} {gpu.name}"
    table = _table(name)
    told = "as given" if gpu.source == "as given" else "as its driver reports"
    table.add_row(f"memory, {told}", *_both(gpu.memory))
    table.add_row("less overhead: CUDA, activations, workspaces, fragmentation", *_both(gpu.overhead))
    table.add_row(f"less weights, {plan.weights_dtype or 'as stored'}", *_both(gpu.weights))
    left = "left for the cache" if gpu.free >= 0 else "left for the cache: the weights do not fit"
    table.add_row(Text(left, "bold"), *_both(gpu.free))
    return table


def _lighter(plan: Plan, gpu: GPUPlan) -> str:
    """What would make the weights fit: the smallest format, or with --fit all of them, and the number of GPUs."""
    each = " of each GPU" if gpu.count > 1 else ""
    lines = [
        f"With {one.weights_dtype} weights ({_both(one.weights)[0]} GB) {_both(one.free)[0]} GB are left{each}: "
        f"add --weights-dtype {one.weights_dtype}"
        for one in (gpu.lighter if plan.fit is not None else gpu.lighter[:1])
    ]
    if gpu.gpus_for_weights is not None:
        lines.append(f"As they are, the weights fit on {gpu.gpus_for_weights} of these GPUs, by tensor parallelism")
    if plan.parameters is None:
        lines.append("How much room other formats leave depends on the number of parameters: add --parameters")
    return "\n".join(lines) or "The weights fit in no format that is known, nor on up to 64 of these GPUs"


def _fits(plan: Plan) -> Table:
    cache = "full cache" if plan.policy is None else f"{_policy(plan.policy)}, {_dtypes(plan.k_dtype, plan.v_dtype)}"
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title=f"Does it fit? {cache}", title_justify="left"
    )
    table.add_column("context")
    table.add_column("rows", justify="right")
    for heading in ("needs of each GPU, GB", "GiB"):
        table.add_column(heading, justify="right")
    table.add_column("fits")
    table.add_column("requests of one row at once", justify="right")
    for at in plan.contexts:
        fits = Text("yes", "green") if at.fits else Text("no", "red")
        table.add_row(
            show_tokens(at.context), str(plan.batch), *_both(at.needed_per_gpu), fits, f"{at.requests or 0:,}"
        )
    return table


def _fit(plan: Plan, fit: Fit) -> Iterator[ConsoleRenderable | str]:
    lines = []
    rows = f" of {plan.batch:,} rows" if plan.batch > 1 else ""
    if plan.policy is not None:
        lines.append(f"Longest context{rows} with this policy and format: {_longest(fit.longest_context)}")
    lines.append(f"Longest context{rows} with the full cache: {_longest(fit.longest_full_context)}")
    for at in fit.contexts:
        gpus = "none up to 64 of these GPUs" if at.gpus_for_full is None else f"{at.gpus_for_full} of these GPUs"
        what = f"{show_tokens(at.context)} tokens{rows and f' x {plan.batch:,} rows'}"
        lines.append(f"{what} with the full cache, by tensor parallelism: {gpus}")
    if plan.model.unserved:
        lines.append("No budgets or formats: kvwinnow's cache does not serve this model")
    elif plan.gpu is not None and plan.gpu.free < 0:
        lines.append("No budgets or formats of the cache: the weights do not fit")
    else:
        yield "\n".join(lines)
        yield _options(fit, whole="the windows" if _all_slide(plan) else "all")
        return
    yield "\n".join(lines)


def _options(fit: Fit, *, whole: str) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title="What fits on what there is", title_justify="left"
    )
    table.add_column("context")
    table.add_column("stored as")
    table.add_column("policy")
    for heading in ("tokens per KV head", "of all tokens", "needs of each GPU, GB", "GiB"):
        table.add_column(heading, justify="right")
    for at in fit.contexts:
        for option in at.options:
            tokens = whole if option.tokens is None else f"{option.tokens:,}"
            # Rounded down, so that the share fits too.
            share = (
                ("100%" if whole == "all" else "") if option.tokens is None else f"{int(option.share * 1000) / 10:.1f}%"
            )
            row = (_dtypes(option.k_dtype, option.v_dtype), _policy(option.policy), tokens, share)
            table.add_row(show_tokens(at.context), *row, *_both(option.nbytes))
        if not at.options:
            table.add_row(show_tokens(at.context), "nothing fits", "", "", "", "", "")
        table.add_section()
    return table


def _longest(tokens: int | None) -> str:
    if tokens is None:
        return "any, since it does not grow with the context"
    return f"{tokens:,} tokens" if tokens else "none fits"


def _feet(plan: Plan) -> str:
    counted = (
        "Counted in kvwinnow's cache: scales, zero points, positions, statistics, mean vectors, unquantised and empty "
        "slots."
        if plan.policy is not None
        else ""
    )
    return "\n".join([*(f"Note: {note}." for note in _notes(plan)), f"{plan.units}.", *filter(None, [counted])])


def _notes(plan: Plan) -> Iterator[str]:
    if plan.budget_assumed and not _all_slide(plan):
        shares = (f"{(at.budget or 0) / at.context:.1%} of {show_tokens(at.context)}" for at in plan.contexts)
        budget = plan.contexts[0].budget or 0
        yield f"no budget named: {budget:,} tokens per KV head is the default, {', '.join(shares)} tokens"
    beyond = [show_tokens(at.context + plan.new) for at in plan.contexts if at.beyond_trained]
    trained = plan.model.trained
    if plan.fit is not None and trained is not None:
        longest = (plan.fit.longest_context, plan.fit.longest_full_context)
        beyond += ["the longest context"] if any(one is None or one + plan.new > trained for one in longest) else []
    if beyond:
        limit = f"the {show_tokens(trained or 0)} tokens that the model was trained to"
        refused = "" if plan.model.unserved else ", so CompressedCache refuses such prompts"
        yield f"{', '.join(beyond)}: more than {limit}{refused}"
    if plan.policy is not None and _all_slide(plan):
        yield "all layers keep their own windows, so the policy has nothing to evict"
    if plan.policy is not None and plan.gpu is not None and plan.gpu.count > 1:
        yield "kvwinnow's cache is planned as divided by KV heads; it has not been run on several GPUs"
    sold = sold_size(plan.gpu.name) if plan.gpu is not None and plan.gpu.source == "as given" else None
    if sold is not None:
        yield sold


def _models() -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title="Models", title_justify="left")
    table.add_column("name", no_wrap=True)
    headings = ("layers", "sliding", "KV heads", "head dim", "bytes a token", "once windows are full", "parameters")
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_column("trained", justify="right")
    for key in FACTS:
        model = built_in(key)
        heads = {getattr(layer, "kv_heads", None) for layer in model.layers} - {None}
        dims = {getattr(layer, "head_dim", None) for layer in model.layers} - {None}
        table.add_row(
            key,
            str(len(model.layers)),
            _sliding(model),
            ", ".join(map(str, heads)) or "MLA",
            ", ".join(map(str, dims)) or "MLA",
            f"{model.bytes_per_token:,}",
            f"{model.bytes_per_late_token:,}",
            f"{model.parameters.total / 1e9:,.2f} billion" if model.parameters else "?",
            show_tokens(model.trained or 0),
        )
    return table


def _sliding(model: Architecture) -> str:
    """How many layers slide, and their window."""
    windows = [layer.window for layer in model.layers if isinstance(layer, Attention) and layer.window is not None]
    return f"{len(windows)} of {windows[0]:,}" if windows else "-"


def _gpus() -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        title="GPUs, in what their drivers report",
        title_justify="left",
    )
    table.add_column("name", no_wrap=True)
    table.add_column("GB", justify="right")
    table.add_column("GiB", justify="right")
    table.add_column("seen at")
    for gpu in GPUS.values():
        table.add_row(gpu.name, *_both(gpu.memory), gpu.source)
    return table


def _table(title: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title=title or None, title_justify="left")
    table.add_column("")
    table.add_column("GB", justify="right")
    table.add_column("GiB", justify="right")
    return table


def _both(nbytes: int) -> tuple[str, str]:
    """GB and GiB, with as many digits as tell something."""
    places = 2 if abs(nbytes) >= 10**9 else 4
    return f"{nbytes / 10**9:,.{places}f}", f"{nbytes / 2**30:,.{places}f}"


def _policy(text: str) -> str:
    """A policy's text form without what is the default."""
    name, _, parameters = text.partition(":")
    first = parameters.split(",")[0]
    short = f"{name}:{first}" if first.startswith("budget=") else name
    return short if str(parse(short)) == text else text


def _dtypes(keys: str, values: str) -> str:
    names = [_codec(keys), _codec(values)]
    return names[0] if names[0] == names[1] else f"K {names[0]}, V {names[1]}"


def _codec(text: str) -> str:
    """A codec's text form without what is the default."""
    name = text.partition(":")[0]
    return name if str(parse_codec(name)) == text else text
