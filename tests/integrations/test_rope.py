"""The model's own rotation, as ExpectedAttention needs it: undone, and averaged over the positions to come."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from kvwinnow import CompressedCache, KvwinnowError
from kvwinnow.integrations.transformers.rope import find_ropes
from kvwinnow.ops import Rope
from tests.models import KINDS, tiny_model, tiny_tokens
from tests.running import counts, logits

POLICY = "expectedattention:budget=24,future=16"
BASE = {"rope_theta": 10_000.0, "factor": 4.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5_000.0},
    "linear": {"rope_type": "linear", **BASE},
    "llama3": {
        "rope_type": "llama3",
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
        **BASE,
    },
    "yarn": {"rope_type": "yarn", "original_max_position_embeddings": 128, **BASE},
}


def ropes(model: Any) -> list[Rope | None]:
    return [layer.rope for layer in CompressedCache(model, POLICY)._layers()]


# GPT-2 adds positions to the tokens, and a softmax sink takes less the more tokens there are: their tokens differ.
RELATIVE = [kind for kind in KINDS if not kind.startswith(("gpt2", "gpt_oss"))]


@pytest.mark.filterwarnings("ignore:all layers of this model see the latest:UserWarning")
@pytest.mark.parametrize("kind", RELATIVE)
def test_queries_of_one_and_the_same_token_are_the_same_once_unrotated(kind: str) -> None:
    """Among its likes a token attends to nothing but its likes, so that all layers see one vector at all positions."""
    model = tiny_model(kind)
    cache = CompressedCache(model, POLICY)
    logits(model, torch.full((1, 90), 7), cache)
    for layer in cache._layers():
        moments = layer.moments
        if layer.budget is not None:  # a sliding layer, which has its own policy
            assert moments is None
            continue
        assert moments is not None
        assert moments.counts == [86]  # the four sinks' do not count
        spread = moments.products.diagonal(dim1=-2, dim2=-1).sum(-1) / 86
        assert (spread <= 1e-8 * moments.mean.square().sum(-1)).all()


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_the_rotation_is_the_model_s_own(scaling: dict[str, Any]) -> None:
    """Against the model's module and function, far beyond the positions by which it was found."""
    model = tiny_model(rope_parameters=scaling)
    apply = sys.modules[type(model).__module__].apply_rotary_pos_emb
    x = torch.randn(1, 4, 50, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(300, 350)
    expected, _ = apply(x, x, *model.model.rotary_emb(x, positions.unsqueeze(0)))
    for rope in ropes(model):
        assert rope is not None
        torch.testing.assert_close(rope.apply(x, positions), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(rope.undo(expected, positions), x, atol=1e-5, rtol=1e-5)
        mean = rope.turn(x[0, 0, 0], *rope.mean(300, 50, x.device))
        by_hand = apply(x[:, :1, :1].expand(1, 1, 50, 16), x, *model.model.rotary_emb(x, positions.unsqueeze(0)))[0]
        torch.testing.assert_close(mean, by_hand[0, 0].mean(0), atol=1e-5, rtol=1e-5)


def lone(rotate: Any) -> Any:
    """One layer's queries (1, 2, 1, 8) of one and the same token at a position."""
    x = torch.randn(1, 2, 1, 8, generator=torch.Generator().manual_seed(1))
    return lambda position: [rotate(x, torch.tensor([position]))]


class TinyRotaryEmbedding(torch.nn.Module):
    """Cosines and sines of the first 4 of 8 elements, two halves of them."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].float() * torch.tensor([1.0, 0.1, 1.0, 0.1])
        return angles.cos() * 1.5, angles.sin() * 1.5


def test_parts_and_pairs_of_elements_are_told_apart() -> None:
    decoder = torch.nn.Module()
    decoder.rotary_emb, decoder.config = TinyRotaryEmbedding(), None
    type(decoder).__module__  # noqa: B018 - torch.nn.modules.module, whose names say nothing of rotations
    plain = lone(lambda x, positions: x)
    halves = Rope(lambda p: tuple(a[0] for a in decoder.rotary_emb(p, p.unsqueeze(0))))
    pairs = Rope(lambda p: tuple(a[0][:, [0, 0, 1, 1]] for a in decoder.rotary_emb(p, p.unsqueeze(0))), True)
    other = Rope(lambda p: tuple(a[0] for a in decoder.rotary_emb(p, 2 * p.unsqueeze(0))))

    class Decoder(torch.nn.Module):
        pass

    Decoder.__module__ = __name__  # whose names do
    decoder.__class__ = Decoder
    assert find_ropes(decoder, 1, None, plain, "test") == [None]
    x, positions = torch.randn(3, 20, 8), torch.arange(50, 70)
    for truth in (halves, pairs):
        (found,) = find_ropes(decoder, 1, None, lone(truth.apply), "test")
        assert found is not None
        assert found.interleaved == truth.interleaved
        torch.testing.assert_close(found.apply(x, positions), truth.apply(x, positions))
        torch.testing.assert_close(found.apply(x, positions)[..., 4:], x[..., 4:])
    with pytest.raises(KvwinnowError, match=r"layer 0 .* could not be found out.*snapkv"):
        find_ropes(decoder, 1, None, lone(other.apply), "test")


def test_a_rotation_that_changes_with_the_length_is_refused_for_this_policy_alone() -> None:
    model = tiny_model(rope_parameters={"rope_type": "dynamic", **BASE})
    with pytest.raises(KvwinnowError, match=r"'dynamic'.*expectedattention.*snapkv"):
        CompressedCache(model, POLICY)
    with pytest.raises(KvwinnowError, match="dynamic"):
        CompressedCache(model, "compose:budget=40,prompt=expectedattention,decode=h2o")
    cache = CompressedCache(model, "snapkv:budget=24,window=8")
    logits(model, tiny_tokens(60)[0], cache)
    assert counts(cache) == {24}


def test_looking_for_the_rotation_leaves_the_model_as_it_was() -> None:
    model = tiny_model()
    ids, _ = tiny_tokens(40)
    before = logits(model, ids)
    CompressedCache(model, POLICY)
    assert torch.equal(logits(model, ids), before)
    assert "forward" not in vars(model.base_model)  # no wrapper stays when no cache does


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_a_bfloat16_model_is_understood_too(scaling: dict[str, Any]) -> None:
    model = tiny_model(rope_parameters=scaling).to(torch.bfloat16)
    assert all(rope is not None and not rope.interleaved for rope in ropes(model))


def test_the_moments_go_with_the_first_decode_step() -> None:
    model = tiny_model()
    cache = CompressedCache(model, POLICY)
    logits(model, tiny_tokens(60)[0], cache)
    before = cache.nbytes()
    logits(model, tiny_tokens(1)[0], cache)
    layers, heads, dim = 2, 4, 16
    assert before - cache.nbytes() == layers * heads * (dim + dim * dim) * 4
