"""transformers' own caches: DynamicCache, and QuantizedCache with each back end that runs on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from contract import Answer, Task, serve
from torch_decoding import Kind, generate, loaded, random_tokens, storages
from transformers import DynamicCache, QuantizedCache

# Axes and groups as transformers' documentation gives them for each back end.
QUANTISED: dict[str, tuple[str, dict[str, int]]] = {
    "quanto-int4": ("quanto", {"nbits": 4, "axis_key": 0, "axis_value": 0, "q_group_size": 64}),
    "hqq-int4": ("hqq", {"nbits": 4, "axis_key": 1, "axis_value": 1, "q_group_size": 64}),
    "fp8": ("fp8", {}),
}
SETTINGS = ("dynamic", *QUANTISED)


def new_cache(setting: str, config: Any) -> Any:
    """An empty cache.

    Raises:
        ValueError: the setting is unknown.
    """
    if setting == "dynamic":
        return DynamicCache()
    if setting not in QUANTISED:
        raise ValueError(f"setting {setting!r} is none of {', '.join(SETTINGS)}")
    backend, options = QUANTISED[setting]
    return QuantizedCache(backend, config, **options)


def run(task: Task) -> Answer:
    model = loaded(task)

    def fill(cache: Any, count: int) -> None:
        torch.manual_seed(0)
        for index in range(model.config.num_hidden_layers):
            cache.update(*random_tokens(model, count), index)

    kind = Kind(lambda: new_cache(task.setting, model.config), storages, "storages of its tensors", fill)
    return generate(model, kind, task, transformers.__version__)


if __name__ == "__main__":
    raise SystemExit(serve(run))
