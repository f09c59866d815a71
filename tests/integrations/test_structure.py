"""What is no structure the cache serves is refused at the door, by the layer's name and what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as t
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import (
    ALL_ATTENTION_FUNCTIONS,
    LlamaAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from kvwinnow import CompressedCache, KvwinnowError
from kvwinnow.errors import UnsupportedModelError
from tests.models import IMAGE, tiny_model, tiny_tokens
from tests.running import CACHE, logits, text

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
MLA: dict[str, Any] = {
    **SMALL, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
BART: dict[str, Any] = {
    "vocab_size": 50, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "pad_token_id": 0,
}  # fmt: skip


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


ENCODER = without(SMALL, "num_key_value_heads")
REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str, str]] = {
    "DeepSeek-V3": (
        lambda: t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**MLA)), "model.layers.0.self_attn", "latent attention (MLA)"
    ),
    "DeepSeek-V2": (
        lambda: t.DeepseekV2ForCausalLM(t.DeepseekV2Config(**MLA)), "model.layers.0.self_attn", "latent attention (MLA)"
    ),
    "Mamba": (
        lambda: t.MambaForCausalLM(t.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2)),
        "backbone.layers.0.mixer",
        "recurrent",
    ),
    "Mamba-2": (
        lambda: t.Mamba2ForCausalLM(
            t.Mamba2Config(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_heads=4, head_dim=8, n_groups=1)
        ),
        "backbone.layers.0.mixer",
        "recurrent",
    ),
    "RWKV": (
        lambda: t.RwkvForCausalLM(t.RwkvConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2)),
        "rwkv.blocks.0",
        "no attention layers that cache",
    ),
    "Jamba": (
        lambda: t.JambaForCausalLM(
            t.JambaConfig(**SMALL, num_experts=2, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False)
        ),
        "model.layers.0.mamba",
        "recurrent",
    ),
    "Qwen3-Next": (
        lambda: t.Qwen3NextForCausalLM(
            t.Qwen3NextConfig(**SMALL, head_dim=16, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
                              linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
                              linear_value_head_dim=8)
        ),
        "model.layers.0.linear_attn",
        "recurrent",
    ),
    "RecurrentGemma": (
        lambda: t.RecurrentGemmaForCausalLM(t.RecurrentGemmaConfig(**SMALL, lru_width=32, head_dim=16)),
        "model.layers.0.temporal_block",
        "recurrent",
    ),
    "T5": (
        lambda: t.T5ForConditionalGeneration(t.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1,
                                                        num_heads=2)),
        "decoder.block.0.layer.1.EncDecAttention",
        "cross-attention",
    ),
    "BART": (
        lambda: t.BartForConditionalGeneration(t.BartConfig(**BART)),
        "model.decoder.layers.0.encoder_attn",
        "cross-attention",
    ),
    "BART's decoder": (
        lambda: t.BartForCausalLM(t.BartConfig(**BART)), "model.decoder.layers.0.encoder_attn", "cross-attention"
    ),
    "Llama 3.2 Vision": (
        lambda: t.MllamaForCausalLM(
            t.models.mllama.MllamaTextConfig(**SMALL, cross_attention_layers=[1],
                                             rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
        ),
        "model.layers.1.cross_attn",
        "cross-attention",
    ),
    "GPT-2 with cross-attention": (
        lambda: t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, add_cross_attention=True)
        ),
        "transformer.h.0.crossattention",
        "cross-attention",
    ),
    "Bloom": (
        lambda: t.BloomForCausalLM(t.BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=2)),
        "transformer.h.0.self_attention",
        "ALiBi",
    ),
    "MPT": (
        lambda: t.MptForCausalLM(t.MptConfig(vocab_size=50, d_model=16, n_layers=1, n_heads=2)),
        "transformer.blocks.0.attn",
        "bias by position",
    ),
    "Falcon with ALiBi": (
        lambda: t.FalconForCausalLM(
            t.FalconConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, alibi=True)
        ),
        "transformer.h.0.self_attention",
        "ALiBi",
    ),
    "GPT-NeoX Japanese": (
        lambda: t.GPTNeoXJapaneseForCausalLM(
            t.GPTNeoXJapaneseConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        ),
        "gpt_neox_japanese.layers.0.attention",
        "computed in the layer itself",
    ),
    "GPT-Neo": (
        lambda: t.GPTNeoForCausalLM(
            t.GPTNeoConfig(vocab_size=50, hidden_size=16, num_layers=1, num_heads=2, attention_types=[[["global"], 1]])
        ),
        "transformer.h.0.attn.attention",
        "under another index than its own",
    ),
    "Llama 4": (
        lambda: t.Llama4ForCausalLM(
            t.Llama4TextConfig(**SMALL, head_dim=16, intermediate_size_mlp=16, num_local_experts=2,
                               attention_chunk_size=8)
        ),
        "model.layers.0.self_attn",
        "'chunked_attention'",
    ),
    "Gemma 3n": (
        lambda: t.Gemma3nForCausalLM(
            t.Gemma3nTextConfig(**without(SMALL, "num_hidden_layers"), num_hidden_layers=4, head_dim=16,
                                num_kv_shared_layers=2, vocab_size_per_layer_input=50, hidden_size_per_layer_input=8,
                                layer_types=["sliding_attention", "full_attention"] * 2,
                                activation_sparsity_pattern=[0.0] * 4)
        ),
        "model.layers.2.self_attn",
        "shares the keys and values of another layer",
    ),
    "BERT": (
        lambda: t.BertLMHeadModel(t.BertConfig(**ENCODER)), "bert.encoder.layer.0.attention.self", "both directions"
    ),
}  # fmt: skip


def sentence(error: pytest.ExceptionInfo[UnsupportedModelError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    assert ". " not in message
    return message


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_that_is_not_served_is_named(name: str) -> None:
    make, layer, what = REFUSED[name]
    with torch.random.fork_rng(devices=[]):
        model = make()
    with pytest.raises(UnsupportedModelError) as error:
        CompressedCache(model, "full")
    message = sentence(error)
    assert message.startswith(f"{layer} (")
    assert what in message
    assert "docs/models.md" in message
    assert "forward" not in model.__dict__  # nothing was wrapped
    assert isinstance(model.get_submodule(layer), nn.Module)


# -- a structure never seen before ------------------------------------------------------------------------------------


class Foreign(LlamaAttention):
    """An attention layer that no list of models knows; what it does to its keys is given by a subclass."""

    factor = 1.0
    by_itself = False

    def forward(self, hidden_states: Any, position_embeddings: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        past = kwargs.pop("cache", None) or kwargs.pop("past_key_values", None)
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(hidden_states).view(shape).transpose(1, 2) for project in projections)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if past is not None:
            k, v = past.update(k, v, self.layer_idx)
        if self.factor != 1.0:
            k = k * self.factor
        if self.by_itself:
            out = torch.softmax(q @ k.repeat_interleave(2, 1).mT, -1) @ v.repeat_interleave(2, 1)
            return self.o_proj(out.transpose(1, 2).flatten(2)), None
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        out, _ = attention_interface(self, q, k, v, attention_mask, scaling=self.scaling)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


class ChangesKeys(Foreign):
    factor = 2.0


class AttendsByItself(Foreign):
    by_itself = True


def with_layers(kind: type[Foreign]) -> PreTrainedModel:
    """A tiny Llama of a type of its own, all of whose attention layers are of that kind."""
    model = tiny_model()
    model.config.model_type = "never-seen"
    for layer in model.model.layers:
        layer.self_attn.__class__ = kind
    return model


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_a_model_type_never_seen_before_is_served_if_its_layers_fit() -> None:
    model, plain = with_layers(Foreign), tiny_model()
    ids, mask = tiny_tokens(40, 23)
    for policy in ("full", "h2o:budget=16"):
        cache, known = CompressedCache(model, policy), CompressedCache(plain, policy)
        assert text(model, ids, mask, cache) == text(plain, ids, mask, known)


@pytest.mark.parametrize(
    ("kind", "what"),
    [(ChangesKeys, "changes its keys or values after"), (AttendsByItself, "computed its attention by itself")],
)
def test_what_only_a_call_can_show_is_refused_in_the_first_call(kind: type[Foreign], what: str) -> None:
    model = with_layers(kind)
    cache = CompressedCache(model, "full")
    with pytest.raises(UnsupportedModelError) as error:
        logits(model, tiny_tokens(10)[0], cache)
    message = sentence(error)
    assert message.startswith("model.layers.0.self_attn ")
    assert what in message


def test_layers_of_different_shapes_are_refused() -> None:
    model = tiny_model()
    attention = model.model.layers[1].self_attn
    attention.num_key_value_groups = 1
    with pytest.raises(UnsupportedModelError) as error:
        CompressedCache(model, "full")
    assert sentence(error).startswith("model.layers.1.self_attn has 4 query heads, 4 key/value heads")


def test_shapes_that_the_configuration_does_not_tell_are_refused() -> None:
    model = tiny_model()
    for layer in model.model.layers:
        layer.self_attn.num_key_value_groups = 4
    cache = CompressedCache(model, "full")
    with pytest.raises(UnsupportedModelError) as error:
        logits(model, tiny_tokens(10)[0], cache)
    assert "model.layers.0.self_attn caches tensors of shape (1, 2, 10, 16)" in sentence(error)


def test_a_window_that_the_masks_contradict_is_refused() -> None:
    model = tiny_model("qwen2, sliding")
    model.config.sliding_window = 20  # the layers were made with 12
    cache = CompressedCache(model, "full")
    with pytest.raises(UnsupportedModelError) as error:
        logits(model, tiny_tokens(10)[0], cache)
    assert "model.layers.1.self_attn sees the latest 12 tokens" in sentence(error)


def test_packed_sequences_are_refused() -> None:
    model = tiny_model()
    for given in ({"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2]])}, {"cu_seq_lens_q": torch.tensor([0, 4, 7])}):
        with pytest.raises(KvwinnowError):
            logits(model, tiny_tokens(7)[0], CompressedCache(model, "full"), **given)


# -- masks of vision-language models ----------------------------------------------------------------------------------


def test_images_that_see_each_other_in_both_directions_are_refused() -> None:
    model = tiny_model("gemma3, vision")
    ids = torch.tensor([[2, 9, IMAGE, IMAGE, IMAGE, IMAGE, 8, 7]])
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    cache = CompressedCache(model, "full")
    with pytest.raises(KvwinnowError, match="in another way than causally"):
        logits(model, ids, cache, pixel_values=pixels, token_type_ids=(ids == IMAGE).long())
    assert cache.nbytes() == 0


def test_text_is_served_where_images_would_be_refused() -> None:
    model = tiny_model("gemma3, vision")
    ids, mask = tiny_tokens(30, 17)
    types = torch.zeros_like(ids)
    expected = text(model, ids, mask, token_type_ids=types)
    assert text(model, ids, mask, CompressedCache(model, "full"), token_type_ids=types) == expected
    cache = CompressedCache(model, "full")
    out = logits(model, ids[:1], **{CACHE: cache}, token_type_ids=types[:1])
    torch.testing.assert_close(out, logits(model, ids[:1], token_type_ids=types[:1]), atol=1e-4, rtol=1e-4)
