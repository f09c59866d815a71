"""Makes one self-contained HTML page of an exploration: it loads nothing, from no network and no other file."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvwinnow.errors import KvwinnowError
from kvwinnow.simulation.explorer.exploration import NEVER, Exploration, Run
from kvwinnow.simulation.writing import replacing

SCRIPTS = ("data.js", "text.js", "details.js", "map.js", "memory.js", "figures.js", "main.js")
"""In the order in which they are read; together they are one script."""

_SPARED_BITS = 13
"""Of a float32's 23 bits behind the leading one: 10 are left, three decimal digits, which compress to half."""
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
"""Control characters and the pictures of them; HTML has no way to write the characters themselves."""


@dataclass(frozen=True)
class Shown:
    """One token of the prompt, as the template writes it.

    Attributes:
        lines: its text, cut at each newline.
        part: whether it is a part of the character that a later token shows.
    """

    lines: tuple[str, ...]
    part: bool


def check_package() -> None:
    """See that the packages which make a page are there.

    Raises:
        KvwinnowError: one is missing.
    """
    missing = [name for name in ("jinja2", "plotly") if importlib.util.find_spec(name) is None]
    if missing:
        raise KvwinnowError(
            f"the page is made with {' and '.join(missing)}, which this Python lacks; "
            "run: pip install 'kvwinnow[tools]'"
        )


def write(path: str | os.PathLike[str], exploration: Exploration) -> int:
    """Write the page, or leave what is there as it was.

    Returns:
        Its size in bytes.

    Raises:
        KvwinnowError: it cannot be written, or a package that makes it is missing.
    """
    data = page(exploration).encode("utf-8")
    with replacing(path) as draft:
        draft.write_bytes(data)
    return len(data)


def page(exploration: Exploration) -> str:
    """The page as HTML.

    Raises:
        KvwinnowError: a package that makes it is missing.
    """
    check_package()
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader(__package__, "assets"),
        autoescape=select_autoescape(["j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    first = exploration.runs[0]
    layers, heads, _ = first.evicted.shape
    return environment.get_template("page.html.j2").render(
        exploration=exploration,
        tokens=[shown(text) for text in exploration.tokens],
        layers=layers,
        heads=heads,
        steps=max(run.steps for run in exploration.runs),
        style=_asset("page.css"),
        script="\n".join(map(_asset, SCRIPTS)),
        blobs=dict(_blobs(exploration)),
        plotly=_plotly(),
    )


def shown(text: str) -> Shown:
    """A token as the template writes it."""
    return Shown(tuple(text.translate(_CONTROLS).split("\n")), not text)


def _blobs(exploration: Exploration) -> Iterator[tuple[str, str]]:
    """Everything that the script reads, by name, compressed."""
    header = {
        "model": exploration.model,
        "prompt": len(exploration.tokens),
        "sliding": exploration.sliding,
        "shape": exploration.runs[0].evicted.shape[:2],
        "never": NEVER,
        "runs": [_header(run) for run in exploration.runs],
    }
    yield "header", _packed(json.dumps(header, ensure_ascii=True, allow_nan=False).encode("ascii"))
    for number, run in enumerate(exploration.runs):
        yield f"evicted-{number}", _packed(_planes(run.evicted.astype("<u2")))
        yield f"scores-{number}", _packed(_planes(rounded(run.scores).astype("<f4")))


def _header(run: Run) -> dict[str, Any]:
    retained = None
    if run.retained is not None:
        retained = [[None if np.isnan(x) else round(float(x), 4) for x in row] for row in run.retained]
    return {
        "policy": run.policy,
        "label": run.label,
        "tokens": run.evicted.shape[2],
        "budgets": run.budgets,
        "nbytes": run.nbytes.tolist(),
        "foretold": run.foretold,
        "answer": [text.translate(_CONTROLS) for text in run.answer],
        "text": run.text,
        "notes": run.notes,
        "retained": retained,
    }


def rounded(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scores with three decimal digits, as the page holds them; infinities and NaN stay what they are."""
    bits = scores.astype(np.float32).view(np.uint32)
    half = np.uint32(1 << (_SPARED_BITS - 1))
    mask = np.uint32(0xFFFFFFFF << _SPARED_BITS & 0xFFFFFFFF)
    # Half a step may carry into the exponent, which is what rounding up means; of the largest it would make infinity.
    near = np.where(np.isfinite(scores), (bits + half) & mask, bits & mask).view(np.float32)
    return np.where(np.isnan(scores) | (np.isinf(near) & np.isfinite(scores)), scores, near)


def _planes(values: NDArray[Any]) -> bytes:
    """All first bytes, then all second ones, ...: alike bytes side by side compress far better."""
    return np.ascontiguousarray(values.reshape(-1).view(np.uint8).reshape(-1, values.itemsize).T).tobytes()


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode("ascii")


@cache
def _plotly() -> str:
    """The script of plotly.js, compressed."""
    from plotly.offline import get_plotlyjs

    return _packed(get_plotlyjs().encode("utf-8"))


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text("utf-8")
