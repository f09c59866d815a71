"""Finds a model's architecture: a built-in one by its name, a folder, a config.json, or a hub id that is cached."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import re
from pathlib import Path
from typing import Any

from kvwinnow.errors import KvwinnowError
from kvwinnow.planning.architecture import Architecture, Parameters
from kvwinnow.planning.config import architecture
from kvwinnow.planning.facts import FACTS

# Parts of names that make no other architecture.
_IDLE = ("meta", "instruct", "chat", "it", "base", "pt", "hf", "bf16", "fp8", "awq", "gptq", "int4", "2407", "2507")
# The longest header of a safetensors file that the format allows.
_LONGEST_HEADER = 100_000_000
_PLAIN = {"F32", "F16", "BF16", "F64"}


def find(name: str) -> Architecture:
    """The architecture that ``name`` means.

    Args:
        name: a folder, a config.json, a built-in name (``NAMES``; case, dots, hyphens, the owner before a slash and
            endings such as -Instruct do not matter), or a hub id whose config.json is in the Hugging Face cache.

    Raises:
        KvwinnowError: nothing is found, or it cannot be read.
    """
    if not name.strip():
        raise KvwinnowError("the model's name is empty; name a folder, a config.json or a model, such as llama-3.1-8b")
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):  # which says no to what is no path at all
        return from_folder(path)
    if os.path.isfile(path):
        return from_file(path)
    cached = _cached(name)  # what lies here is the model; a built-in one is our knowledge of it
    if cached is not None:
        return from_file(cached, name=name)
    key = _names().get(_plain(name)) or _names().get(_plain(name, bare=True))
    if key is not None:
        return built_in(key)
    raise KvwinnowError(_unknown(name))


@functools.cache
def built_in(key: str) -> Architecture:
    """The built-in architecture of this key of ``FACTS``."""
    fact = FACTS[key]
    read = architecture(fact.config, name=fact.title, source=fact.source)
    return dataclasses.replace(read, notes=(*read.notes, *filter(None, (fact.note,))))


def from_folder(folder: Path) -> Architecture:
    """Read the config.json of a model's folder, and its weights' sizes where they lie beside it as safetensors.

    Raises:
        KvwinnowError: there is no config.json, or it cannot be read.
    """
    if not os.path.isfile(folder / "config.json"):
        raise KvwinnowError(
            f"folder {str(folder)!r} holds no config.json, so it is no model; name another or a config.json"
        )
    return from_file(folder / "config.json", name=folder.resolve().name)


def from_file(file: Path, *, name: str | None = None) -> Architecture:
    """Read a config.json, and the weights' sizes where they lie beside it as safetensors.

    Raises:
        KvwinnowError: it cannot be read, or lacks what is needed.
    """
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise KvwinnowError(f"{str(file)!r} cannot be read: {error.strerror or error}; name another file") from error
    except (ValueError, RecursionError) as error:
        raise KvwinnowError(f"{str(file)!r} is no JSON ({error}); name the config.json of a model") from error
    if not isinstance(config, dict):
        raise KvwinnowError(
            f"{str(file)!r} holds a {type(config).__name__} and no object; name the config.json of a model"
        )
    called = file.resolve().parent.name if file.name == "config.json" else file.stem
    read = architecture(config, name=name or called, source=str(file))
    lying = _checkpoint(file.parent)
    if lying is None:
        return read
    nbytes, parameters = lying
    if parameters is not None and "text_config" not in config:
        known = read.parameters or Parameters(parameters)
        read = dataclasses.replace(read, parameters=dataclasses.replace(known, total=parameters))
    return dataclasses.replace(read, checkpoint=nbytes)


def _checkpoint(folder: Path) -> tuple[int, int | None] | None:
    """Bytes and parameters of the safetensors in a folder; parameters None: some are quantised; None: not there."""
    nbytes = parameters = 0
    plain = True
    files = _weight_files(folder)
    for file in files:
        header = _header(file)
        if header is None:
            return None
        for entry in header.values():
            start, end = entry["data_offsets"]
            nbytes += end - start
            elements = 1
            for size in entry["shape"]:
                elements *= size
            parameters += elements
            plain &= entry["dtype"] in _PLAIN
    return (nbytes, parameters if plain else None) if files else None


def _weight_files(folder: Path) -> list[Path]:
    """The files that an index names, all of them or none, or the single file."""
    index = folder / "model.safetensors.index.json"
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        names = ["model.safetensors"]
    files = [folder / str(name) for name in names]
    return files if all(os.path.isfile(file) for file in files) else []


def _header(file: Path) -> dict[str, dict[str, Any]] | None:
    """The entries of a safetensors file; None: it is none."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= _LONGEST_HEADER:
                return None
            header = json.loads(opened.read(length))
        return {name: entry for name, entry in header.items() if name != "__metadata__" and entry["data_offsets"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _cached(name: str) -> Path | None:
    """The config.json of a hub id in the Hugging Face cache; nothing is downloaded."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # no name that the hub allows
        return None
    return Path(found) if isinstance(found, str) else None


@functools.cache
def _names() -> dict[str, str]:
    """The key of ``FACTS`` by every plain name."""
    names = {
        _plain(name): key for key, fact in FACTS.items() for name in (*fact.aliases, fact.source.rsplit("/", 1)[-1])
    }
    return names | {_plain(key): key for key in FACTS}


def _plain(name: str, *, bare: bool = False) -> str:
    """A name without owner, case and punctuation; bare: without parts such as "instruct"."""
    parts = [part for part in re.split(r"[-_\s]+", name.strip().lower().rsplit("/", 1)[-1]) if part]
    if bare:
        parts = [part for part in parts if part not in _IDLE]
    return re.sub(r"[^a-z0-9.]", "", "".join(parts)).replace(".", "")


def _unknown(name: str) -> str:
    if name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") > 1 or "\\" in name:
        return f"{name!r} does not exist; check the path, or name a model (kvwinnow plan --list)"
    near = difflib.get_close_matches(_plain(name, bare=True), _names(), n=8, cutoff=0.6)
    keys = list(dict.fromkeys(_names()[match] for match in near))[:3]
    meant = f"did you mean {' or '.join(keys)}? " if keys else ""
    fetch = f", or fetch its config first: hf download {name} config.json" if name.count("/") == 1 else ""
    return (
        f"model {name!r} is no folder, no config.json, not in the Hugging Face cache and not built in; {meant}"
        f"see kvwinnow plan --list{fetch}"
    )
