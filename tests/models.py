"""Tiny random models of every served structure, whose attention is far from flat; on the CPU, in float32, seeded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

VOCABULARY = 200
IMAGE = VOCABULARY
"""The token that stands for a part of an image, in vision-language models."""
WINDOW = 12
"""Window of sliding layers."""


@dataclass(frozen=True)
class Kind:
    """A family of models.

    Attributes:
        name: of its classes in transformers: ``<name>Config`` and ``<name>ForCausalLM``, or as ``model`` says.
        own: fields of its config that tests of this family need.
        model: the model's class; None: see ``name``.
        features: what sets its structure apart, for docs/models.md.
        multi_head: whether every query head has its own KV head, whatever ``kv_heads`` says.
        text: the config's class of the text decoder inside a vision-language model.
    """

    name: str
    features: str
    own: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    multi_head: bool = False
    text: str | None = None


def rope(kind: str, factor: float | None = 4.0, **more: Any) -> dict[str, Any]:
    """A RoPE scaling; tiny models have a trained length of 512."""
    scaled = {} if factor is None else {"factor": factor}
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **scaled, **more}}


MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
    "window_size": 16, "fullatt_block_indexes": [1], "out_hidden_size": 64,
}  # fmt: skip
SIGLIP = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip

KINDS: dict[str, Kind] = {
    "llama": Kind("Llama", "GQA, RoPE"),
    "mistral": Kind("Mistral", "GQA, RoPE, no window", {"sliding_window": None}),
    "qwen2": Kind("Qwen2", "GQA, RoPE, biases", {"use_sliding_window": False}),
    "qwen3": Kind("Qwen3", "GQA, RoPE, normalised queries and keys", {"use_sliding_window": False}),
    "llama, llama3 rope": Kind("Llama", "RoPE scaled as in Llama 3", rope("llama3", 8.0, **LLAMA3)),
    "llama, linear rope": Kind("Llama", "RoPE scaled linearly", rope("linear")),
    "llama, yarn rope": Kind("Llama", "RoPE scaled by YaRN", rope("yarn", original_max_position_embeddings=128)),
    "mistral, sliding": Kind("Mistral", "every layer slides", {"sliding_window": WINDOW}),
    "qwen2, sliding": Kind(
        "Qwen2", "upper layers slide", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    ),
    "phi3": Kind("Phi3", "MHA or GQA, fused projections", {"sliding_window": None}),
    "phi3, sliding": Kind("Phi3", "every layer slides", {"sliding_window": WINDOW}),
    "gemma2": Kind(
        "Gemma2",
        "logits soft-capped, every other layer slides",
        {**MIXED, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 16, "attn_implementation": "eager"},
    ),
    "gemma3": Kind("Gemma3", "most layers slide, each type with its own RoPE", {**MIXED, "query_pre_attn_scalar": 16}),
    "gpt_neox": Kind("GPTNeoX", "MHA, RoPE on a part of each head", multi_head=True),
    "gpt2": Kind("GPT2", "MHA, learned positions, no RoPE", model="GPT2LMHeadModel", multi_head=True),
    "gpt2, scaled by layer": Kind(
        "GPT2",
        "logits divided by the layer's number",
        {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
        model="GPT2LMHeadModel",
        multi_head=True,
    ),
    "falcon": Kind("Falcon", "MQA, calls torch's attention itself", {"multi_query": True, "alibi": False}),
    "falcon, new": Kind(
        "Falcon",
        "GQA, repeats keys and values before it caches them",
        {"new_decoder_architecture": True, "alibi": False},
    ),
    "mixtral": Kind(
        "Mixtral", "mixture of experts", {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "qwen3_moe": Kind("Qwen3Moe", "mixture of experts", {"num_experts": 4, **EXPERTS}),
    "gpt_oss": Kind(
        "GptOss",
        "learned sinks in the softmax, every other layer slides, YaRN, mixture of experts",
        {
            **MIXED,
            **rope("yarn", original_max_position_embeddings=128),
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attn_implementation": "eager",
        },
    ),
    "qwen2_5_vl": Kind(
        "Qwen2_5_VL",
        "text decoder of a vision-language model, M-RoPE",
        model="Qwen2_5_VLForConditionalGeneration",
        text="Qwen2_5_VLTextConfig",
    ),
    "gemma3, vision": Kind(
        "Gemma3",
        "text decoder of a vision-language model; text alone, since its images see each other in both directions",
        {**MIXED, "query_pre_attn_scalar": 16},
        model="Gemma3ForConditionalGeneration",
        text="Gemma3TextConfig",
    ),
}

PLAIN = ("llama", "mistral", "qwen2", "qwen3")
"""Those whose attention has a scale and nothing else, and no other trait: tests of policies try all of them."""


def shown(kind: str) -> str:
    """A name for test ids."""
    return kind.replace(", ", "-").replace(" ", "-")


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
    family = KINDS[kind]
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": heads * dim,
        "intermediate_size": 2 * heads * dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if family.multi_head else kv_heads,
        "head_dim": dim,
        "max_position_embeddings": trained,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        **family.own,
        **config,
    }
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][:layers]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = _config(family, fields)
        model = getattr(transformers, family.model or f"{family.name}ForCausalLM")(made)
        for name, parameter in model.named_parameters():
            if name.endswith(".sinks"):
                nn.init.normal_(parameter)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model.float().eval()


def _config(family: Kind, fields: dict[str, Any]) -> Any:
    name = family.name
    if name == "GPT2":
        fields = {**fields, "n_inner": fields.pop("intermediate_size")}
    if name in ("GPT2", "GPTNeoX"):
        fields = {key: value for key, value in fields.items() if key not in ("num_key_value_heads", "head_dim")}
    if name == "Falcon":
        fields = {**fields, "num_kv_heads": fields["num_key_value_heads"], "ffn_hidden_size": fields["hidden_size"]}
        left_out = ("num_key_value_heads", "head_dim", "intermediate_size")
        fields = {key: value for key, value in fields.items() if key not in left_out}
    if family.text is None:
        kind = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
        return getattr(transformers, kind)(**fields)
    text = {key: value for key, value in fields.items() if key != "tie_word_embeddings"} | {"vocab_size": IMAGE + 8}
    outer: dict[str, Any] = {"text_config": text, "tie_word_embeddings": False}
    if name == "Gemma3":
        tokens = {"image_token_index": IMAGE, "boi_token_index": IMAGE + 2, "eoi_token_index": IMAGE + 3}
        tokens["mm_tokens_per_image"] = 4
        return transformers.Gemma3Config(**outer, vision_config=SIGLIP, **tokens)
    part = fields["head_dim"] // 16
    text |= rope("default", None, mrope_section=[2 * part, 3 * part, 3 * part])
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = {name: IMAGE + i for i, name in enumerate(names)}
    vision = {**VISION, "out_hidden_size": fields["hidden_size"]}
    return transformers.Qwen2_5_VLConfig(**outer, vision_config=vision, **tokens)


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
