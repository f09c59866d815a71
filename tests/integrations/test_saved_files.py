"""What is no saved cache, is damaged or forged, or belongs to another model: one sentence, and none of it is used."""

from __future__ import annotations

import contextlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvwinnow import CompressedCache, KvwinnowError
from kvwinnow.cache.tensor_file import write
from kvwinnow.errors import DocumentError
from tests.integrations.test_saving import digested, same
from tests.models import tiny_model, tiny_tokens
from tests.running import logits


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, CompressedCache, bytes]:
    """A model, a cache and the bytes of its file."""
    model, _, cache = digested("snapkv:budget=24,window=4", "fp4")
    file = tmp_path_factory.mktemp("saved") / "x"
    cache.save(file)
    return model, cache, file.read_bytes()


def complaint(file: Any, model: Any) -> str:
    with pytest.raises(KvwinnowError) as error:
        CompressedCache.load(file, model)
    said = str(error.value)
    assert "\n" not in said
    return said


def zipped(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data.pkl", "cos\nsystem\n(S'true'\ntR.")


FOREIGN: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_bytes(b""),
    "text": lambda file: file.write_text("It was the best of times, it was the worst of times."),
    "zip": zipped,
    "pickle": lambda file: torch.save({"a": torch.ones(3)}, file),
    "zeros": lambda file: file.write_bytes(bytes(4096)),
    "other safetensors": lambda file: safetensors.torch.save_file({"a": torch.ones(3)}, file),
    "with a checksum": lambda file: safetensors.torch.save_file({"checksum": torch.ones(32, dtype=torch.uint8)}, file),
    "folder": lambda file: file.mkdir(),
    "nothing": lambda file: None,
    "huge header": lambda file: file.write_bytes((2**62).to_bytes(8, "little") + b"{}"),
}


@pytest.mark.parametrize("made", FOREIGN.values(), ids=FOREIGN)
def test_files_of_another_kind_are_refused_in_a_sentence(made: Callable[[Path], object], tmp_path: Path) -> None:
    file = tmp_path / "thing"
    made(file)
    said = complaint(file, tiny_model())
    assert repr(str(file)) in said
    assert "cache.save(path)" in said


@pytest.mark.parametrize("path", [None, 7, "", "a\0b", b"\xff\0", ["x"]], ids=repr)
def test_what_is_no_path_is_refused(path: Any, saved: Any) -> None:
    model, cache, _ = saved
    complaint(path, model)
    with pytest.raises(DocumentError):
        cache.save(path)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.3, 0.5, 0.9, 0.999])
def test_truncated_files_are_refused(share: float, saved: Any, tmp_path: Path) -> None:
    model, _, data = saved
    (tmp_path / "x").write_bytes(data[: int(len(data) * share)])
    assert "only a part of one" in complaint(tmp_path / "x", model)


@given(data=st.data())
@settings(deadline=None, derandomize=True, max_examples=150)
def test_a_damaged_file_gives_the_same_content_or_a_sentence(
    data: st.DataObject, saved: Any, tmp_path_factory: Any
) -> None:
    model, cache, whole = saved
    damaged = bytearray(whole)
    header = int.from_bytes(whole[:8], "little")
    place = st.integers(0, len(whole) - 1) | st.integers(0, header)
    for at in data.draw(st.lists(place, min_size=1, max_size=3)):
        damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    if data.draw(st.booleans()):
        del damaged[data.draw(place) :]
    file = tmp_path_factory.getbasetemp() / "damaged"
    file.write_bytes(damaged)
    with contextlib.suppress(KvwinnowError):
        same(cache, CompressedCache.load(file, model))


def rewritten(whole: bytes, file: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], object]) -> None:
    """A file with other content and a right checksum, as somebody would forge it."""
    tensors = safetensors.torch.load(whole)
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    texts = dict(header["__metadata__"])
    for key in ("model", "seen", "budgets", "layers"):
        texts[key] = json.loads(texts[key])
    del tensors["checksum"]
    change(texts, tensors)
    write(file, tensors, {key: text if isinstance(text, str) else json.dumps(text) for key, text in texts.items()})


def put(tensors: dict[str, Tensor], name: str, value: int, at: tuple[int, ...] = (0, 0, 5)) -> None:
    tensors[name][at] = value


FORGED: dict[str, Callable[[Any, Any], object]] = {
    "no format": lambda t, x: t.pop("format"),
    "odd format": lambda t, x: t.update(format="one"),
    "no policy": lambda t, x: t.pop("policy"),
    "unknown policy": lambda t, x: t.update(policy="os.system:budget=1"),
    "impossible policy": lambda t, x: t.update(policy="snapkv:budget=-5"),
    "unknown codec": lambda t, x: t.update(k_dtype="__import__('os')"),
    "another codec": lambda t, x: t.update(k_dtype="int8"),
    "codec that does not fit": lambda t, x: t.update(v_dtype="fp4:group=32"),
    "another policy": lambda t, x: t.update(policy="h2o:budget=24"),
    "model no object": lambda t, x: t.update(model=[1]),
    "no json": lambda t, x: t.update(seen="{"),
    "deep json": lambda t, x: t.update(seen="[" * 100_000),
    "columns": lambda t, x: t["seen"].update(columns=-1),
    "columns true": lambda t, x: t["seen"].update(columns=True),
    "columns huge": lambda t, x: t["seen"].update(columns=2**40),
    "no rows": lambda t, x: t["seen"].update(tokens=[]),
    "rows": lambda t, x: t["seen"].update(tokens=[70, 70]),
    "tokens": lambda t, x: t["seen"].update(tokens=[71]),
    "tokens text": lambda t, x: t["seen"].update(tokens="70"),
    "fewer tokens": lambda t, x: t["seen"].update(tokens=[60]),
    "digest": lambda t, x: t["seen"].update(digests=["xyz"]),
    "digests": lambda t, x: t["seen"].update(digests=[]),
    "ended": lambda t, x: t["seen"].update(ended=1),
    "budgets": lambda t, x: t.update(budgets=[0]),
    "budgets of rows": lambda t, x: t.update(budgets=[5, 5]),
    "layers": lambda t, x: t["layers"].pop(),
    "kept": lambda t, x: t["layers"][0].update(kept=[23]),
    "kept text": lambda t, x: t["layers"][0].update(kept=["24"]),
    "layer no object": lambda t, x: t.update(layers=[1, 2]),
    "observers": lambda t, x: t["layers"][1].update(observers=[5]),
    "no observers": lambda t, x: t["layers"][1].update(observers=[]),
    "a tensor more": lambda t, x: x.update(more=torch.ones(3)),
    "a tensor less": lambda t, x: x.pop("1.values.part0"),
    "no positions": lambda t, x: x.pop("0.positions"),
    "shape": lambda t, x: x.update({"0.keys.part0": x["0.keys.part0"][:, :, :-1].clone()}),
    "slots of another number": lambda t, x: x.update({"0.positions": x["0.positions"][:, :, :-1].clone()}),
    "flat positions": lambda t, x: x.update({"0.positions": x["0.positions"].flatten()}),
    "dtype": lambda t, x: x.update({"0.keys.exact": x["0.keys.exact"].half()}),
    "wide window": lambda t, x: x.update({"0.window": torch.zeros(1, 4, 5, 16)}),
    "flat window": lambda t, x: x.update({"0.window": torch.zeros(64)}),
    "position beyond": lambda t, x: put(x, "0.positions", 70),
    "position far below": lambda t, x: put(x, "0.positions", -2),
    "a token twice": lambda t, x: put(x, "0.positions", int(x["0.positions"][0, 0, 6])),
    "a token less": lambda t, x: put(x, "0.positions", -1),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_what_does_not_fit_is_refused_even_with_a_right_checksum(change: Any, saved: Any, tmp_path: Path) -> None:
    model, _, whole = saved
    rewritten(whole, tmp_path / "x", change)
    complaint(tmp_path / "x", model)


def test_a_rewritten_file_without_a_change_is_the_same(saved: Any, tmp_path: Path) -> None:
    model, cache, whole = saved
    rewritten(whole, tmp_path / "x", lambda texts, tensors: None)
    same(cache, CompressedCache.load(tmp_path / "x", model))


def test_a_newer_format_asks_for_an_update(saved: Any, tmp_path: Path) -> None:
    model, _, whole = saved
    rewritten(whole, tmp_path / "x", lambda texts, tensors: texts.update(format="2", kvwinnow="9.1"))
    said = complaint(tmp_path / "x", model)
    assert all(word in said for word in ("kvwinnow 9.1", "format 2", "pip install -U kvwinnow"))


def scaled(model: Any) -> Any:
    with torch.no_grad():
        model.lm_head.weight.mul_(1.001)
    return model


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "another kind": (lambda: tiny_model("qwen2"), "type: llama, here qwen2"),
    "more layers": (lambda: tiny_model(layers=3), "layers: 2, here 3"),
    "more heads": (lambda: tiny_model(heads=8), "heads: 4, here 8"),
    "other KV heads": (lambda: tiny_model(kv_heads=4), "kv heads: 2, here 4"),
    "another dimension": (lambda: tiny_model(dim=32), "head dim: 16, here 32"),
    "another vocabulary": (lambda: tiny_model(vocab_size=300), "vocabulary: 200, here 300"),
    "another RoPE": (
        lambda: tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        "rope",
    ),
    "other weights": (lambda: tiny_model(seed=1), "other weights"),
    "a trained head": (lambda: scaled(tiny_model()), "other weights"),
    "another dtype": (lambda: tiny_model().to(torch.bfloat16), "dtype=torch.float32"),
}


@pytest.mark.parametrize(("made", "says"), OTHERS.values(), ids=OTHERS)
def test_another_model_is_refused_with_what_differs(
    made: Callable[[], Any], says: str, saved: Any, tmp_path: Path
) -> None:
    _, _, whole = saved
    (tmp_path / "x").write_bytes(whole)
    said = complaint(tmp_path / "x", made())
    assert says in said
    assert repr(str(tmp_path / "x")) in said


def test_an_adapter_makes_another_model(saved: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    _, _, whole = saved
    (tmp_path / "x").write_bytes(whole)
    model = tiny_model()
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"], r=2), model)
    assert "other weights" in complaint(tmp_path / "x", model)


def test_an_adapter_that_is_off_or_weighs_otherwise_makes_another_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_model(), adapter).eval()
    cache = CompressedCache(model, "full")
    logits(model, tiny_tokens(40)[0], cache)
    cache.save(tmp_path / "x")
    with model.disable_adapter():
        assert "other weights" in complaint(tmp_path / "x", model)
    model.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"] *= 2
    assert "other weights" in complaint(tmp_path / "x", model)


def test_the_same_weights_are_the_same_model(saved: Any, tmp_path: Path) -> None:
    _, cache, whole = saved
    (tmp_path / "x").write_bytes(whole)
    same(cache, CompressedCache.load(tmp_path / "x", tiny_model()))
