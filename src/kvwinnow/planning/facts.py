"""Facts of well-known models: the fields of their config.json that decide memory, and where they are published.

Only data; ``catalogue.py`` reads it. ``parameters`` is the count of the safetensors on the model's page, less what a
note names; every one was looked up in public copies of the hub's metadata. A test holds it against the count that
follows from the fields, which checks layers, widths, KV heads times head dimension, experts and vocabulary.

What no count can check: the windows of Gemma 2 and Phi-3 mini 4k were looked up in public copies of their config.json,
those of Mistral 7B v0.1 and gpt-oss are the defaults of transformers' config classes, which are of these models. The
windows of Gemma 3 and all trained lengths and dtypes were not looked up again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fact:
    """One model.

    Attributes:
        title: as people write it.
        config: fields of its config.json.
        parameters: of its weights, as published.
        source: where its config is published.
        aliases: further names.
        note: what a reader should know.
    """

    title: str
    config: dict[str, Any]
    parameters: int
    source: str
    aliases: tuple[str, ...] = ()
    note: str = ""


_HUB = "https://huggingface.co/"


def _decoder(
    kind: str,
    layers: int,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    trained: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": trained,
        "torch_dtype": "bfloat16",
        **more,
    }


_8B = (32, 4096, 14336, 32, 8)
_70B = (80, 8192, 28672, 64, 8)

_QWEN25 = "the Instruct models state 32k tokens, which YaRN stretches to 128k"
_GEMMA3 = "the text decoder alone; the vision encoder and its projection have 0.42 billion parameters more"

FACTS: dict[str, Fact] = {
    "llama-2-7b": Fact(
        "Llama 2 7B",
        _decoder("llama", 32, 4096, 11008, 32, 32, 32000, 4096, torch_dtype="float16"),
        6_738_415_616,
        _HUB + "meta-llama/Llama-2-7b-hf",
        ("llama-2-7b-hf", "llama-2-7b-chat-hf"),
    ),
    "llama-2-13b": Fact(
        "Llama 2 13B",
        _decoder("llama", 40, 5120, 13824, 40, 40, 32000, 4096, torch_dtype="float16"),
        13_015_864_320,
        _HUB + "meta-llama/Llama-2-13b-hf",
        ("llama-2-13b-hf", "llama-2-13b-chat-hf"),
    ),
    "llama-2-70b": Fact(
        "Llama 2 70B",
        _decoder("llama", *_70B, 32000, 4096, torch_dtype="float16"),
        68_976_648_192,
        _HUB + "meta-llama/Llama-2-70b-hf",
        ("llama-2-70b-hf", "llama-2-70b-chat-hf"),
    ),
    "llama-3-8b": Fact(
        "Llama 3 8B", _decoder("llama", *_8B, 128256, 8192), 8_030_261_248, _HUB + "meta-llama/Meta-Llama-3-8B"
    ),
    "llama-3-70b": Fact(
        "Llama 3 70B", _decoder("llama", *_70B, 128256, 8192), 70_553_706_496, _HUB + "meta-llama/Meta-Llama-3-70B"
    ),
    "llama-3.1-8b": Fact(
        "Llama 3.1 8B", _decoder("llama", *_8B, 128256, 131072), 8_030_261_248, _HUB + "meta-llama/Llama-3.1-8B"
    ),
    "llama-3.1-70b": Fact(
        "Llama 3.1 70B", _decoder("llama", *_70B, 128256, 131072), 70_553_706_496, _HUB + "meta-llama/Llama-3.1-70B"
    ),
    "llama-3.1-405b": Fact(
        "Llama 3.1 405B",
        _decoder("llama", 126, 16384, 53248, 128, 8, 128256, 131072),
        405_853_388_800,
        _HUB + "meta-llama/Llama-3.1-405B",
        ("llama-3-405b",),
        "its first release had every KV head twice (16), and figures of then are twice as large",
    ),
    "llama-3.2-1b": Fact(
        "Llama 3.2 1B",
        _decoder("llama", 16, 2048, 8192, 32, 8, 128256, 131072, head_dim=64, tie_word_embeddings=True),
        1_235_814_400,
        _HUB + "meta-llama/Llama-3.2-1B",
    ),
    "llama-3.2-3b": Fact(
        "Llama 3.2 3B",
        _decoder("llama", 28, 3072, 8192, 24, 8, 128256, 131072, head_dim=128, tie_word_embeddings=True),
        3_212_749_824,
        _HUB + "meta-llama/Llama-3.2-3B",
    ),
    "llama-3.3-70b": Fact(
        "Llama 3.3 70B",
        _decoder("llama", *_70B, 128256, 131072),
        70_553_706_496,
        _HUB + "meta-llama/Llama-3.3-70B-Instruct",
    ),
    "mistral-7b-v0.1": Fact(
        "Mistral 7B v0.1",
        _decoder("mistral", *_8B, 32000, 32768, sliding_window=4096),
        7_241_732_096,
        _HUB + "mistralai/Mistral-7B-v0.1",
        note="every layer slides, so tokens beyond 4,096 take nothing",
    ),
    "mistral-7b-v0.3": Fact(
        "Mistral 7B v0.3",
        _decoder("mistral", *_8B, 32768, 32768),
        7_248_023_552,
        _HUB + "mistralai/Mistral-7B-v0.3",
        ("mistral-7b",),
    ),
    "mixtral-8x7b": Fact(
        "Mixtral 8x7B",
        _decoder("mixtral", *_8B, 32000, 32768, num_local_experts=8),
        46_702_792_704,
        _HUB + "mistralai/Mixtral-8x7B-v0.1",
        ("mixtral-8x7b-v0.1",),
    ),
    "qwen2.5-7b": Fact(
        "Qwen2.5 7B",
        _decoder("qwen2", 28, 3584, 18944, 28, 4, 152064, 131072),
        7_615_616_512,
        _HUB + "Qwen/Qwen2.5-7B",
        note=_QWEN25,
    ),
    "qwen2.5-32b": Fact(
        "Qwen2.5 32B",
        _decoder("qwen2", 64, 5120, 27648, 40, 8, 152064, 131072),
        32_763_876_352,
        _HUB + "Qwen/Qwen2.5-32B",
        note=_QWEN25,
    ),
    "qwen2.5-72b": Fact(
        "Qwen2.5 72B",
        _decoder("qwen2", 80, 8192, 29568, 64, 8, 152064, 131072),
        72_706_203_648,
        _HUB + "Qwen/Qwen2.5-72B",
        note=_QWEN25,
    ),
    "qwen3-8b": Fact(
        "Qwen3 8B",
        _decoder("qwen3", 36, 4096, 12288, 32, 8, 151936, 40960, head_dim=128),
        8_190_735_360,
        _HUB + "Qwen/Qwen3-8B",
    ),
    "qwen3-32b": Fact(
        "Qwen3 32B",
        _decoder("qwen3", 64, 5120, 25600, 64, 8, 151936, 40960, head_dim=128),
        32_762_123_264,
        _HUB + "Qwen/Qwen3-32B",
    ),
    "qwen3-30b-a3b": Fact(
        "Qwen3 30B-A3B",
        _decoder(
            "qwen3_moe", 48, 2048, 6144, 32, 4, 151936, 40960, head_dim=128, num_experts=128, moe_intermediate_size=768
        ),
        30_532_122_624,
        _HUB + "Qwen/Qwen3-30B-A3B",
    ),
    "qwen3-235b-a22b": Fact(
        "Qwen3 235B-A22B",
        _decoder(
            "qwen3_moe",
            94,
            4096,
            12288,
            64,
            4,
            151936,
            40960,
            head_dim=128,
            num_experts=128,
            moe_intermediate_size=1536,
        ),
        235_093_634_560,
        _HUB + "Qwen/Qwen3-235B-A22B",
    ),
    "qwen3-next-80b-a3b": Fact(
        "Qwen3-Next 80B-A3B",
        _decoder(
            "qwen3_next",
            48,
            2048,
            5120,
            16,
            2,
            151936,
            262144,
            head_dim=256,
            full_attention_interval=4,
            linear_conv_kernel_dim=4,
            linear_num_key_heads=16,
            linear_key_head_dim=128,
            linear_num_value_heads=32,
            linear_value_head_dim=128,
            num_experts=512,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
        ),
        79_674_391_296,
        _HUB + "Qwen/Qwen3-Next-80B-A3B-Instruct",
        note="12 layers cache keys and values, 36 hold a state; the layer for multi-token prediction is not counted",
    ),
    "gemma-2-9b": Fact(
        "Gemma 2 9B",
        _decoder("gemma2", 42, 3584, 14336, 16, 8, 256000, 8192, head_dim=256, sliding_window=4096),
        9_241_705_984,
        _HUB + "google/gemma-2-9b",
    ),
    "gemma-2-27b": Fact(
        "Gemma 2 27B",
        _decoder("gemma2", 46, 4608, 36864, 32, 16, 256000, 8192, head_dim=128, sliding_window=4096),
        27_227_128_320,
        _HUB + "google/gemma-2-27b",
    ),
    "gemma-3-4b": Fact(
        "Gemma 3 4B",
        _decoder("gemma3_text", 34, 2560, 10240, 8, 4, 262208, 131072, head_dim=256, sliding_window=1024),
        3_880_263_168,
        _HUB + "google/gemma-3-4b-pt",
        ("gemma-3-4b-pt",),
        _GEMMA3,
    ),
    "gemma-3-12b": Fact(
        "Gemma 3 12B",
        _decoder("gemma3_text", 48, 3840, 15360, 16, 8, 262208, 131072, head_dim=256, sliding_window=1024),
        11_766_034_176,
        _HUB + "google/gemma-3-12b-pt",
        ("gemma-3-12b-pt",),
        _GEMMA3,
    ),
    "gemma-3-27b": Fact(
        "Gemma 3 27B",
        _decoder("gemma3_text", 62, 5376, 21504, 32, 16, 262208, 131072, head_dim=128, sliding_window=1024),
        27_009_346_304,
        _HUB + "google/gemma-3-27b-pt",
        ("gemma-3-27b-pt",),
        _GEMMA3,
    ),
    "phi-3-mini-4k": Fact(
        "Phi-3 mini 4k",
        _decoder("phi3", 32, 3072, 8192, 32, 32, 32064, 4096, sliding_window=2047),
        3_821_079_552,
        _HUB + "microsoft/Phi-3-mini-4k-instruct",
        note="every layer slides, so tokens beyond 2,047 take nothing",
    ),
    "phi-3-mini-128k": Fact(
        "Phi-3 mini 128k",
        _decoder("phi3", 32, 3072, 8192, 32, 32, 32064, 131072, sliding_window=262144),
        3_821_079_552,
        _HUB + "microsoft/Phi-3-mini-128k-instruct",
        ("phi-3-mini",),
    ),
    "phi-4": Fact(
        "Phi-4",
        _decoder("phi3", 40, 5120, 17920, 40, 10, 100352, 16384),
        14_659_507_200,
        _HUB + "microsoft/phi-4",
        ("phi-4-14b",),
    ),
    "deepseek-v3": Fact(
        "DeepSeek-V3",
        _decoder(
            "deepseek_v3",
            61,
            7168,
            18432,
            128,
            128,
            129280,
            163840,
            kv_lora_rank=512,
            q_lora_rank=1536,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            first_k_dense_replace=3,
            n_routed_experts=256,
            n_shared_experts=1,
            moe_intermediate_size=2048,
            quantization_config={"quant_method": "fp8"},
        ),
        671_026_419_200,
        _HUB + "deepseek-ai/DeepSeek-V3",
        ("deepseek-r1", "deepseek-v3-0324", "deepseek-v3.1"),
        "the layer for multi-token prediction is not counted",
    ),
    "gpt-oss-20b": Fact(
        "gpt-oss 20B",
        _decoder(
            "gpt_oss",
            24,
            2880,
            2880,
            64,
            8,
            201088,
            131072,
            head_dim=64,
            sliding_window=128,
            num_local_experts=32,
            quantization_config={"quant_method": "mxfp4"},
        ),
        20_914_757_184,
        _HUB + "openai/gpt-oss-20b",
    ),
    "gpt-oss-120b": Fact(
        "gpt-oss 120B",
        _decoder(
            "gpt_oss",
            36,
            2880,
            2880,
            64,
            8,
            201088,
            131072,
            head_dim=64,
            sliding_window=128,
            num_local_experts=128,
            quantization_config={"quant_method": "mxfp4"},
        ),
        116_829_156_672,
        _HUB + "openai/gpt-oss-120b",
    ),
    "smollm2-135m": Fact(
        "SmolLM2 135M",
        _decoder("llama", 30, 576, 1536, 9, 3, 49152, 8192, tie_word_embeddings=True),
        134_515_008,
        _HUB + "HuggingFaceTB/SmolLM2-135M",
    ),
}
