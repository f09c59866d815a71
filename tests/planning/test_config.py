"""An architecture read from a config equals what the model itself shows, or what transformers' own config derives."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwinnow.errors import KvwinnowError, UnsupportedModelError
from kvwinnow.integrations.transformers.structure import inspect_model
from kvwinnow.planning.architecture import Attention, Latent, State
from kvwinnow.planning.catalogue import find, from_folder
from kvwinnow.planning.config import architecture
from tests.models import KINDS, shown, tiny_model

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "intermediate_size": 128,
}


def read(**fields: Any) -> Any:
    return architecture({**LLAMA, **fields})


def parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# -- against models --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=shown)
def test_an_architecture_is_the_models_structure(kind: str) -> None:
    model = tiny_model(kind, layers=4)
    structure = inspect_model(model)
    found = architecture(model.config.to_dict())
    assert found.layers == tuple(
        Attention(structure.heads, structure.kv_heads, structure.dim, window) for window in structure.sliding
    )
    assert found.trained == structure.trained_length
    assert found.unserved is None
    true = parameters(model)
    if "text decoder" in KINDS[kind].features:
        true = parameters(model.get_decoder()) + model.lm_head.weight.numel()
    assert found.parameters is not None
    assert found.parameters.total == true


# Families that CompressedCache does not serve, or that are not among the tiny models, with the variants of each.
OTHERS: dict[str, Callable[[], Any]] = {
    "qwen3_next": lambda: transformers.Qwen3NextForCausalLM(qwen3_next()),
    "deepseek_v3": lambda: transformers.DeepseekV3ForCausalLM(deepseek()),
    "deepseek_v3 without q_lora_rank": lambda: transformers.DeepseekV3ForCausalLM(deepseek(q_lora_rank=None)),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=100,
            hidden_size=32,
            num_hidden_layers=2,
            ffn_dim=48,
            num_attention_heads=4,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
        )
    ),
    "bloom": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=100, hidden_size=32, n_layer=2, n_head=4)
    ),
    "llama with biases, tied": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=100, hidden_size=32, num_hidden_layers=2, intermediate_size=48, num_attention_heads=4,
            attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
        )
    ),
    "falcon with biases, sequential": lambda: transformers.FalconForCausalLM(
        transformers.FalconConfig(
            vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, parallel_attn=False, bias=True
        )
    ),
    "qwen3_moe, some dense": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=100, hidden_size=32, num_hidden_layers=4, intermediate_size=48, num_attention_heads=4,
            num_key_value_heads=2, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
            decoder_sparse_step=2, mlp_only_layers=[3],
        )
    ),
}  # fmt: skip


def deepseek(**more: Any) -> Any:
    return transformers.DeepseekV3Config(
        **{
            "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16,
            "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
            "n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, **more,
        }
    )  # fmt: skip


def qwen3_next() -> Any:
    return transformers.Qwen3NextConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_key_head_dim=8, linear_num_value_heads=4,
        linear_value_head_dim=12, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=20,
    )  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_parameters_are_those_of_the_model(name: str) -> None:
    model = OTHERS[name]()
    found = architecture(model.config.to_dict()).parameters
    assert found is not None
    # A bias of DeepSeek's routers is stored with the weights, though no parameter to torch.
    biases = sum(buffer.numel() for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
    assert found.total == parameters(model) + biases


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next"])
def test_latents_and_states_take_what_transformers_caches(name: str) -> None:
    model = OTHERS[name]().float().eval()
    found = dataclasses.replace(architecture(model.config.to_dict()), dtype="fp32")
    cache = transformers.DynamicCache(config=model.config)
    ids = torch.arange(2 * 21).view(2, 21) % 100
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    tensors: list[torch.Tensor] = []
    for layer in cache.layers:
        tensors += [t for name in ("keys", "values") if isinstance(t := getattr(layer, name, None), torch.Tensor)]
        for states in ("conv_states", "recurrent_states"):
            held = getattr(layer, states, {})
            tensors += [t for t in held.values() if t is not None] if isinstance(held, dict) else [held]
    assert sum(t.numel() * t.element_size() for t in tensors) == found.cache_bytes(21, batch=2)
    kinds = {type(layer) for layer in found.layers}
    assert kinds == ({Latent} if name == "deepseek_v3" else {State, Attention})


# -- against configs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        transformers.Gemma2Config(num_hidden_layers=7, sliding_window=100),
        transformers.Gemma3TextConfig(num_hidden_layers=13, sliding_window=100),
        transformers.GptOssConfig(num_hidden_layers=5),
        transformers.Cohere2Config(num_hidden_layers=9, sliding_window=100),
        transformers.Qwen2Config(num_hidden_layers=9, use_sliding_window=True, sliding_window=100, max_window_layers=4),
        transformers.Qwen2Config(num_hidden_layers=9, use_sliding_window=False, sliding_window=100),
        transformers.Qwen3NextConfig(num_hidden_layers=9),
    ],
    ids=lambda config: config.model_type,
)
def test_types_of_layers_are_told_where_a_config_json_does_not_write_them(config: Any) -> None:
    fields = config.to_dict()
    # What hub models of these families were saved with, before layer_types was a field.
    del fields["layer_types"]
    found = architecture(fields)
    kinds = {"full_attention": (Attention, None), "linear_attention": (State, None)}
    kinds["sliding_attention"] = (
        (Attention, config.sliding_window) if hasattr(config, "sliding_window") else (None, None)
    )
    assert [(type(layer), getattr(layer, "window", None)) for layer in found.layers] == [
        kinds[what] for what in config.layer_types
    ]


GEMMA_3_4B = {  # as google/gemma-3-4b-it has it: what is the class's default is left out
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152},
}  # fmt: skip


def test_what_a_config_leaves_out_as_the_default_of_its_class() -> None:
    assert architecture(GEMMA_3_4B).layers == find("gemma-3-4b").layers
    assert architecture(GEMMA_3_4B).trained == 131072
    assert "text decoder" in architecture(GEMMA_3_4B).notes[0]
    assert architecture(GEMMA_3_4B).parameters == find("gemma-3-4b").parameters


GPT2 = {"n_layer": 2, "n_embd": 64, "n_head": 4}
MPT = {"n_layers": 2, "d_model": 64, "n_heads": 4}
SLIDING = {"sliding_window": 8, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("config", "layer"),
    [
        (LLAMA, Attention(4, 4, 16)),
        (LLAMA | {"num_key_value_heads": 2, "head_dim": 32}, Attention(4, 2, 32)),
        (LLAMA | {"num_key_value_heads": None, "head_dim": None}, Attention(4, 4, 16)),
        ({"model_type": "gpt2", **GPT2}, Attention(4, 4, 16)),
        ({"model_type": "gpt_bigcode", **GPT2}, Attention(4, 1, 16)),
        ({"model_type": "gpt_bigcode", **GPT2, "multi_query": False}, Attention(4, 4, 16)),
        ({"model_type": "falcon", **GPT2, "multi_query": True}, Attention(4, 1, 16)),
        (LLAMA | {"model_type": "falcon", "multi_query": True, "num_kv_heads": 4}, Attention(4, 1, 16)),
        (LLAMA | {"model_type": "falcon", "multi_query": False}, Attention(4, 4, 16)),
        (LLAMA | {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2}, Attention(4, 2, 16)),
        ({"model_type": "mpt", **MPT}, Attention(4, 4, 16)),
        ({"model_type": "mpt", **MPT, "attn_config": {"attn_type": "multiquery_attention"}}, Attention(4, 1, 16)),
        ({"model_type": "bloom", "n_layer": 2, "n_embed": 64, "n_head": 4}, Attention(4, 4, 16)),
        ({"model_type": "llava", "text_config": LLAMA}, Attention(4, 4, 16)),
        (LLAMA | {"model_type": "mistral", **SLIDING}, Attention(4, 4, 16, 8)),
        (LLAMA | {"model_type": "mistral", **SLIDING, "sliding_window": 64}, Attention(4, 4, 16)),
        (LLAMA | {"layer_types": ["chunked_attention"] * 2, "attention_chunk_size": 8}, Attention(4, 4, 16, 8)),
    ],
)
def test_heads_and_windows_by_whatever_name(config: dict[str, Any], layer: Attention) -> None:
    assert architecture(config).layers == (layer, layer)


def test_a_window_without_word_of_which_layers_slide_is_counted_whole_and_said() -> None:
    found = read(model_type="novel", sliding_window=8)
    assert found.layers == (Attention(4, 4, 16),) * 2
    assert "not which layers slide" in found.notes[0]


def test_layers_that_share_another_ones_cache_are_not_counted() -> None:
    found = read(num_kv_shared_layers=1)
    assert len(found.layers) == 1
    assert found.unserved is not None


@pytest.mark.parametrize("kind", ["bloom", "mpt"])
def test_alibi_is_planned_and_not_served(kind: str) -> None:
    assert "ALiBi" in (read(model_type=kind).unserved or "")


def test_the_dtype_and_the_format_of_the_weights() -> None:
    assert read(torch_dtype="float32").dtype == "fp32"
    assert read(dtype="torch.float16").dtype == "fp16"
    assert read().dtype == "bf16"
    assert read(dtype="float16").weights == "fp16"
    assert read(quantization_config={"quant_method": "fp8"}).weights == "fp8"
    assert read(quantization_config={"quant_method": "awq", "bits": 4}).weights == "int4"
    other = read(quantization_config={"quant_method": "aqlm"})
    assert other.weights is None
    assert "aqlm" in other.notes[0]


@pytest.mark.parametrize(
    ("rope", "trained"),
    [
        (None, 4096),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 4096),
        ({"type": "linear", "factor": 4.0}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "yarn", "factor": float("nan")}, 4096),
        ({"type": "linear", "factor": float("inf")}, 4096),
    ],
)
def test_the_trained_length_is_the_stretched_one(rope: dict[str, Any] | None, trained: int) -> None:
    assert read(max_position_embeddings=4096, rope_scaling=rope).trained == trained


@pytest.mark.parametrize("stated", [0, -1])
def test_a_length_under_1_is_none_stated(stated: int) -> None:
    assert read(max_position_embeddings=stated).trained is None


def test_the_dtype_of_a_model_of_several_kinds_of_input_is_that_of_the_whole() -> None:
    inner = {**LLAMA, "dtype": "bfloat16"}
    assert architecture({"model_type": "whole", "dtype": "float32", "text_config": inner}).dtype == "fp32"
    assert architecture({"model_type": "whole", "torch_dtype": "float32", "text_config": LLAMA}).dtype == "fp32"
    assert architecture({"model_type": "whole", "text_config": {**LLAMA, "dtype": "float16"}}).dtype == "fp16"


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"num_hidden_layers": None}, ("num_hidden_layers", "n_layer", "config.json of a decoder")),
        ({"num_attention_heads": None}, ("num_attention_heads", "n_head")),
        ({"hidden_size": None}, ("hidden_size", "n_embd")),
        ({"num_hidden_layers": "two"}, ("num_hidden_layers", "'two'")),
        ({"num_hidden_layers": -1}, ("num_hidden_layers", "-1")),
        ({"num_hidden_layers": 10**9}, ("1,000,000,000 layers", "10,000")),
        ({"num_kv_shared_layers": 2}, ("no layer",)),
        ({"num_key_value_heads": "2"}, ("num_key_value_heads='2'", "1 or more")),
        ({"num_key_value_heads": 3}, ("4 heads", "3 KV heads")),
        ({"head_dim": 0}, ("head_dim=0", "1 or more")),
        ({"num_attention_heads": True}, ("num_attention_heads", "True")),
        ({"num_attention_heads": 5}, ("head_dim", "5 heads", "64")),
        ({"layer_types": ["full_attention"]}, ("2 layers but 1 layer_types",)),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ("sliding layers, but sliding_window is missing",)),
        ({"layer_types": ["full_attention", "linear_attention"]}, ("linear_num_key_heads",)),
        ({"kv_lora_rank": 16}, ("qk_rope_head_dim",)),
    ],
)  # fmt: skip
def test_a_config_that_lacks_something_is_refused_in_one_sentence(
    fields: dict[str, Any], parts: tuple[str, ...]
) -> None:
    with pytest.raises(KvwinnowError) as raised:
        read(**fields)
    for part in parts:
        assert part in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"mamba_d_state": 16}, "state-space"),
        ({"ssm_cfg": {"layer": "Mamba2"}}, "state-space"),
        ({"state_size": 16}, "state-space"),
        ({"block_types": ["recurrent", "attention"]}, "recurrent"),
        ({"layer_types": ["mamba", "full_attention"]}, "'mamba'"),
        ({"layer_types": ["conv", "full_attention"]}, "'conv'"),
        ({"cross_attention_layers": [1]}, "cross-attention"),
        ({"is_encoder_decoder": True}, "encoder"),
        ({"attention_chunk_size": 8}, "attention_chunk_size"),
    ],
)
def test_layers_whose_memory_cannot_be_told_are_refused(fields: dict[str, Any], part: str) -> None:
    with pytest.raises(UnsupportedModelError, match=part):
        read(**fields)


@pytest.mark.parametrize(
    "config",
    ["Bamba", "FalconH1", "Jamba", "Lfm2", "Mamba", "NemotronH", "RecurrentGemma", "Rwkv", "T5", "Zamba2"],
)
def test_families_with_other_layers_are_refused(config: str) -> None:
    with pytest.raises(UnsupportedModelError):
        architecture(getattr(transformers, f"{config}Config")().to_dict())


FIELDS = (
    *LLAMA,
    *("num_key_value_heads", "head_dim", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
    *("sliding_window_pattern", "kv_lora_rank", "qk_rope_head_dim", "rope_scaling", "torch_dtype", "alibi"),
    *("max_position_embeddings", "quantization_config", "text_config", "attn_config", "multi_query", "num_experts"),
    *("num_local_experts", "moe_intermediate_size", "linear_num_key_heads", "decoder_sparse_step"),
    *("full_attention_interval", "num_kv_shared_layers", "mlp_only_layers", "tie_word_embeddings"),
)
KIND_NAMES = (
    *(
        "llama",
        "mixtral",
        "qwen3_moe",
        "gpt_oss",
        "deepseek_v3",
        "qwen3_next",
        "falcon",
        "mpt",
        "gemma3",
        "opt",
        "cohere2",
    ),
    "?",
)
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), st.floats(-2, 40), st.text(max_size=3), st.just({}),
    st.sampled_from([[], [1], ["full_attention", "sliding_attention"], {"rope_type": "yarn", "factor": "x"}]),
    st.sampled_from([{"type": "linear", "factor": 2.5}, {"full_attention": {"rope_type": [1]}}, {"bits": [4]}, LLAMA]),
)  # fmt: skip


@settings(max_examples=500)
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6), st.sampled_from(KIND_NAMES))
def test_whatever_a_config_holds_it_is_read_or_refused(fields: dict[str, Any], kind: str) -> None:
    try:
        found = architecture({**LLAMA, **SLIDING, "model_type": kind, **fields})
    except KvwinnowError:
        return
    assert found.cache_bytes(10) >= 0
    assert found.parameters is None or found.parameters.total > 0


# -- folders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["10GB", "50KB"], ids=["one file", "shards"])
def test_a_folder_tells_the_weights_it_holds(tmp_path: Path, size: str) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_size=size)
    found = from_folder(tmp_path)
    assert found.checkpoint == 4 * parameters(model)
    assert found.parameters is not None
    assert found.parameters.total == parameters(model)
    assert found == find(str(tmp_path)) == dataclasses.replace(find(str(tmp_path / "config.json")), name=found.name)


def test_a_folder_without_all_of_its_weights_is_read_by_its_config(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    next(tmp_path.glob("*.safetensors")).unlink()
    found = from_folder(tmp_path)
    assert found.checkpoint is None
    assert found.parameters is not None
    assert found.parameters.total == parameters(model)


def test_a_torn_weights_file_is_left_aside(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    assert from_folder(tmp_path).checkpoint is None


def test_a_hub_id_in_the_cache_is_read_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    snapshot = tmp_path / "models--org--thing" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(LLAMA))
    refs = tmp_path / "models--org--thing" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    found = find("org/thing")
    assert found.name == "org/thing"
    assert found.layers == (Attention(4, 4, 16),) * 2


@pytest.mark.parametrize(
    "name",
    [
        "llama-3.1-70b",
        "Llama-3.1-70B-Instruct",
        "meta-llama/Llama-3.1-70B",
        "LLAMA 3.1 70b",
        "meta-llama/Meta-Llama-3.1-70B-Instruct",
    ],
)
def test_names_may_be_spelled_in_many_ways(name: str) -> None:
    assert find(name) == find("llama-3.1-70b")


@pytest.mark.smollm2
def test_the_default_models_facts_are_those_of_its_config(smollm2: tuple[Any, Any]) -> None:
    model, _ = smollm2
    assert architecture(model.config.to_dict()).layers == find("smollm2-135m").layers
    assert parameters(model) == find("smollm2-135m").parameters.total  # type: ignore[union-attr]
