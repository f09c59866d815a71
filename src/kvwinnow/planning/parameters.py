"""How many parameters a model has, from the fields of its config, for the families whose layers are known here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvwinnow.planning.architecture import Attention, Latent, Layer, Parameters

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """What the blocks of a family have beside attention of the layer's shape and an MLP.

    Attributes:
        gated: whether the MLP has a gate: three matrices in place of two.
        biases: which parts have biases: of "qkv", "out", "mlp" and "norms".
        norms: norms of a hidden state's width in each block.
        qk_norm: whether queries and keys have a norm each, of one head's width.
        embedded_norm: whether the token embeddings have a norm.
        learned: positions that are embedded beyond the trained length; None: positions are no embeddings.
        tied: whether the language head is the token embedding, where the config does not say.
    """

    gated: bool = True
    biases: tuple[str, ...] = ()
    norms: int = 2
    qk_norm: bool = False
    embedded_norm: bool = False
    learned: int | None = None
    tied: bool = False


_EVERY = ("qkv", "out", "mlp", "norms")

FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(),
    "phi3": Family(),
    "qwen2": Family(biases=("qkv",)),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True),
    "gemma": Family(tied=True),
    "gemma2": Family(norms=4, tied=True),
    "gemma3_text": Family(norms=4, qk_norm=True, tied=True),
    "gpt_neox": Family(gated=False, biases=_EVERY),
    "gpt2": Family(gated=False, biases=_EVERY, learned=0, tied=True),
    "opt": Family(gated=False, biases=_EVERY, learned=2, tied=True),
    "bloom": Family(gated=False, biases=_EVERY, embedded_norm=True, tied=True),
    "falcon": Family(gated=False, tied=True),
    "gpt_oss": Family(biases=("qkv", "out")),
    "deepseek_v3": Family(),
    "qwen3_next": Family(qk_norm=True),
}
"""By ``model_type``."""


def count(config: Config, layers: tuple[Layer, ...], hidden: int) -> Parameters | None:
    """The parameters of a decoder with its language head.

    None: its family is not one of ``FAMILIES``, or its config lacks a field that they follow from.

    Args:
        config: of the text decoder.
        layers: what ``config.architecture`` read from it.
        hidden: elements of a hidden state.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or not isinstance(config.get("vocab_size"), int):
        return None
    try:
        counted = _count(config, family, layers, hidden)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    return counted if counted is not None and counted.total > 0 else None


def _count(config: Config, family: Family, layers: tuple[Layer, ...], hidden: int) -> Parameters | None:
    kind, vocabulary = str(config["model_type"]), int(config["vocab_size"])
    if kind == "opt" and (
        config.get("word_embed_proj_dim", hidden) != hidden or not config.get("do_layer_norm_before", True)
    ):
        return None
    biases = set(family.biases)
    biases |= {"qkv", "out"} if config.get("attention_bias", kind == "gpt_oss") and kind != "gpt_neox" else set()
    biases |= {"mlp"} if config.get("mlp_bias") else set()
    if kind == "falcon":
        biases = {"norms"} | ({"qkv", "out", "mlp"} if config.get("bias") else set())
    if kind == "gpt_neox" and not config.get("attention_bias", True):
        biases -= {"qkv", "out"}
    norm = hidden * (2 if "norms" in biases else 1)
    tied = config.get("tie_word_embeddings", family.tied)
    embeddings = vocabulary * hidden * (1 if tied else 2)
    total = embeddings + norm + norm * family.embedded_norm  # the last hidden state's norm
    if family.learned is not None:
        positions = config.get("n_positions", config.get("max_position_embeddings", 0))
        total += (positions + family.learned) * hidden
    experts = 0
    for number, layer in enumerate(layers):
        mlp, routed = _mlp(config, kind, family, biases, hidden, number)
        experts += routed
        total += _attention(config, kind, family, biases, hidden, layer) + mlp + norm * _norms(config, kind, family)
    return Parameters(total, embeddings, experts)


def _norms(config: Config, kind: str, family: Family) -> int:
    if kind != "falcon":
        return family.norms
    if not config.get("parallel_attn", True):
        return 2
    two = config.get("num_ln_in_parallel_attn", 2 if config.get("new_decoder_architecture") else 1)
    return 2 if two == 2 and config.get("new_decoder_architecture") else 1


def _attention(config: Config, kind: str, family: Family, biases: set[str], hidden: int, layer: Layer) -> int:
    if isinstance(layer, Latent):
        return _latent(config, hidden, layer)
    if not isinstance(layer, Attention):
        return _linear(config, hidden)
    queries, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    gate = queries if kind == "qwen3_next" else 0  # its queries come with a gate for the output
    qkv = queries + gate + 2 * keys
    total = hidden * qkv + queries * hidden
    total += qkv * ("qkv" in biases) + hidden * ("out" in biases)
    total += 2 * layer.head_dim * family.qk_norm
    return total + layer.heads * (kind == "gpt_oss")  # its sinks in the softmax


def _latent(config: Config, hidden: int, layer: Latent) -> int:
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    low = config.get("q_lora_rank")
    bias = bool(config.get("attention_bias"))
    queries = layer.heads * (nope + layer.rope_dim)
    total = hidden * queries if low is None else hidden * low + low + low * queries + low * bias
    total += hidden * (layer.rank + layer.rope_dim) + (layer.rank + layer.rope_dim) * bias + layer.rank
    total += layer.rank * layer.heads * (nope + value)
    return int(total + layer.heads * value * hidden + hidden * bias)


def _linear(config: Config, hidden: int) -> int:
    """Qwen3-Next's gated delta net."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    heads, dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    values = heads * dim
    convolution = (2 * keys + values) * config["linear_conv_kernel_dim"]
    return int(hidden * (2 * keys + 2 * values + 2 * heads) + convolution + 2 * heads + dim + values * hidden)


def _mlp(config: Config, kind: str, family: Family, biases: set[str], hidden: int, number: int) -> tuple[int, int]:
    """Parameters of one block's MLP, and how many of them are routed experts'."""

    def dense(width: int) -> int:
        bias = ((2 if family.gated else 1) * width + hidden) * ("mlp" in biases)
        return (3 if family.gated else 2) * hidden * width + bias

    inner = config.get("intermediate_size") or config.get("n_inner") or config.get("ffn_hidden_size")
    inner = int(inner or config.get("ffn_dim") or 4 * hidden)
    if not _is_sparse(config, kind, number):
        return dense(inner), 0
    experts = int(config.get("n_routed_experts") or config.get("num_local_experts") or config["num_experts"])
    width = int(config.get("moe_intermediate_size") or inner)
    each = dense(width)
    router = hidden * experts
    if kind == "gpt_oss":  # its experts and its router have biases, which stay at 16 bits
        router += experts + experts * (2 * width + hidden)
    shared = 0
    if kind == "deepseek_v3":
        router += experts  # the bias that balances their load, which is stored with the weights
        shared = dense(width * int(config.get("n_shared_experts") or 0))
    if kind == "qwen3_next":  # a shared expert with a gate
        shared = dense(int(config["shared_expert_intermediate_size"])) + hidden
    return experts * each + router + shared, experts * each


def _is_sparse(config: Config, kind: str, number: int) -> bool:
    """Whether a block's MLP is a mixture of experts."""
    if kind == "deepseek_v3":
        return bool(number >= config.get("first_k_dense_replace", 3))
    if kind in ("qwen3_moe", "qwen3_next"):
        step = config.get("decoder_sparse_step", 1)
        return number not in (config.get("mlp_only_layers") or []) and (number + 1) % step == 0
    return kind in ("mixtral", "gpt_oss")
