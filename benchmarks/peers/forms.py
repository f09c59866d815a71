"""Where the forms of a model lie that some peers want, and whether they are still those of that model."""

from __future__ import annotations

from pathlib import Path


def place_of(model: Path) -> Path:
    """The folder for the forms of the model in a folder: beside it."""
    return model.parent / f"{model.name}.forms"


def made_from(form: Path, model: Path) -> bool:
    """Whether the file ``form`` is there and no older than any file of the model."""
    return form.is_file() and form.stat().st_mtime >= max(file.stat().st_mtime for file in model.iterdir())
