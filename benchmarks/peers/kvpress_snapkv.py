"""kvpress's SnapKV: it prunes a DynamicCache once the prompt is in. Window and kernel are its own defaults."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch
from contract import Answer, Task, serve
from kvpress import SnapKVPress
from torch_decoding import Kind, generate, loaded, random_tokens, storages
from transformers import DynamicCache

SETTINGS = {"snapkv-8x": 0.875}
"""The share of the tokens that is thrown away."""


def run(task: Task) -> Answer:
    if task.setting not in SETTINGS:
        raise ValueError(f"setting {task.setting!r} is none of {', '.join(SETTINGS)}")
    model = loaded(task)
    press = SnapKVPress(compression_ratio=SETTINGS[task.setting])

    def fill(cache: Any, count: int) -> None:
        torch.manual_seed(0)
        for index in range(model.config.num_hidden_layers):
            cache.update(*random_tokens(model, int(count * (1 - press.compression_ratio))), index)

    kind = Kind(DynamicCache, storages, "storages of its tensors", fill, lambda: press(model), positions=True)
    return generate(model, kind, task, importlib.metadata.version("kvpress"))


if __name__ == "__main__":
    raise SystemExit(serve(run))
