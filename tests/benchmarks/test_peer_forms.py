"""What the benchmark beside other libraries hands to them is the same model, and a filled cache is what it says."""

from __future__ import annotations

import importlib
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.cli.conftest import byte_tokenizer

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
HEADS, KV_HEADS, DIM = 4, 2, 16


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a module as the runners do; no plain name stays behind."""
    monkeypatch.syspath_prepend(PEERS)
    yield importlib.import_module
    for name in ("forms", "gguf_form", "llama_cpp_state"):
        sys.modules.pop(name, None)


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, LlamaForCausalLM]:
    """A folder with a Llama in bfloat16, and the model in it."""
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=DIM, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    made = LlamaForCausalLM(config).to(torch.bfloat16)
    folder = tmp_path / "llama"
    made.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder, made


def tensors(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    """All tensors of a GGUF file as float32, (rows, columns)."""
    return {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(file).tensors}


def turned(x: Tensor, pairs: Tensor, position: int) -> Tensor:
    """Rotate the pairs of elements (D / 2, 2) of a head's vector by the angles of a position."""
    angles = position * 10000.0 ** (-torch.arange(len(pairs), dtype=torch.float64) / len(pairs))
    a, b = x[pairs[:, 0]], x[pairs[:, 1]]
    out = x.clone()
    out[pairs[:, 0]] = a * angles.cos() - b * angles.sin()
    out[pairs[:, 1]] = a * angles.sin() + b * angles.cos()
    return out


def test_a_gguf_file_has_the_bits_of_the_model(bench: Any, model: tuple[Path, LlamaForCausalLM]) -> None:
    folder, made = model
    found = tensors(bench("gguf_form").form_of(folder))
    state = made.state_dict()
    for new, old in (
        ("token_embd", "model.embed_tokens"),
        ("output_norm", "model.norm"),
        ("blk.1.attn_v", "model.layers.1.self_attn.v_proj"),
        ("blk.1.attn_output", "model.layers.1.self_attn.o_proj"),
        ("blk.0.ffn_gate", "model.layers.0.mlp.gate_proj"),
        ("blk.0.ffn_up", "model.layers.0.mlp.up_proj"),
        ("blk.1.ffn_down", "model.layers.1.mlp.down_proj"),
        ("blk.0.attn_norm", "model.layers.0.input_layernorm"),
        ("blk.0.ffn_norm", "model.layers.0.post_attention_layernorm"),
    ):
        np.testing.assert_array_equal(found[f"{new}.weight"], state[f"{old}.weight"].float().numpy())
    assert len(found) == 2 + 2 * 9, "tied embeddings are written once"


def test_rotating_neighbours_gives_the_scores_of_rotating_halves(
    bench: Any, model: tuple[Path, LlamaForCausalLM]
) -> None:
    folder, made = model
    found = tensors(bench("gguf_form").form_of(folder))
    halves = torch.stack([torch.arange(DIM // 2), torch.arange(DIM // 2) + DIM // 2], 1)
    neighbours = torch.arange(DIM).view(-1, 2)
    one, two = torch.randn(2, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    attention = made.model.layers[1].self_attn

    def score(q: Any, k: Any, pairs: Tensor, head: int) -> float:
        query = (torch.as_tensor(q).double() @ one).view(HEADS, DIM)[head]
        key = (torch.as_tensor(k).double() @ two).view(KV_HEADS, DIM)[head * KV_HEADS // HEADS]
        return float(turned(query, pairs, 9) @ turned(key, pairs, 4))

    for head in range(HEADS):
        wanted = score(attention.q_proj.weight.detach(), attention.k_proj.weight.detach(), halves, head)
        got = score(found["blk.1.attn_q.weight"], found["blk.1.attn_k.weight"], neighbours, head)
        assert got == pytest.approx(wanted, rel=1e-12)


def test_float16_rounds_and_bfloat16_does_not(bench: Any, model: tuple[Path, LlamaForCausalLM]) -> None:
    folder, made = model
    found = tensors(bench("gguf_form").form_of(folder, "f16"))
    values = made.model.embed_tokens.weight.detach().float().numpy()
    np.testing.assert_array_equal(found["token_embd.weight"], values.astype(np.float16).astype(np.float32))


def test_a_form_is_written_again_only_after_its_model(bench: Any, model: tuple[Path, LlamaForCausalLM]) -> None:
    folder, _ = model
    file = bench("gguf_form").form_of(folder)
    first = file.stat()
    assert bench("gguf_form").form_of(folder).stat().st_ino == first.st_ino
    later = first.st_mtime + 10
    os.utime(folder / "config.json", (later, later))
    assert not bench("forms").made_from(file, folder)


def test_another_model_or_rotation_is_refused_and_nothing_is_left(
    bench: Any, model: tuple[Path, LlamaForCausalLM]
) -> None:
    folder, _ = model
    config = folder / "config.json"
    told = config.read_text()
    for old, new, said in (
        ('"model_type": "llama"', '"model_type": "qwen3"', "no Llama"),
        ('"rope_type": "default"', '"rope_type": "linear"', "type linear"),
    ):
        assert old in told
        config.write_text(told.replace(old, new))
        with pytest.raises(RuntimeError, match=said):
            bench("gguf_form").form_of(folder)
        assert not list(bench("forms").place_of(folder).iterdir())


def saved(tokens: int, rows: list[list[bytes]]) -> bytes:
    """A saved sequence as llama.cpp writes it; ``rows`` of each layer's keys, then of each layer's values."""
    cells = b"".join(struct.pack("<iIi", position, 1, 0) for position in range(tokens))
    parts = [struct.pack("<iQ", 8, len(some[0])) + b"".join(some[:tokens]) for some in rows]
    return b"llamaseq" + struct.pack("<II", 1, tokens) + cells + struct.pack("<II", 0, len(rows) // 2) + b"".join(parts)


@pytest.mark.parametrize("tokens", [1, 3, 7])
def test_a_saved_sequence_is_repeated_to_any_length(bench: Any, tokens: int) -> None:
    short = [[bytes([part, row] * (5 + part)) for row in range(3)] for part in range(4)]
    longer = [(some * 3)[:tokens] for some in short]
    got = bench("llama_cpp_state").stretched(np.frombuffer(saved(3, short), np.uint8), tokens)
    assert got.tobytes() == saved(tokens, longer)


def test_a_sequence_that_is_saved_otherwise_is_refused(bench: Any) -> None:
    whole = np.frombuffer(saved(3, [[b"abcd"] * 3, [b"efgh"] * 3]), np.uint8)
    for changed in (whole[:-1], whole[:30], whole[:8], np.append(whole, whole[:1])):
        with pytest.raises(RuntimeError, match="saves a sequence in another way"):
            bench("llama_cpp_state").stretched(changed, 5)
