"""Loads a model and its tokenizer from this machine: the default model, a folder, or a hub id that is cached."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, cast

from kvwinnow.errors import KvwinnowError
from kvwinnow.integrations import default_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_HUB_ID = re.compile(r"[\w.\-]+(/[\w.\-]+)?")

# Nothing is downloaded and no code that lies beside the weights is run.
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def load(
    name_or_path: str | None = None,
    dtype: torch.dtype | None = None,
    *,
    device: str | None = None,
    progress: default_model.Progress | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A decoder model in evaluation mode and its tokenizer, without network.

    Args:
        name_or_path: a folder in the format of ``save_pretrained``, a hub id whose files are in the Hugging Face cache,
            or None for the default model, which is converted on first use.
        dtype: of the weights; None: float32 on the CPU, bfloat16 on an accelerator.
        device: as torch spells it; None: ``best_device()``.
        progress: called with a few words at each stage that takes time.

    Raises:
        KvwinnowError: nothing loadable is there; the message is one sentence.
        UnsupportedSetupError: the environment asks for kernels that are not there.
    """
    import torch

    from kvwinnow.ops.cpu.level import current

    current()  # a level that is not there is refused now, not once the model is loaded
    progress = progress or (lambda stage: None)
    device = device or best_device()
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    source = str(default_model.ensure(progress)) if name_or_path is None else _checked(name_or_path)
    progress(f"loading {default_model.NAME if name_or_path is None else name_or_path}")
    with default_model.quiet_bars():
        config = _config(source)
        model = _model(source, config, dtype)
        tokenizer = _tokenizer(source)
    return model.to(device).eval(), tokenizer  # type: ignore[arg-type]


def best_device() -> str:
    """Where a model runs when nothing else is said: "cuda" if torch can use a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _checked(name: str) -> str:
    path = os.path.expanduser(name)
    if not name.strip():
        raise KvwinnowError(
            "the model's name is empty; name a folder or a hub id, or leave it out for the default model"
        )
    if os.path.isfile(path):
        raise KvwinnowError(f"model {name!r} is a file; name the folder that holds it and its config.json")
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "config.json")):
            raise KvwinnowError(
                f"folder {name!r} holds no config.json, so it is no model; name one that was written by save_pretrained"
            )
        return path
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise KvwinnowError(
            f"model folder {name!r} does not exist; check the path, or leave it out for the default model"
        )
    if not _HUB_ID.fullmatch(name):
        raise KvwinnowError(
            f"{name[:60]!r} is no model name and no folder here; name a folder or a hub id first and the question "
            "after it, or leave the model out for the default one"
        )
    return name


def _config(source: str) -> PreTrainedConfig:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, **_LOCAL)
    except Exception as error:  # transformers raises many kinds here, KeyError and TypeError among them
        if not os.path.isdir(source):
            raise KvwinnowError(
                f"model {source!r} is neither a folder nor in the Hugging Face cache of this machine; kvwinnow "
                f"downloads nothing: fetch it first with `hf download {source}`"
            ) from error
        raise KvwinnowError(f"the config.json of model {source!r} cannot be used: {reason(error)}") from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise KvwinnowError(
            f"model {source!r} is of type {config.model_type!r}, which generates no text; name a decoder model"
        )
    return config


def _model(source: str, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    try:
        model, info = auto.from_pretrained(source, config=config, dtype=dtype, output_loading_info=True, **_LOCAL)
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise KvwinnowError(f"the weights of model {source!r} cannot be read: {reason(error)}") from error
    # transformers would fill these with random numbers and only warn.
    missing = sorted(info["missing_keys"])
    if missing:
        raise KvwinnowError(
            f"the weights of model {source!r} lack {len(missing)} tensors that its config.json asks for, the first of "
            f"them {missing[0]!r}; the two do not belong together"
        )
    return cast("PreTrainedModel", model)


def _tokenizer(source: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(source, **_LOCAL))
    except Exception as error:
        raise KvwinnowError(
            f"model {source!r} has no tokenizer that can be read (tokenizer.json and tokenizer_config.json); save one "
            "beside the weights with tokenizer.save_pretrained"
        ) from error


def reason(error: Exception) -> str:
    """The first sentence of somebody else's message, which may run over many lines."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.split(". ")[0].rstrip(".")
