"""The default model's conversion: exact, once, safe against interruption and against other processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvwinnow.errors import KvwinnowError
from kvwinnow.integrations import default_model

pytestmark = pytest.mark.smollm2

CONVERT = "from kvwinnow.integrations import default_model; print(default_model.ensure(print))"


def convert(cache: Path) -> subprocess.Popen[str]:
    """A process that converts into a cache folder of its own."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", CONVERT],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_model_and_tokenizer(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    assert default_model.is_converted()
    assert model.dtype == torch.float32
    assert model.config.max_position_embeddings == default_model.TRAINED_CONTEXT
    assert not getattr(model.config, "quantization_config", None)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (tokenizer.eos_token_id, model.generation_config.eos_token_id) == (end, end)
    assert not model.generation_config.do_sample
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.slow
def test_logits_are_those_of_the_original_file(smollm2: tuple[Any, Any]) -> None:
    model, _ = smollm2
    source = default_model.gguf_file()
    assert source is not None
    with default_model.quiet_bars():
        original: Any = AutoModelForCausalLM.from_pretrained(
            str(source.parent), gguf_file=source.name, dtype=torch.float32
        )
    ids = torch.arange(100, 200).unsqueeze(0)
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, original(ids).logits)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="moves the cache folder by XDG_CACHE_HOME")
def test_interrupted_and_simultaneous_conversions(tmp_path: Path) -> None:
    models = tmp_path / "kvwinnow" / "models"
    killed = convert(tmp_path)
    assert killed.stdout is not None
    for line in killed.stdout:
        if line.startswith("writing"):
            break
    while not list(models.glob(".*/config.json")):
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not (models / "smollm2-135m-instruct").exists()

    processes = [convert(tmp_path) for _ in range(2)]
    said = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum("writing" in text for text in said) == 1  # the other one waited
    assert sorted(path.name for path in models.iterdir() if path.suffix != ".lock") == ["smollm2-135m-instruct"]
    config = json.loads((models / "smollm2-135m-instruct" / "config.json").read_text())
    assert "quantization_config" not in config


@pytest.mark.skipif(sys.platform != "linux", reason="moves the cache folder by XDG_CACHE_HOME")
def test_a_cache_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kvwinnow").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not default_model.is_converted()
    with pytest.raises(KvwinnowError, match=rf"could not be converted into {tmp_path}.*0\.6 GB"):
        default_model.ensure()


@pytest.mark.skipif(sys.platform != "linux", reason="moves the cache folder by XDG_CACHE_HOME")
@pytest.mark.parametrize("stamp", ["{", "[]", '{"format": 0}'])
def test_an_older_or_torn_conversion_does_not_count(
    stamp: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    default_model.model_dir().mkdir(parents=True)
    (default_model.model_dir() / "kvwinnow.json").write_text(stamp)
    assert not default_model.is_converted()


def test_progress_bars_come_back() -> None:
    import transformers.modeling_gguf_pytorch_utils as reader
    from transformers.utils import logging

    bar, shown = reader.tqdm, logging.is_progress_bar_enabled()
    with default_model.quiet_bars():
        assert not logging.is_progress_bar_enabled()
        assert list(reader.tqdm([1, 2], desc="reading")) == [1, 2]
    assert reader.tqdm is bar
    assert logging.is_progress_bar_enabled() == shown
