"""Tiny random models of every served structure, whose attention is far from flat; on the CPU, in float32, seeded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 200

KINDS: dict[str, tuple[type[Any], type[PreTrainedModel], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"use_sliding_window": False}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"use_sliding_window": False}),
}


def tiny_model(
    kind: str = "llama",
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    layers: int = 2,
    trained: int = 512,
    seed: int = 0,
    **config: Any,
) -> PreTrainedModel:
    """A random model in eval mode; the same arguments give the same weights.

    Args:
        kind: one of ``KINDS``.
        heads: query heads Hq.
        kv_heads: key/value heads Hkv.
        dim: head dimension D.
        layers: number of layers.
        trained: ``max_position_embeddings``.
        seed: of the weights.
        config: further fields of the model's config.
    """
    make_config, make_model, own = KINDS[kind]
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": heads * dim,
        "intermediate_size": 2 * heads * dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "max_position_embeddings": trained,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model(make_config(**{**fields, **own, **config}))
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model.float().eval()


def tiny_tokens(*lengths: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts of these lengths as one left-padded batch: input ids and attention mask, both (rows, longest)."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = torch.randint(2, VOCABULARY, (length,), generator=generator)
        mask[row, longest - length :] = 1
    return ids, mask
