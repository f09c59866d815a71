"""A trace by its name: one that comes with the package, or a file whose ending says what it is."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from kvwinnow.errors import TraceError
from kvwinnow.simulation import parquet
from kvwinnow.simulation.text_traces import from_csv, from_jsonl
from kvwinnow.simulation.trace import DEMOS, Trace

_TEXTS = {".csv": from_csv, ".jsonl": from_jsonl, ".ndjson": from_jsonl}


def read_trace(name: str, *, prompt: int | None = None) -> Trace:
    """The trace of that name.

    Args:
        name: "demo", "demo-rows", or a file ending in .csv, .jsonl or .parquet.
        prompt: how many of its tokens are the prompt, for traces that do not say it; None: none.

    Raises:
        TraceError: there is none, it cannot be read, or its prompt is recorded and another one is asked for.
    """
    if name in DEMOS:
        trace = DEMOS[name]()
        return trace if prompt is None else replace(trace, prompt=prompt)
    path = os.path.expanduser(name)
    kind = Path(path).suffix.lower()
    if kind == ".parquet":
        trace = parquet.read(path)
        if prompt is not None and prompt != trace.prompt:
            raise TraceError(
                f"the trace was recorded with a prompt of {trace.prompt:,} tokens, so its prompt cannot be {prompt:,}; "
                "leave that out, or record the other one"
            )
        return trace
    if kind not in _TEXTS:
        raise TraceError(
            f"trace {name!r} is neither {' nor '.join(DEMOS)} nor a file ending in .csv, .jsonl or .parquet; name one"
        )
    return _TEXTS[kind](_text(path, name), name, prompt or 0)


def _text(path: str, name: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8").removeprefix("\ufeff")
    except FileNotFoundError as error:
        raise TraceError(f"trace {name!r} does not exist; check the path, or name {' or '.join(DEMOS)}") from error
    except IsADirectoryError as error:
        raise TraceError(f"trace {name!r} is a folder; name a file in it") from error
    except OSError as error:
        raise TraceError(f"trace {name!r} cannot be read: {error.strerror or error}; name another file") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"trace {name!r} is not UTF-8 text (byte {error.start}); convert it to UTF-8 first") from error
    except ValueError as error:
        raise TraceError(f"trace {name!r} is no path ({error}); name a file") from error
