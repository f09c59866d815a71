"""``kvwinnow doctor``."""

from __future__ import annotations

import importlib.metadata
import platform

from rich.table import Table
from rich.text import Text

from kvwinnow import __version__
from kvwinnow.cli.console import BAD_INPUT, out, stages


def doctor() -> int:
    """Say what is installed, what will compute, and where the default model lies."""
    with stages() as show:
        show("looking around")
        backend, refused = _backend()
        rows = [
            ("kvwinnow", __version__),
            ("Python", f"{platform.python_version()} on {platform.platform()}"),
            *((package, _version(package)) for package in ("torch", "transformers")),
            ("device", _device()),
            *backend,
            *_default_model(),
        ]
    table = Table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    out().print(table)
    return BAD_INPUT if refused else 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"not installed; pip install {package}"


def _device() -> str:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its libraries is damaged
        return f"unknown, since torch cannot be imported: {error}"
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()} (cuda)"
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"


def _backend() -> tuple[list[tuple[str, str]], bool]:
    """What to say of it, and whether what the environment asks for is refused."""
    try:
        from kvwinnow.ops.cpu.report import report
    except (ImportError, OSError):  # torch, as said above
        return [], False
    found = report()
    rows = [("back end on CPUs", found.backend), ("since", found.why), ("faster would be", found.faster)]
    return rows, found.refused


def _default_model() -> list[tuple[str, str]]:
    from kvwinnow.integrations import default_model

    source = default_model.gguf_file()
    found = f"found: {source}" if source else f"not installed; {default_model.INSTALL}"
    folder = default_model.model_dir()
    lies = f"{folder}" if default_model.is_converted() else f"not yet; the first use writes it to {folder}"
    return [("default model", default_model.NAME), ("its package", found), ("converted", lies)]
