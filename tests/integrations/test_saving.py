"""A digested document as a file: it answers as before, is written whole or not at all, and is checked when loaded."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from kvwinnow import CompressedCache, KvwinnowError
from kvwinnow.errors import CacheStateError, DocumentError
from kvwinnow.integrations.transformers.calls import NewTokens, Seen
from kvwinnow.integrations.transformers.fingerprint import fingerprint
from kvwinnow.policies import Policy
from tests.integrations.test_memory import storage_bytes
from tests.models import KINDS, tiny_model, tiny_tokens
from tests.running import FULL_WIDTH, logits, text

CODECS = ["fp32", "bf16", "fp16", "fp8", "int8", "int4", "fp4", "fp4:style=mx"]


def digested(policy: str = "h2o:budget=24", dtype: str = "int4", **dtypes: Any) -> tuple[Any, Tensor, CompressedCache]:
    """A model, a document of 70 tokens, and a cache that holds it."""
    model = tiny_model()
    cache = CompressedCache(model, policy, **(dtypes or {"dtype": dtype}))
    ids = tiny_tokens(70)[0]
    logits(model, ids, cache)
    return model, ids, cache


def asked(ids: Tensor, seed: int = 1) -> Tensor:
    return torch.cat([ids, tiny_tokens(7, seed=seed)[0]], dim=1)


def content(cache: CompressedCache) -> dict[str, Tensor]:
    return {f"{index}.{name}": x for index, layer in enumerate(cache.layers) for name, x in layer.flat().items()}


def same(one: CompressedCache, other: CompressedCache) -> None:
    """Everything that can be seen of two caches is equal, bit for bit."""
    a, b = content(one), content(other)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype
        assert torch.equal(tensor.contiguous().view(torch.uint8), b[name].contiguous().view(torch.uint8)), name
    assert [layer.kept for layer in one.layers] == [layer.kept for layer in other.layers]
    assert (one.policy, one.k_codec, one.v_codec, one._seen) == (
        other.policy,
        other.k_codec,
        other.v_codec,
        other._seen,
    )
    assert one.budgets.state() == other.budgets.state()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, CompressedCache, bytes]:
    """A model, a cache and the bytes of its file."""
    model, _, cache = digested("snapkv:budget=24,window=4", "fp4")
    file = tmp_path_factory.mktemp("saved") / "x"
    cache.save(file)
    return model, cache, file.read_bytes()


# -- what comes back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", CODECS)
@pytest.mark.parametrize("policy", FULL_WIDTH.values(), ids=FULL_WIDTH)
def test_a_loaded_cache_goes_on_where_the_saved_one_stood(policy: str, dtype: str, tmp_path: Path) -> None:
    model, ids, cache = digested(policy, dtype)
    file = tmp_path / "document.safetensors"
    cache.save(file)
    loaded = CompressedCache.load(file, model)
    same(cache, loaded)
    assert loaded.nbytes() == storage_bytes(loaded) == cache.nbytes()
    expected = text(model, asked(ids), cache=copy.deepcopy(cache), tokens=6)
    assert text(model, asked(ids), cache=loaded.fork(), tokens=6) == expected
    assert text(model, asked(ids), cache=loaded, tokens=6) == expected
    assert text(model, asked(ids), cache=cache, tokens=6) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_saves_and_loads(kind: str, tmp_path: Path) -> None:
    # Qwen2.5-VL divides the head dimension among height, width and time, in a way that needs 16.
    model = tiny_model(kind) if kind == "qwen2_5_vl" else tiny_model(kind, heads=3, kv_heads=1, dim=24)
    cache = CompressedCache(model, "snapkv:budget=24,window=8", k_dtype="fp8", v_dtype="fp4")
    ids, mask = tiny_tokens(50, 31)
    logits(model, ids, cache, attention_mask=mask)
    cache.save(tmp_path / "x")
    more, shown = torch.cat([ids, ids[:, -5:]], 1), torch.cat([mask, mask[:, -5:]], 1)
    loaded = CompressedCache.load(tmp_path / "x", model)
    assert text(model, more, shown, loaded) == text(model, more, shown, cache)


@pytest.mark.parametrize("policy", ["h2o:budget=0.25", "snapkv:budget=0.5,window=8", "hybrid:budget=20kB"])
def test_a_share_or_size_goes_on_from_what_was_resolved(policy: str, tmp_path: Path) -> None:
    model, ids, cache = digested(policy, "fp4")
    text(model, asked(ids), cache=cache)  # a turn, so that decoding has begun
    talk = torch.cat([asked(ids), torch.zeros(1, 12, dtype=torch.int64)], 1)
    cache.save(tmp_path / "x")
    loaded = CompressedCache.load(tmp_path / "x", model)
    same(cache, loaded)
    for made in (cache, loaded):
        logits(model, talk[:, -5:], made)
        for token in tiny_tokens(9)[0].split(1, 1):
            logits(model, token, made)
    same(cache, loaded)


@pytest.mark.parametrize(("v_dtype", "steps"), [("fp32", 30), ("int4", 3)])  # in time a value falls to another code
def test_a_fork_saves_as_one_flat_file(v_dtype: str, steps: int, tmp_path: Path) -> None:
    model, _, cache = digested("h2o:budget=24", k_dtype="fp32", v_dtype=v_dtype)
    fork = cache.fork()
    logits(model, tiny_tokens(9, seed=1)[0], fork)
    fork = fork.fork()
    logits(model, tiny_tokens(3, seed=2)[0], fork)
    fork.save(tmp_path / "x")
    loaded = CompressedCache.load(tmp_path / "x", model)
    same(fork, loaded)
    assert loaded.report().shared_nbytes == 0
    for seed in range(steps):
        token = tiny_tokens(1, seed=seed)[0]
        torch.testing.assert_close(logits(model, token, loaded), logits(model, token, fork), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "policy", ["snapkv:budget=24,window=8,kernel=3", "tova:budget=24", "expectedattention:budget=24"]
)
def test_chosen_rows_save_and_load(policy: str, tmp_path: Path) -> None:
    model, ids, cache = digested(policy)
    text(model, asked(ids), cache=cache, num_beams=3)
    cache.batch_select_indices(torch.tensor([1]))
    cache.save(tmp_path / "x")
    same(cache, CompressedCache.load(tmp_path / "x", model))


def test_a_cache_loaded_in_inference_mode_goes_on_outside_it(tmp_path: Path) -> None:
    model, ids, cache = digested("snapkv:budget=24,window=8,kernel=3")
    cache.save(tmp_path / "x")
    with torch.inference_mode():
        loaded = CompressedCache.load(tmp_path / "x", model)
    assert text(model, asked(ids), cache=loaded) == text(model, asked(ids), cache=cache)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
@pytest.mark.parametrize(
    "dtypes",
    [{}, {"k_dtype": "bf16"}, {"v_dtype": "fp4"}, {"k_dtype": "bf16", "v_dtype": "int4"}, {"dtype": "int8"}],
    ids=str,
)
def test_what_autocast_made_saves_and_loads(dtypes: dict[str, Any], kind: str, tmp_path: Path) -> None:
    model, ids = tiny_model(kind), tiny_tokens(70)[0]
    cache = CompressedCache(model, "snapkv:budget=24,window=8,kernel=3", **dtypes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits(model, ids, cache)
    cache.save(tmp_path / "x")
    loaded = CompressedCache.load(tmp_path / "x", model)
    same(cache, loaded)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(logits(model, ids[:, :5], loaded), logits(model, ids[:, :5], cache))


def test_a_model_in_64_bits_saves_and_loads(tmp_path: Path) -> None:
    model = tiny_model().double()
    cache = CompressedCache(model, "snapkv:budget=24,window=8,kernel=3", dtype="int8")
    logits(model, tiny_tokens(70)[0], cache)
    cache.save(tmp_path / "x")
    same(cache, CompressedCache.load(tmp_path / "x", model))


def test_a_cache_fed_with_embeddings_saves_without_digests(tmp_path: Path) -> None:
    model = tiny_model()
    cache = CompressedCache(model, "full")
    with torch.no_grad():
        model(inputs_embeds=model.get_input_embeddings()(tiny_tokens(20)[0]), past_key_values=cache)
    cache.save(tmp_path / "x")
    same(cache, CompressedCache.load(tmp_path / "x", model))


def test_saved_twice_is_saved_alike_and_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    model, _, cache = digested()
    cache.save(tmp_path / "a")
    cache.save(str(tmp_path / "b"))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    tensors = safetensors.torch.load_file(tmp_path / "a")
    assert torch.equal(tensors["1.positions"], cache.positions(1))
    with safe_open(tmp_path / "a", "pt") as file:
        assert file.metadata()["policy"] == str(cache.policy)
        assert json.loads(file.metadata()["model"]) == fingerprint(model)
    # Beside the tensors there is a header, and nothing is larger than in memory.
    assert cache.nbytes() < (tmp_path / "a").stat().st_size < cache.nbytes() + 8000


def test_a_loaded_cache_refuses_another_prompt(tmp_path: Path) -> None:
    model, ids, cache = digested()
    cache.save(tmp_path / "x")
    loaded = CompressedCache.load(tmp_path / "x", model)
    with pytest.raises(CacheStateError, match="begins with none of"):
        text(model, tiny_tokens(80, seed=5)[0], cache=loaded)
    loaded.reset()
    assert text(model, ids, cache=loaded) == text(
        model, ids, cache=CompressedCache(model, "h2o:budget=24", dtype="int4")
    )


def test_a_file_may_be_replaced_while_what_was_loaded_from_it_is_used(tmp_path: Path) -> None:
    model, ids, cache = digested()
    expected = text(model, asked(ids), cache=copy.deepcopy(cache))
    cache.save(tmp_path / "x")
    loaded = CompressedCache.load(tmp_path / "x", model)
    with open(tmp_path / "x", "r+b") as stream:
        stream.truncate(0)
    assert text(model, asked(ids), cache=loaded) == expected


def test_device_is_that_of_the_model_or_as_told(tmp_path: Path) -> None:
    model, _, cache = digested()
    cache.save(tmp_path / "x")
    assert CompressedCache.load(tmp_path / "x", model, device="cpu").positions(0).device.type == "cpu"
    assert CompressedCache.load(tmp_path / "x", model, device="meta").positions(0).device.type == "meta"
    for device in ("gpu", "cuda:99", 3.5):
        with pytest.raises(KvwinnowError, match="device="):
            CompressedCache.load(tmp_path / "x", model, device=device)  # type: ignore[arg-type]


# -- digests ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
@settings(deadline=None, derandomize=True, max_examples=30)
def test_digests_do_not_depend_on_chunks(lengths: list[int]) -> None:
    ids = tiny_tokens(sum(lengths), sum(lengths))[0]
    seen = Seen()
    for chunk in ids.split(lengths, dim=1):
        seen = seen.after(NewTokens(chunk.shape[1], (0, 0)), chunk, decoding=False)
    whole = Seen().after(NewTokens(ids.shape[1], (0, 0)), ids, decoding=False)
    assert seen == whole
    changed = ids.clone()
    changed[1, 0] += 1
    assert Seen().after(NewTokens(ids.shape[1], (0, 0)), changed, decoding=False).digests != whole.digests
    assert whole.rows_that_go_on(torch.cat([ids, ids[:, :1]], 1), 1) == (0, 1)
    with pytest.raises(CacheStateError):
        whole.rows_that_go_on(torch.cat([changed, ids[:, :1]], 1), 1)


# -- states that are not saved ----------------------------------------------------------------------------------------


def test_an_empty_cache_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CacheStateError, match="empty"):
        CompressedCache(tiny_model(), "full").save(tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_prompt_half_fed_is_not_saved(tmp_path: Path) -> None:
    model = tiny_model()
    cache = CompressedCache(model, "h2o:budget=24")
    with pytest.raises(KvwinnowError), cache.prompt(length=40):  # noqa: PT012 - the block itself complains at its end
        logits(model, tiny_tokens(20)[0], cache)
        with pytest.raises(CacheStateError, match=r"save\(\) inside .*cache.prompt"):
            cache.save(tmp_path / "x")


def test_an_interrupted_cache_is_not_saved(tmp_path: Path) -> None:
    model, ids, cache = digested()
    handle = model.base_model.layers[1].register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        logits(model, ids[:, :3], cache)
    handle.remove()
    with pytest.raises(CacheStateError, match="interrupted"):
        cache.save(tmp_path / "x")


def test_a_policy_that_no_text_names_is_not_saved(tmp_path: Path) -> None:
    class Own(Policy):
        name = "own"

    model = tiny_model()
    cache = CompressedCache(model, Own())
    logits(model, tiny_tokens(9)[0], cache)
    with pytest.raises(DocumentError, match=r"'own'.*POLICIES"):
        cache.save(tmp_path / "x")


# -- whole or not at all ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["missing/x", "file/x", "folder"])
def test_a_place_that_cannot_be_written_to_is_told(place: str, saved: Any, tmp_path: Path) -> None:
    _, cache, _ = saved
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DocumentError, match=place) as error:
        cache.save(tmp_path / place)
    assert "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file of this process may grow beyond ``size`` bytes, as if the disk were full."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_the_old_file_and_nothing_else(saved: Any, tmp_path: Path) -> None:
    model, cache, whole = saved
    file = tmp_path / "x"
    cache.save(file)
    for size in (0, 100, len(whole) - 5):
        with files_of_at_most(size), pytest.raises(DocumentError, match="cannot be written"):
            cache.save(file)
        assert list(tmp_path.iterdir()) == [file]
        assert file.read_bytes() == whole
    same(cache, CompressedCache.load(file, model))


KILLED = """
import sys
from kvwinnow.cache import tensor_file
from tests.integrations.test_saving import digested
model, ids, cache = digested("full", "fp32")
def slow(tensor, original=tensor_file._bytes_of):
    print("writing", flush=True)
    import time; time.sleep(0.05)
    return original(tensor)
tensor_file._bytes_of = slow
cache.save(sys.argv[1])
"""


def test_a_process_killed_while_it_saves_leaves_the_old_file(saved: Any, tmp_path: Path) -> None:
    model, cache, whole = saved
    file = tmp_path / "x"
    file.write_bytes(whole)
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(file)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path])},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"writing\n"
    assert process.stdout.readline() == b"writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert file.read_bytes() == whole
    same(cache, CompressedCache.load(file, model))
    assert len(list(tmp_path.glob(".x.*.draft"))) == 1  # what was begun lies beside it under another name


def test_a_link_is_followed_and_stays(saved: Any, tmp_path: Path) -> None:
    model, cache, _ = saved
    (tmp_path / "link").symlink_to(tmp_path / "real")
    cache.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").is_file()
    same(cache, CompressedCache.load(tmp_path / "link", model))


def test_the_fingerprint_of_a_model_takes_no_time() -> None:
    """It looks at some elements of each parameter only."""
    model = tiny_model(layers=8)
    begin = time.process_time()
    fingerprint(model)
    assert time.process_time() - begin < 5
