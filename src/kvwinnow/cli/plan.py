"""``kvwinnow plan``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvwinnow.cli.console import out
from kvwinnow.errors import KvwinnowError


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A folder, a config.json, a cached hub id, or a built-in name such as llama-3.1-70b (see --list).",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        list[str] | None,
        typer.Option(help="Tokens of the prompt: 4096, 128k, 1M, or several: 32k,64k.  [default: as trained]"),
    ] = None,
    batch: Annotated[str, typer.Option(help="Prompts that are read together.")] = "1",
    gpu: Annotated[
        str | None,
        typer.Option(help="Such as H100-80GB, H100-80GBx8, 24GiB or 2x48GiB.", show_default=False),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="Which tokens kvwinnow's cache keeps; see kvwinnow policies.", show_default=False),
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="How it stores keys and values: bf16, fp8, int8, int4, ...", show_default=False)
    ] = None,
    k_dtype: Annotated[str | None, typer.Option(help="The same for keys alone.", show_default=False)] = None,
    v_dtype: Annotated[str | None, typer.Option(help="The same for values alone.", show_default=False)] = None,
    weights_dtype: Annotated[
        str | None,
        typer.Option(
            help="fp32, bf16, fp16, fp8, int8, int4, nvfp4 or mxfp4.  [default: as published]", show_default=False
        ),
    ] = None,
    parameters: Annotated[
        str | None, typer.Option(help="How many, such as 70B, where the config does not tell.", show_default=False)
    ] = None,
    new_tokens: Annotated[str, typer.Option(help="Tokens decoded after each prompt.")] = "0",
    prefill_chunk: Annotated[
        str, typer.Option(help="Tokens of the prompt that are read at once; none: the whole prompt.")
    ] = "2k",
    block_size: Annotated[str, typer.Option(help="Tokens in a block of vLLM's cache.")] = "16",
    overhead: Annotated[
        str, typer.Option(help="Of each GPU, kept free of weights and cache: a share or a size such as 2GiB.")
    ] = "10%",
    fit: Annotated[
        bool, typer.Option("--fit", help="Look for the longest context, and the budget and format that would fit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as one JSON document.")] = False,
    budget: Annotated[str | None, typer.Option(hidden=True)] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the built-in models and GPUs.")] = False,
) -> None:
    """Say how much memory a model and its cache take and what fits on a GPU, before anything is loaded."""
    from kvwinnow.planning import plan as compute
    from kvwinnow.planning.render import show, show_catalogue

    if listing:
        if model is not None or as_json:
            raise KvwinnowError("--list prints the built-in models and GPUs and nothing else; leave the rest out")
        show_catalogue(out())
        return
    if budget is not None:
        raise KvwinnowError(
            f"--budget {budget} is no option of plan, as each policy has its own; write it into the policy: "
            f"--policy snapkv:budget={budget}"
        )
    if model is None:
        raise KvwinnowError("the model is missing; name one, such as kvwinnow plan llama-3.1-8b, or see --list")
    if kv_dtype is not None and (k_dtype is not None or v_dtype is not None):
        raise KvwinnowError(
            f"--kv-dtype {kv_dtype} names both dtypes, and {k_dtype or v_dtype} is beside it; give it alone, or "
            "--k-dtype and --v-dtype"
        )
    contexts = [part for one in context or () for part in one.split(",")]
    planned = compute(
        model,
        context=contexts or None,
        batch=batch,
        gpu=gpu,
        policy=policy,
        dtype=kv_dtype,
        k_dtype=k_dtype,
        v_dtype=v_dtype,
        weights_dtype=weights_dtype,
        parameters=parameters,
        new=new_tokens,
        chunk=prefill_chunk,
        block=block_size,
        overhead=overhead,
        fit=fit,
    )
    if as_json:
        typer.echo(json.dumps(planned.to_json(), indent=2))
    else:
        show(planned, out())
