"""The models that all peers run, made once into the user's cache folder; other forms of them lie beside, in NAME.forms.

Nothing is downloaded. SmolLM2 is the default model, read from its 4-bit GGUF file and rounded to bfloat16; the other is
a Llama of 1B shape with random weights, of which only speed and bytes mean something.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs
from filelock import FileLock

from kvwinnow.integrations import default_model

SMOLLM2, LLAMA_1B = "smollm2", "llama-1b"
# Raised whenever what is written changes, so that older forms are made again.
_FORMAT = 1
_STAMP = "kvwinnow.json"
Progress = Callable[[str], None]


def root() -> Path:
    """Where the models lie."""
    return Path(platformdirs.user_cache_dir("kvwinnow")) / "peers"


def made(model: str, progress: Progress) -> Path:
    """The folder of a model as safetensors in bfloat16 with its tokenizer, made first if need be.

    Args:
        model: SMOLLM2 or LLAMA_1B.
        progress: told what is made.

    Raises:
        KvwinnowError: the default model is not installed.
        OSError: no space, or no right to write.
    """
    return _once(model, _WRITERS[model], progress)


def _once(name: str, write: Callable[[Path], None], progress: Progress) -> Path:
    """The folder ``name``, written as a whole or not at all, by one process at a time."""
    target = root() / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f"{name}.lock"):
        if _stamped(target):
            return target
        progress(f"making the model {name}")
        with _draft(target) as draft:
            write(draft)
            (draft / _STAMP).write_text(json.dumps({"format": _FORMAT}), encoding="utf-8")
    return target


def _stamped(target: Path) -> bool:
    try:
        return bool(json.loads((target / _STAMP).read_text(encoding="utf-8")) == {"format": _FORMAT})
    except (OSError, ValueError):
        return False


@contextmanager
def _draft(target: Path) -> Iterator[Path]:
    # Under the lock every folder of this prefix is what a killed process left. Other forms were made of an older model.
    for stale in (target, target.with_name(f"{target.name}.forms"), *target.parent.glob(f".{target.name}-*")):
        shutil.rmtree(stale, ignore_errors=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield draft
        os.replace(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _smollm2(target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = default_model.ensure()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    with default_model.quiet_bars():
        model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, local_files_only=True).save_pretrained(target)


def _llama_1b(target: Path) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(default_model.ensure(), local_files_only=True)
    tokenizer.save_pretrained(target)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    with default_model.quiet_bars():
        model.save_pretrained(target)


_WRITERS: dict[str, Callable[[Path], None]] = {SMOLLM2: _smollm2, LLAMA_1B: _llama_1b}
