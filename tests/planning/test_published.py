"""Published figures: the planner gives those that are right, and does not give those that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from kvwinnow.codecs import Int4
from kvwinnow.planning import find, plan
from kvwinnow.planning.config import architecture
from kvwinnow.planning.facts import FACTS

K, M, GIB, MIB, KIB = 1024, 1024**2, 2**30, 2**20, 2**10
GB, KB, TIB = 10**9, 10**3, 2**40
BILLION = 10**9


def decoder(layers: int, hidden: int, heads: int, kv_heads: int | None = None, kind: str = "opt") -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return {"model_type": kind, **sizes, "num_key_value_heads": kv_heads, "max_position_embeddings": 2048}


GPT2_XL = {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25, "n_positions": 1024}
OLMO2_7B = decoder(32, 4096, 32, 32, "olmo2")
OPT_13B, OPT_30B, OPT_175B = decoder(40, 5120, 40), decoder(48, 7168, 56), decoder(96, 12288, 96)

HF_LLAMA31 = (
    "https://huggingface.co/blog/llama31#inference-memory-requirements, its 1k being 1,024 and its 128k 128,000"
)
RASCHKA = "Raschka, LLM Architecture Gallery"
ISCA = "DeepSeek-AI, Insights into DeepSeek-V3, arXiv 2505.09343, table 1"
GPT_OSS = "OpenAI, gpt-oss model card, arXiv 2508.10925, table 1"


def per_token(model: str | dict[str, Any]) -> int:
    read = find(model) if isinstance(model, str) else architecture(model)
    return read.bytes_per_token


def cache(model: str | dict[str, Any], context: int, batch: int = 1) -> int:
    return plan(model, context=context, batch=batch).contexts[0].full


def weights(model: str, dtype: str | None = None) -> int:
    total = plan(model, weights_dtype=dtype).weights
    assert total is not None
    return total


@dataclass(frozen=True)
class Figure:
    """A figure as published.

    Attributes:
        what: it is.
        published: the number, with its digits.
        unit: what it counts, in bytes (or parameters).
        computed: by the planner, in bytes (or parameters).
        source: where it is published.
    """

    what: str
    published: str
    unit: float
    computed: Callable[[], float]
    source: str

    def agrees(self) -> bool:
        digits = len(self.published.partition(".")[2])
        # Half a unit in the last place, either way it was rounded, and floats in between.
        return abs(self.computed() / self.unit - float(self.published)) <= 0.5 * 10**-digits * (1 + 1e-9)


DENNEMAN = "https://frankdenneman.nl/2026/01/12/the-dynamic-world-of-llm-runtime-memory"
IETF = "draft-calabria-bmwg-ai-fabric-inference-bench, appendix"
PAGED = "PagedAttention, arXiv 2309.06180, section 3"
H2O = "H2O, arXiv 2306.14048, section 1"
FLEXGEN = "FlexGen, arXiv 2303.06865, section 3"
NVIDIA = "NVIDIA, Mastering LLM Techniques: Inference Optimization, 2023-11-17"
REDDIT = "r/LocalLLaMA, The actual memory math for Llama-70B with 1M context"
MISTRAL = "mistral.ai, Mixtral of experts"
CONFIG = "arithmetic of its config"

RIGHT = [
    Figure("Llama 3.1 70B, a token", "327680", 1, lambda: per_token("llama-3.1-70b"), DENNEMAN),
    Figure("the same, 131,072 tokens", "42.95", GB, lambda: cache("llama-3.1-70b", 131072), DENNEMAN),
    Figure("a 70B, 4k tokens", "1342177280", 1, lambda: cache("llama-3-70b", 4 * K), IETF),
    Figure("DeepSeek-V3, a token", "70.272", KB, lambda: per_token("deepseek-v3"), ISCA),
    Figure("Qwen2.5 72B, a token", "327.680", KB, lambda: per_token("qwen2.5-72b"), ISCA),
    Figure("Llama 3.1 405B, a token", "516.096", KB, lambda: per_token("llama-3.1-405b"), ISCA),
    Figure("Llama 3.1 8B, 1k", "0.125", GIB, lambda: cache("llama-3.1-8b", 1024), HF_LLAMA31),
    Figure("Llama 3.1 8B, 16k", "1.95", GIB, lambda: cache("llama-3.1-8b", 16000), HF_LLAMA31),
    Figure("Llama 3.1 8B, 128k", "15.62", GIB, lambda: cache("llama-3.1-8b", 128000), HF_LLAMA31),
    Figure("Llama 3.1 70B, 1k", "0.313", GIB, lambda: cache("llama-3.1-70b", 1024), HF_LLAMA31),
    Figure("Llama 3.1 70B, 16k", "4.88", GIB, lambda: cache("llama-3.1-70b", 16000), HF_LLAMA31),
    Figure("Llama 3.1 70B, 128k", "39.06", GIB, lambda: cache("llama-3.1-70b", 128000), HF_LLAMA31),
    Figure("GPT-2 XL, a token", "300", KIB, lambda: per_token(GPT2_XL), RASCHKA),
    Figure("Llama 3 8B, a token", "128", KIB, lambda: per_token("llama-3-8b"), RASCHKA),
    Figure("Llama 3.2 1B, a token", "32", KIB, lambda: per_token("llama-3.2-1b"), RASCHKA),
    Figure("OLMo 2 7B, a token", "512", KIB, lambda: per_token(OLMO2_7B), RASCHKA),
    Figure("DeepSeek-V3, a token", "68.6", KIB, lambda: per_token("deepseek-v3"), RASCHKA),
    Figure("Llama 3.1 405B, a token", "504.0", KIB, lambda: per_token("llama-3.1-405b"), "tooljolt.com"),
    Figure("Llama 3.1 405B, 8k", "4.23", GB, lambda: cache("llama-3.1-405b", 8 * K), "canitrun.dev"),
    Figure("Llama 3.1 70B, 8k", "2.68", GB, lambda: cache("llama-3.1-70b", 8 * K), "canitrun.dev"),
    Figure("OPT-13B, a token", "800", KIB, lambda: per_token(OPT_13B), PAGED),
    Figure("OPT-13B, 2,048 tokens", "1.6", GIB, lambda: cache(OPT_13B, 2048), PAGED),
    Figure("OPT-30B, 128 x 1,024 tokens", "180", GB, lambda: cache(OPT_30B, 1024, 128), H2O),
    Figure("OPT-175B, 512 x 544 tokens", "1.2", TIB, lambda: cache(OPT_175B, 544, 512), FLEXGEN),
    Figure("Llama 2 7B, 4,096 tokens", "2", GIB, lambda: cache("llama-2-7b", 4096), NVIDIA),
    Figure("Llama 2 7B, a token", "0.5", MIB, lambda: per_token("llama-2-7b"), CONFIG),
    Figure("Llama 3 70B, 32k", "10.7", GB, lambda: cache("llama-3-70b", 32 * K), CONFIG),
    Figure("Llama 3 70B, 1M", "343.6", GB, lambda: cache("llama-3-70b", M), CONFIG),
    Figure("Mistral 7B v0.1, 32k: times smaller by its window", "8", 1,
           lambda: cache("mistral-7b-v0.3", 32 * K) / cache("mistral-7b-v0.1", 32 * K),
           "Mistral 7B, arXiv 2310.06825, figure 2"),
    Figure("MLA as GQA: KV heads of 128", "2.25", 1, lambda: per_token("deepseek-v3") / (61 * 2 * 128 * 2),
           "DeepSeek-V2, arXiv 2405.04434, section 2.1.4"),
    Figure("a 70B, 16k tokens, each of 8 GPUs", "640", MIB, lambda: cache_of_one("llama-3-70b", 16 * K, 8),
           "KVDirect, page 4"),
    Figure("a 70B, a token and layer", "4", KIB, lambda: per_token("llama-3-70b") / 80, REDDIT),
    Figure("Llama 3.1 70B, fp16 weights", "141.1", GB, lambda: weights("llama-3.1-70b", "fp16"), "gigagpu.com"),
    Figure("Llama 3.1 70B, AWQ int4 weights", "39.8", GB, lambda: weights("llama-3.1-70b", "int4"),
           "the files of hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4, from memory"),
    Figure("Llama 3.1 70B, fp8 weights", "72.7", GB, lambda: weights("llama-3.1-70b", "fp8"),
           "safetensors of an FP8 checkpoint: BF16 2,109,382,656, F8_E4M3 68,451,041,280"),
    Figure("gpt-oss 120B, checkpoint", "60.8", GIB, lambda: weights("gpt-oss-120b"), GPT_OSS),
    Figure("gpt-oss 20B, checkpoint", "12.8", GIB, lambda: weights("gpt-oss-20b"), GPT_OSS),
    Figure("gpt-oss 120B, parameters", "116.83", BILLION, lambda: weights("gpt-oss-120b", "bf16") / 2, GPT_OSS),
    Figure("gpt-oss 20B, parameters", "20.91", BILLION, lambda: weights("gpt-oss-20b", "bf16") / 2, GPT_OSS),
    Figure("Mixtral 8x7B, parameters", "46.7", BILLION, lambda: weights("mixtral-8x7b", "bf16") / 2, MISTRAL),
    Figure("DeepSeek-V3, parameters", "671", BILLION, lambda: weights("deepseek-v3", "bf16") / 2, "arXiv 2412.19437"),
]  # fmt: skip


def cache_of_one(model: str, context: int, gpus: int) -> int:
    return plan(model, context=context, gpu=f"1TBx{gpus}").contexts[0].needed_per_gpu


@pytest.mark.parametrize("figure", RIGHT, ids=lambda figure: figure.what)
def test_the_planner_gives_the_published_figure(figure: Figure) -> None:
    assert figure.agrees(), (figure.computed() / figure.unit, figure.published)


def test_there_are_thirty_published_figures() -> None:
    assert len(RIGHT) >= 30


@pytest.mark.parametrize("key", FACTS)
def test_a_built_in_model_has_as_many_parameters_as_are_published(key: str) -> None:
    # A checksum of the facts: it would differ if a layer, a head, a width or a vocabulary did.
    found = find(key).parameters
    assert found is not None
    assert found.total == FACTS[key].parameters


# What is published, in bytes; what is right, in bytes; why.
WRONG = {
    "163.84 GB for 1M tokens of a 70B": (163.84 * GB, lambda: cache("llama-3-70b", M), 343.6 * GB),
    "131 GB for 128k of a 70B": (131 * GB, lambda: cache("llama-3-70b", 128 * K), 42.95 * GB),
    "1 TB for 1M of a 70B": (10**12, lambda: cache("llama-3-70b", M), 343.6 * GB),
    "340 GB for 128k of Llama 3.1 70B: hidden size for KV heads": (
        340 * GB,
        lambda: cache("llama-3.1-70b", 128 * K),
        42.95 * GB,
    ),
    "123.05 GB for 128k of Llama 3.1 405B: every KV head twice": (
        123.05 * GIB,
        lambda: cache("llama-3.1-405b", 128000),
        61.52 * GIB,
    ),
    "320 GB for 1M of a 70B: GiB taken for GB": (320 * GB, lambda: cache("llama-3-70b", M), 343.6 * GB),
    "65 KB a token of Llama 2 70B": (65 * KB, lambda: per_token("llama-2-70b"), 327.68 * KB),
    "1 MB a token of Llama 2 13B": (10**6, lambda: per_token("llama-2-13b"), 819.2 * KB),
    "17 GB for int4 weights of a 70B: eight for four": (17 * GB, lambda: weights("llama-3.1-70b", "int4"), 39.8 * GB),
    "35 GB for int4 weights of a 70B: no scales, no embeddings": (
        35 * GB,
        lambda: weights("llama-3.1-70b", "int4"),
        39.8 * GB,
    ),
    "80 GB of memory on an H100": (80 * GB, lambda: gpu_memory("H100-80GB"), 85.52 * GB),
    "24 GB of memory on an L4": (24 * GB, lambda: gpu_memory("L4"), 24.15 * GB),
}


def gpu_memory(name: str) -> int:
    gpu = plan("smollm2-135m", gpu=name).gpu
    assert gpu is not None
    return gpu.memory


@pytest.mark.parametrize("claim", WRONG)
def test_the_planner_does_not_give_a_wrong_figure(claim: str) -> None:
    published, computed, right = WRONG[claim]
    value = computed()
    assert value == pytest.approx(right, rel=1e-3)
    assert abs(value / published - 1) > 0.005


def test_int4_is_not_a_quarter() -> None:
    # A float16 scale and zero point for each 64 elements: 4.5 bits.
    assert Int4().bytes_per_vector(128) == 128 // 2 + 2 * 4
    codes = {4 * K: 0.38, 32 * K: 3.02, 128 * K: 12.1, M: 96.6}
    for context, published in codes.items():
        at = plan("llama-3-70b", context=context, dtype="int4").contexts[0]
        assert at.kept is not None
        assert at.full * 4.5 / 16 / GB == pytest.approx(published, rel=0.01)
        assert at.full * 4.5 / 16 < at.kept < at.full * 4.7 / 16  # positions and empty slots on top
        assert at.kept > at.full / 4


def test_eight_bits_of_gemma_2_are_not_200_gb_for_a_million_tokens() -> None:
    # 8-bit: 46 layers x 16 KV heads of 4608 / 32 = 144 was published; heads are of 128, and every other layer slides.
    at = plan("gemma-2-27b", context=M).contexts[0]
    eight_bits = at.full / 2
    assert eight_bits == (23 * M + 23 * 4096) * 2 * 16 * 128
    assert round(eight_bits / GB, 1) == 99.2
