"""However a model was loaded, the cache follows each layer's device and dtype: hooks, quantised weights, adapters."""

from __future__ import annotations

import copy
import gc
import importlib
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, TorchAoConfig
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils.peft_utils import check_peft_version

from kvwinnow import CompressedCache, KvwinnowError
from kvwinnow.cache import Step
from kvwinnow.errors import UnsupportedModelError
from kvwinnow.policies import Phase
from tests.integrations.test_memory import storage_bytes
from tests.models import tiny_model, tiny_tokens
from tests.running import CACHE, EVICTING, FULL_WIDTH, counts, held, logits, text, with_budget

POLICIES = ["window", "h2o", "snapkv"]
CPU = torch.device("cpu")


def padded() -> tuple[Tensor, Tensor]:
    return tiny_tokens(50, 20)


def say(policy: str, model: PreTrainedModel | None = None) -> list[list[int]]:
    """What a model says through a new cache; by default the plain one, loaded as ever."""
    model = model or tiny_model()
    return text(model, *padded(), CompressedCache(model, policy))


# -- accelerate -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    return path


DEVICE_MAPS: dict[str, Any] = {
    "auto": "auto",
    "cpu": "cpu",
    "decoder in one piece": {"model": "cpu", "lm_head": "disk"},
    "a layer on disk": {
        "model.embed_tokens": "cpu",
        "model.rotary_emb": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "cpu",
        "lm_head": "cpu",
    },
}


@pytest.mark.parametrize("where", DEVICE_MAPS)
def test_a_device_map_changes_no_token(where: str, folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        folder, device_map=DEVICE_MAPS[where], offload_folder=tmp_path, dtype=torch.float32
    )
    for policy in (FULL_WIDTH["full"], *EVICTING.values()):
        assert say(policy, model) == say(policy)


def offload_to_disk(model: nn.Module, folder: Path) -> None:
    disk_offload(model, folder, execution_device=CPU)


def offload_to_cpu(model: nn.Module, folder: Path) -> None:
    cpu_offload(model, execution_device=CPU)


def hook_everything(model: nn.Module, folder: Path) -> None:
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))


HOOKS = [offload_to_cpu, offload_to_disk, hook_everything]


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
@pytest.mark.parametrize("first", ["hooks", "cache"])
def test_hooks_may_come_before_or_after_a_cache_and_go_while_it_lives(hook: Any, first: str, tmp_path: Path) -> None:
    model, expected = tiny_model(), say(EVICTING["h2o"])
    cache = None if first == "hooks" else CompressedCache(model, EVICTING["h2o"])
    hook(model, tmp_path)
    cache = cache or CompressedCache(model, EVICTING["h2o"])
    later = CompressedCache(model, EVICTING["h2o"])
    assert text(model, *padded(), cache) == text(model, *padded(), later) == expected
    remove_hook_from_module(model, recurse=True)
    assert say(EVICTING["h2o"], model) == expected
    for used in (cache, later):
        used.reset()
        assert text(model, *padded(), used) == expected
        assert used.report().tokens_seen == 61


@pytest.mark.parametrize("first", ["hooks", "cache"])
@pytest.mark.parametrize("gone", ["hooks", "cache"])
def test_a_hooked_model_is_as_it_was_once_its_caches_are_gone(first: str, gone: str, tmp_path: Path) -> None:
    model, ids = tiny_model(), padded()[0]
    plain = logits(model, ids)
    cache = CompressedCache(model, "full") if first == "cache" else None
    hook_everything(model, tmp_path)
    cache = cache or CompressedCache(model, "full")
    if gone == "hooks":
        remove_hook_from_module(model, recurse=True)
    del cache
    gc.collect()
    placed = [vars(model.model).get(place) for place in ("forward", "_old_forward")]
    assert all(getattr(method, "__func__", None) in (None, type(model.model).forward) for method in placed)
    assert torch.equal(logits(model, ids), plain)
    assert say(EVICTING["h2o"], model) == say(EVICTING["h2o"])


@pytest.mark.parametrize("hook", HOOKS)
def test_rotations_are_found_wherever_the_weights_are(hook: Any, tmp_path: Path) -> None:
    model, ids = tiny_model(), tiny_tokens(60)[0]
    expected = text(model, ids, cache=CompressedCache(model, "expectedattention:budget=24"))
    hook(model, tmp_path)
    cache = CompressedCache(model, "expectedattention:budget=24")
    assert text(model, ids, cache=cache) == expected


def test_a_deep_copy_of_a_hooked_model_has_caches_of_its_own(tmp_path: Path) -> None:
    model, expected = tiny_model(), say(EVICTING["h2o"])
    hook_everything(model, tmp_path)
    cache = CompressedCache(model, EVICTING["h2o"])
    twin = copy.deepcopy(model)
    assert say(EVICTING["h2o"], twin) == text(model, *padded(), cache) == expected


def test_a_steps_tensors_are_copied_to_another_device_once() -> None:
    """There is no second device on every machine, and the meta device is one of which only the place is asked."""
    step = Step(Phase.PROMPT, torch.tensor([[0, 1, 2], [-1, 0, 1]], dtype=torch.int32), (0, 1), (3, 2), (None, None))
    away = step.on(torch.device("meta"))
    assert step.on(CPU) is step
    assert away.positions.is_meta
    assert away.last.is_meta
    assert away is step.on(torch.device("meta"))
    assert (away.phase, away.starts, away.seen, away.budgets) == (step.phase, step.starts, step.seen, step.budgets)


# -- dtypes -----------------------------------------------------------------------------------------------------------


def cast_layer(model: PreTrainedModel, index: int, dtype: torch.dtype) -> None:
    """Let one layer compute in another dtype than the others, as casting hooks do."""
    layer = model.base_model.layers[index].to(dtype)

    def cast(value: Any, to: torch.dtype) -> Any:
        if isinstance(value, tuple):
            return tuple(cast(part, to) for part in value)
        return value.to(to) if isinstance(value, Tensor) and value.is_floating_point() else value

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast(args, dtype), {name: cast(value, dtype) for name, value in kwargs.items()}

    layer.register_forward_pre_hook(before, with_kwargs=True)
    layer.register_forward_hook(lambda _, __, out: cast(out, torch.float32))


@pytest.mark.parametrize("dtypes", [{}, {"dtype": "int4"}, {"k_dtype": "int8"}, {"v_dtype": "bf16"}], ids=str)
@pytest.mark.parametrize("name", EVICTING)
def test_each_layer_is_stored_in_its_own_dtype_and_the_bytes_are_foretold(name: str, dtypes: dict[str, Any]) -> None:
    model = tiny_model()
    cast_layer(model, 1, torch.bfloat16)
    cache = CompressedCache(model, EVICTING[name], **dtypes)
    foretold = cache.budgets.nbytes(24, 2)
    logits(model, tiny_tokens(60, 60)[0], cache)
    assert foretold == cache.budgets.nbytes(24, 2) == cache.nbytes() == storage_bytes(cache)
    if not dtypes:
        assert [layer.slots.values.parts[0].dtype for layer in cache.layers] == [torch.float32, torch.bfloat16]
        assert cache.report().k_dtype == "fp32, bf16"


@pytest.mark.parametrize("name", EVICTING)
def test_a_budget_in_bytes_is_used_to_the_last_token_where_layers_differ(name: str) -> None:
    model = tiny_model()
    cast_layer(model, 0, torch.bfloat16)
    cache = CompressedCache(model, with_budget(name, "48KiB"))
    logits(model, tiny_tokens(400)[0], cache)
    (kept,) = counts(cache)
    assert cache.nbytes() <= 48 * 1024 < cache.budgets.nbytes(kept + 1, 1)


@pytest.mark.parametrize("name", FULL_WIDTH)
def test_layers_of_two_dtypes_compute_what_they_compute_without_a_cache(name: str) -> None:
    model, ids = tiny_model(), tiny_tokens(60)[0]
    cast_layer(model, 1, torch.bfloat16)
    cache = CompressedCache(model, with_budget(name, 80))
    ours = torch.cat([logits(model, new, cache) for new in (ids[:, :40], ids[:, 40:58], *ids[:, 58:].split(1, 1))], 1)
    assert torch.allclose(ours, logits(model, ids), atol=0.05)  # bfloat16 rounds the values of size 4 to 0.016


def test_a_cache_follows_a_model_that_is_moved_to_another_dtype_after_it_was_made() -> None:
    model = tiny_model()
    cache = CompressedCache(model, "streamingllm:budget=63")
    twin = copy.deepcopy(cache)
    model.to(torch.bfloat16)
    for one in (cache, twin):
        logits(model, tiny_tokens(90)[0], one)
        assert one.nbytes() == one.budgets.nbytes(63, 1) == 2 * 2 * 64 * (2 * 16 * 2 + 4)
        one.reset()
    model.float()
    logits(model, tiny_tokens(90)[0], cache)
    assert cache.nbytes() == cache.budgets.nbytes(63, 1) == 2 * 2 * 64 * (2 * 16 * 4 + 4)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_autocast_takes_no_more_bytes_than_foretold(kind: str) -> None:
    model = tiny_model(kind)
    cache = CompressedCache(model, "snapkv:budget=24,window=8")
    with torch.autocast("cpu", torch.bfloat16):
        logits(model, tiny_tokens(60)[0], cache)
    assert cache.nbytes() == storage_bytes(cache) <= cache.budgets.nbytes(24, 1)


# -- quantised weights ------------------------------------------------------------------------------------------------

WEIGHTS = {
    "int8": ("Int8WeightOnlyConfig", {}),
    "dynamic int8": ("Int8DynamicActivationInt8WeightConfig", {}),
    "int4": ("IntxWeightOnlyConfig", {"weight_dtype": torch.int4}),
}


def torchao_config(weights: str) -> Any:
    name, options = WEIGHTS[weights]
    return getattr(importlib.import_module("torchao.quantization"), name)(**options)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_quantised_weights_say_what_they_say_without_a_cache(weights: str) -> None:
    model = tiny_model()
    importlib.import_module("torchao.quantization").quantize_(model, torchao_config(weights))
    plain, ids = text(model, *padded()), padded()[0]
    assert not torch.equal(logits(model, ids), logits(tiny_model(), ids))
    for name in FULL_WIDTH:
        assert text(model, *padded(), CompressedCache(model, with_budget(name, 80))) == plain
    for policy in EVICTING.values():
        cache = CompressedCache(model, policy, dtype="int4")
        logits(model, tiny_tokens(60)[0], cache)
        assert cache.budgets.nbytes(24, 1) == cache.nbytes()
        assert counts(cache) == {24}


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_quantised_by_from_pretrained(weights: str, folder: Path) -> None:
    config = TorchAoConfig(torchao_config(weights))
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map="cpu", dtype=torch.float32
    )
    assert model.dtype == torch.float32
    assert say("h2o:budget=80", model) == text(model, *padded())


# -- adapters ---------------------------------------------------------------------------------------------------------


def lora(dtype: torch.dtype = torch.float32, targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")) -> Any:
    """A PeftModel whose adapter is not the identity."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=list(targets), init_lora_weights=False, r=4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return peft.get_peft_model(tiny_model().to(dtype), config).eval()


@pytest.mark.parametrize("name", FULL_WIDTH)
def test_an_adapted_model_says_what_it_says_without_a_cache(name: str) -> None:
    model = lora()
    plain = text(model, *padded())
    assert plain != text(tiny_model(), *padded())
    assert text(model, *padded(), CompressedCache(model, with_budget(name, 80))) == plain


@pytest.mark.parametrize("name", POLICIES)
def test_a_peft_model_and_the_model_in_it_are_one_to_the_cache(name: str) -> None:
    model = lora()
    inner = model.get_base_model()
    caches = [CompressedCache(which, EVICTING[name]) for which in (model, inner)]
    assert text(model, *padded(), caches[0]) == text(inner, *padded(), caches[1])
    assert held(caches[0], 1, 0, 1) == held(caches[1], 1, 0, 1)
    more = tiny_tokens(5, 5, seed=1)[0]
    assert torch.equal(logits(model, more, caches[1]), logits(inner, more, caches[0]))


def test_an_adapter_may_be_switched_off_and_merged() -> None:
    model = lora()
    adapted, base = text(model, *padded()), text(tiny_model(), *padded())
    cache = CompressedCache(model, "h2o:budget=80")
    with model.disable_adapter():
        assert text(model, *padded(), cache) == base
    cache.reset()
    assert text(model, *padded(), cache) == adapted
    cache.reset()
    merged = model.merge_and_unload()
    assert text(merged, *padded(), cache) == adapted
    assert text(merged, *padded(), CompressedCache(merged, "h2o:budget=80")) == adapted


@pytest.mark.parametrize("name", EVICTING)
def test_an_adapter_in_float32_leaves_a_16_bit_model_its_dtype(name: str) -> None:
    model = lora(torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32, torch.bfloat16}
    cache = CompressedCache(model, EVICTING[name])
    logits(model, tiny_tokens(60)[0], cache)
    assert cache.report().k_dtype == cache.report().v_dtype == "bf16"
    assert cache.nbytes() == cache.budgets.nbytes(24, 1)


def test_an_adapter_that_transformers_added_itself() -> None:
    model = tiny_model()
    cache = CompressedCache(model, "h2o:budget=80")
    config = peft.LoraConfig(target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError:  # this transformers asks for a newer PEFT; what its add_adapter does is this call
        peft.inject_adapter_in_model(config, model)
    else:
        model.add_adapter(config)
    model.eval()
    adapted = text(model, *padded())
    assert adapted != text(tiny_model(), *padded())
    assert text(model, *padded(), cache) == adapted


def test_a_mixed_model_of_peft() -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model = peft.PeftMixedModel(tiny_model(), config).eval()
    assert text(model, *padded(), CompressedCache(model, "h2o:budget=80")) == text(model, *padded())


PROMPTS = {
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_learnt_prompts_are_refused_at_the_door_and_in_generate(kind: str) -> None:
    base = tiny_model()
    early = CompressedCache(base, "full")
    model = peft.get_peft_model(base, PROMPTS[kind]()).eval()
    for call in (lambda: CompressedCache(model, "full"), lambda: text(model, *padded(), early)):
        with pytest.raises(KvwinnowError, match=r"TuningConfig.*LoRA") as error:
            call()
        assert type(error.value) is UnsupportedModelError
        assert "\n" not in str(error.value)
    assert early.nbytes() == 0
    assert text(base, *padded(), early) == text(base, *padded())


def test_a_peft_model_with_a_cache_of_another_model_is_refused() -> None:
    cache = CompressedCache(tiny_model(), "full")
    with pytest.raises(KvwinnowError, match="another model"):
        lora()(padded()[0], **{CACHE: cache})
