"""A Llama model as a GGUF file, written beside it once: the same weights, for llama.cpp.

Matrices keep the bits of the model's bfloat16 (``bf16``), or are rounded to float16 (``f16``), which changes only
values below 6e-5; vectors become float32, as llama.cpp wants them. llama.cpp rotates neighbouring elements of queries
and keys where transformers rotates those half a head apart, so the rows of their projections change places.

    python benchmarks/peers/gguf_form.py FOLDER [bf16|f16]      (in the environment of requirements-llama_cpp.txt)
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from forms import made_from, place_of
from numpy.typing import NDArray

FORMATS = {"bf16": gguf.GGMLQuantizationType.BF16, "f16": gguf.GGMLQuantizationType.F16}
FILE_TYPES = {"bf16": gguf.LlamaFileType.MOSTLY_BF16, "f16": gguf.LlamaFileType.MOSTLY_F16}
OUTER = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
INNER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
Words = NDArray[np.uint16]


def form_of(model: Path, wanted: str = "bf16") -> Path:
    """The GGUF file of a model, written unless there is one that is no older than the model.

    Args:
        model: a folder with config.json, tokenizer.json and bfloat16 weights in safetensors.
        wanted: the format of the matrices, ``bf16`` or ``f16``.

    Raises:
        RuntimeError: the model cannot be written so; the message is one sentence.
    """
    file = place_of(model) / f"{wanted}.gguf"
    if not made_from(file, model):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".gguf-", dir=file.parent) as folder:
            draft = Path(folder) / file.name
            write(model, wanted, draft)
            draft.rename(file)
    return file


def write(model: Path, wanted: str, file: Path) -> None:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
        raise RuntimeError(f"{model.name} is no Llama without biases, and no other model is written as GGUF here")
    writer = gguf.GGUFWriter(file, "llama")
    add_shape(writer, config)
    writer.add_name(model.name)
    writer.add_file_type(FILE_TYPES[wanted])
    add_tokenizer(writer, model, config)
    for name, words in weights(model):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        add_tensor(writer, name, words, config, wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {"rope_type": "default", **(config.get("rope_scaling") or {})}
    if rope.get("rope_type", "default") != "default":
        raise RuntimeError(f"positions of type {rope['rope_type']} are not written as GGUF here, only plain ones")
    dim = head_dim(config)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(rope.get("rope_theta") or config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def add_tokenizer(writer: gguf.GGUFWriter, model: Path, config: dict[str, Any]) -> None:
    """The vocabulary and merges of a byte-level BPE tokenizer; benchmarks hand over ids, so it is not used."""
    told = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["id"]: token for token in told["added_tokens"]}
    texts = {number: text for text, number in told["model"]["vocab"].items()}
    texts |= {number: token["content"] for number, token in added.items()}
    tokens, kinds = [], []
    for number in range(config["vocab_size"]):
        tokens.append(texts.get(number, f"[unused {number}]"))
        kinds.append(
            gguf.TokenType.UNUSED
            if number not in texts
            else gguf.TokenType.CONTROL
            if number in added and added[number]["special"]
            else gguf.TokenType.NORMAL
        )
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in told["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if '"Digits"' in json.dumps(told["pre_tokenizer"]) else "gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def add_tensor(writer: gguf.GGUFWriter, name: str, words: Words, config: dict[str, Any], wanted: str) -> None:
    """One tensor under llama.cpp's name."""
    layer = LAYER.fullmatch(name)
    if name in OUTER:
        new = OUTER[name]
    elif layer and layer[2] in INNER:
        new = f"blk.{layer[1]}.{INNER[layer[2]]}"
    else:
        raise RuntimeError(f"the model holds a tensor {name}, which a Llama in GGUF has no place for")
    if new.endswith("attn_q"):
        words = neighbours(words, config["num_attention_heads"])
    elif new.endswith("attn_k"):
        words = neighbours(words, config["num_key_value_heads"])
    if words.ndim == 1:
        writer.add_tensor(f"{new}.weight", float32(words))
    elif wanted == "bf16":
        writer.add_tensor(f"{new}.weight", words.view(np.uint8), raw_dtype=FORMATS[wanted])
    else:
        values = float32(words)
        if np.abs(values).max() > np.finfo(np.float16).max:
            raise RuntimeError(f"{name} has values that float16 cannot hold; use bf16")
        writer.add_tensor(f"{new}.weight", values.astype(np.float16))


def neighbours(words: Words, heads: int) -> Words:
    """Rows of a projection (heads * D, hidden) so that the two elements of a rotated pair lie beside each other."""
    rows, width = words.shape
    halves = words.reshape(heads, 2, rows // heads // 2, width)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, width)


def float32(words: Words) -> NDArray[np.float32]:
    return (words.astype(np.uint32) << 16).view(np.float32)


def weights(model: Path) -> Iterator[tuple[str, Words]]:
    """All tensors of a model as the bits of their bfloat16 values; numpy has no such type."""
    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise RuntimeError(f"there is no *.safetensors in {model.name}")
    for file in files:
        with open(file, "rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            told = json.loads(stream.read(size))
        told.pop("__metadata__", None)
        data = np.memmap(file, np.uint8, "r", offset=8 + size)
        for name, about in told.items():
            if about["dtype"] != "BF16":
                raise RuntimeError(f"{name} in {file.name} is {about['dtype']}, and only BF16 is written as GGUF here")
            start, end = about["data_offsets"]
            yield name, data[start:end].view(np.uint16).reshape(about["shape"])


if __name__ == "__main__":
    print(form_of(Path(sys.argv[1]), *sys.argv[2:]))
