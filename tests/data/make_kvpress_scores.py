"""What kvpress 0.5.5 scores and keeps on two tiny models: run once, in an environment of its own (see README.md).

Writes kvpress_scores.safetensors (the models' weights, a prompt, and for each press the scores and the kept positions
of each layer) and kvpress_facts.json (the models' configurations, the settings of the presses, the fields and defaults
of all press classes, and PyramidKVPress's layer budgets), beside this file.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvpress
import torch
from safetensors.torch import save_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
TOKENS = 60
CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
# kvpress's TOVAPress averages over all heads, so that only a model of one KV head compares.
MODELS = {"two": {**CONFIG, "num_key_value_heads": 2}, "one": {**CONFIG, "num_key_value_heads": 1}}
RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "knorm": ("two", "KnormPress", {"compression_ratio": 0.5}),
    "keydiff": ("two", "KeyDiffPress", {"compression_ratio": 0.6}),
    "tova": ("one", "TOVAPress", {"compression_ratio": 0.5}),
    "snapkv": ("two", "SnapKVPress", {"compression_ratio": 0.5, "window_size": 8, "kernel_size": 5}),
    "streaming": ("two", "StreamingLLMPress", {"compression_ratio": 0.7, "n_sink": 3}),
    "expected": ("two", "ExpectedAttentionPress", {"compression_ratio": 0.5}),
    "expected-mean": (
        "two",
        "ExpectedAttentionPress",
        {"compression_ratio": 0.4, "n_future_positions": 32, "n_sink": 2, "use_covariance": False, "epsilon": 0.02},
    ),
    "expected-weights": ("one", "ExpectedAttentionPress", {"compression_ratio": 0.5, "use_vnorm": False}),
    "pyramidkv": ("two", "PyramidKVPress", {"compression_ratio": 0.6, "window_size": 4, "kernel_size": 3, "beta": 4}),
    "observed": ("two", "ObservedAttentionPress", {"compression_ratio": 0.5}),
}
PYRAMIDS = [
    {"tokens": tokens, "compression_ratio": ratio, "window_size": window, "beta": beta, "layers": layers}
    for tokens in (256, 2000, 8192)
    for ratio in (0.25, 0.5, 0.75)
    for window in (8, 64)
    for beta in (1, 2, 20)
    for layers in (1, 2, 5, 32)
]


def run(model: LlamaForCausalLM, ids: torch.Tensor, press: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Each layer's scores (Hkv, n) and kept positions (Hkv, kept)."""
    scores: list[torch.Tensor] = []
    original = press.score

    def score(*args: Any, **kwargs: Any) -> torch.Tensor:
        scores.append(original(*args, **kwargs))
        return scores[-1]

    press.score = score
    whole, cut = DynamicCache(), DynamicCache()
    with torch.no_grad():
        model(ids, past_key_values=whole)
        with press(model):
            model(ids, past_key_values=cut)
    del press.score
    kept = []
    for layer, all_scores in enumerate(scores):
        count = cut.layers[layer].keys.shape[2]
        places = all_scores.topk(count, dim=-1).indices
        assert torch.equal(
            whole.layers[layer].keys.gather(2, places.unsqueeze(-1).expand(-1, -1, -1, CONFIG["head_dim"])),
            cut.layers[layer].keys,
        ), "what is written down is what the press left in the cache"
        kept.append(places[0].sort(-1).values.to(torch.int32))
    return [one[0].float() for one in scores], kept


def fields(press: type) -> dict[str, Any]:
    """The fields a press is made with and their defaults; "required" where there is none."""
    shown: dict[str, Any] = {}
    for field in dataclasses.fields(press):
        plain = isinstance(field.default, int | float | str | None) and field.default is not dataclasses.MISSING
        if field.init:
            shown[field.name] = field.default if plain else "required"
    return shown


def main() -> None:
    torch.manual_seed(0)
    # No token twice: keys of equal norm would be told apart by rounding alone.
    tensors: dict[str, torch.Tensor] = {"ids": 2 + torch.randperm(CONFIG["vocab_size"] - 2)[:TOKENS].unsqueeze(0)}
    models = {}
    for name, config in MODELS.items():
        models[name] = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager")).float().eval()
        tensors |= {f"{name}.{key}": value.contiguous() for key, value in models[name].state_dict().items()}
    for name, (model, press, settings) in RUNS.items():
        scores, kept = run(models[model], tensors["ids"], getattr(kvpress, press)(**settings))
        for layer in range(len(kept)):
            tensors[f"{name}.scores.{layer}"], tensors[f"{name}.kept.{layer}"] = scores[layer], kept[layer]
    save_file(tensors, HERE / "kvpress_scores.safetensors")

    presses = [getattr(kvpress, name) for name in sorted(kvpress.__all__) if name.endswith("Press")]
    pyramids = []
    for case in PYRAMIDS:
        press = kvpress.PyramidKVPress(
            compression_ratio=case["compression_ratio"], window_size=case["window_size"], beta=case["beta"]
        )
        config = SimpleNamespace(num_hidden_layers=case["layers"])
        layers = [SimpleNamespace(config=config, layer_idx=layer) for layer in range(case["layers"])]
        pyramids.append({**case, "budgets": [press.get_layer_budget(layer, case["tokens"]) for layer in layers]})
    ratios = [0.1, 0.25, 0.3, 0.5, 0.7, 0.8, 0.9]
    facts = {
        "version": "0.5.5",
        "models": MODELS,
        "runs": {name: {"model": run[0], "press": run[1], "settings": run[2]} for name, run in RUNS.items()},
        "fields": {press.__name__: fields(press) for press in presses if dataclasses.is_dataclass(press)},
        "pyramids": pyramids,
        "kept": [
            {"tokens": n, "compression_ratio": r, "kept": kvpress.presses.scorer_press.compute_n_kept(n, r)}
            for n in (1, 7, 10, 60, 100, 1000, 4097)
            for r in ratios
        ],
    }
    assert all(math.isfinite(float(t.float().abs().sum())) for t in tensors.values())
    text = json.dumps(facts, indent=1).replace("\n   ", " ").replace("\n  ]", "]").replace("\n  }", "}")
    (HERE / "kvpress_facts.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
