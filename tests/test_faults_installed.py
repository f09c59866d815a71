"""More of what breaks for users of other libraries, by number: what depends on the model and on what is installed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DeepseekV3Config, MambaConfig, PreTrainedConfig

from kvwinnow import CompressedCache, KvwinnowError, SnapKV
from kvwinnow.errors import UnsupportedModelError
from kvwinnow.policies import LayerView, Lengths, Phase
from tests.models import tiny_model, tiny_tokens
from tests.running import EVICTING, FULL_WIDTH, logits, text, with_budget

# -- 12: scaled RoPE --------------------------------------------------------------------------------------------------

ROPE: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}


# ExpectedAttention must know the rotations to come, and refuses those that change with the length.
SCALED = [(rope, name) for rope in ROPE for name in FULL_WIDTH if (rope, name) != ("dynamic", "expected")]


def scaled_model(rope: str, layers: int) -> transformers.PreTrainedModel:
    parameters = {"rope_type": rope, "rope_theta": 1e4, **ROPE[rope]}
    return tiny_model(layers=layers, trained=256, rope_parameters=parameters)


@pytest.mark.parametrize(("rope", "name"), SCALED)
def test_fault_12_the_models_own_frequencies_say_what_they_say_without_a_cache(rope: str, name: str) -> None:
    model = scaled_model(rope, layers=2)
    ids, mask = tiny_tokens(100, 30)
    assert text(model, ids, mask) != text(tiny_model(trained=256), ids, mask) or rope == "dynamic"
    assert text(model, ids, mask, CompressedCache(model, with_budget(name, 128))) == text(model, ids, mask)


@pytest.mark.parametrize(("rope", "name"), [pair for pair in SCALED if pair[1] != "full"])
def test_fault_12_after_eviction_what_is_left_is_seen_at_its_true_distance(rope: str, name: str) -> None:
    """In a model of one layer, a token's key depends on itself alone: a mask on the full model is the right value."""
    model = scaled_model(rope, layers=1)
    cache = CompressedCache(model, EVICTING[name])
    ids = tiny_tokens(101)[0]
    logits(model, ids[:, :100], cache)
    held = cache.positions(0)
    out = logits(model, ids[:, 100:], cache)
    mask = torch.full((1, 4, 101, 101), -torch.inf).triu(1)
    for head in range(4):
        visible = torch.zeros(101, dtype=torch.bool)
        visible[held[0, head // 2][held[0, head // 2] >= 0].long()] = visible[100] = True
        mask[0, head, 100].masked_fill_(~visible, -torch.inf)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits[:, 100:]
    assert torch.allclose(out, expected, atol=1e-4)


# -- 20: other implementations, other versions ------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("name", ["h2o", "snapkv"])
def test_fault_20_the_attention_set_in_the_model_is_neither_needed_nor_fallen_back_to(
    name: str, implementation: str
) -> None:
    model, other = tiny_model(), tiny_model()
    model.set_attn_implementation(implementation)
    ids, mask = tiny_tokens(50, 20)
    expected = text(other, ids, mask, CompressedCache(other, EVICTING[name]))
    assert text(model, ids, mask, CompressedCache(model, EVICTING[name])) == expected
    assert model.config._attn_implementation == implementation


def test_fault_20_a_transformers_too_old_is_refused_at_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvwinnow.integrations.transformers.structure.transformers.__version__", "5.15.2")
    with pytest.raises(KvwinnowError, match=r"transformers 5\.15\.2 .* needs 5\.16 or newer; run: pip install -U"):
        CompressedCache(tiny_model(), "full")


# -- 21: families not served ------------------------------------------------------------------------------------------

SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32}
FOREIGN: list[PreTrainedConfig] = [
    MambaConfig(**SMALL),
    DeepseekV3Config(
        **SMALL, num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=8, moe_intermediate_size=16, first_k_dense_replace=2,
    ),
]  # fmt: skip


@pytest.mark.parametrize("config", FOREIGN, ids=lambda config: config.model_type)
def test_fault_21_a_structure_that_does_not_fit_is_refused_in_one_sentence(config: PreTrainedConfig) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        CompressedCache(AutoModelForCausalLM.from_config(config), "full")
    assert "\n" not in str(error.value)
    assert ". " not in str(error.value)


# -- 25: an answer of seven tokens ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seen", range(7))
def test_fault_25_one_token_that_is_looked_at_keeps_an_answer_of_seven(seen: int) -> None:
    """The question looks at one digit of the number; the default pooling must carry the other six along."""
    policy, length = SnapKV(budget=64), 400
    answer = range(150, 157)
    statistic = torch.full((1, 1, length), 0.001)
    statistic[0, 0, answer[seen]] = 1.0
    positions = torch.arange(length, dtype=torch.int32).view(1, 1, length)
    view = LayerView(Phase.PROMPT, positions, statistic, torch.tensor([[[length - 1]]], dtype=torch.int32))
    keep = policy.select(view, [Lengths(length, length, 64)], [64])
    assert keep[0, 0, 150:157].all()
    assert int(keep.sum()) == 64


# -- the numbers ------------------------------------------------------------------------------------------------------

LATER = {11, 16, 17, 23}


def test_every_fault_that_can_be_tested_today_has_a_test_of_its_number() -> None:
    tests = Path(__file__).parent.rglob("test_*.py")
    found = {int(number) for path in tests for number in re.findall(r"def test_fault_(\d\d)_", path.read_text())}
    assert set(range(1, 26)) - found <= LATER
