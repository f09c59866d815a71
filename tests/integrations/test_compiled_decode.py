"""``compile_decode``: every cache says what it says uncompiled, graphs do the work, and what they cannot do is said."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import lookup_backend
from torch._inductor import config as inductor
from torch._subclasses import FakeTensorMode
from transformers import DynamicCache, PreTrainedModel

from kvwinnow import CompiledDecode, CompressedCache, KvwinnowError, compile_decode
from kvwinnow.ops.cpu import level
from tests.models import shown, tiny_model, tiny_tokens
from tests.running import CACHE, FULL_WIDTH, IN_BLOCKS, logits, text

POLICIES = {**FULL_WIDTH, **IN_BLOCKS, "pyramid": "pyramidkv:budget=24,window=8,kernel=3"}
OTHER_FAMILIES = [
    "qwen3", "phi3, sliding", "gemma2", "gemma3", "gpt_neox", "gpt2", "falcon, new", "qwen3_moe", "gpt_oss",
    "qwen2_5_vl", "gemma3, vision",
]  # fmt: skip

pytestmark = pytest.mark.filterwarnings("error:.*none of those compiled.*:UserWarning")


def traced_only(model: PreTrainedModel, batch_sizes: Any = 1) -> CompiledDecode:
    """The same without inductor, whose compiling takes long: a graph that runs as it was traced."""
    run: Any = lookup_backend("eager")
    return CompiledDecode(model, batch_sizes, backend=run)


@pytest.fixture(scope="module")
def compiled() -> Iterator[tuple[PreTrainedModel, CompiledDecode]]:
    """A model compiled by inductor with frozen weights, for one row and for three."""
    model = tiny_model()
    with compile_decode(model, batch_sizes=(1, 3)) as handle:
        yield model, handle


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    """The same model, uncompiled."""
    return tiny_model()


@pytest.fixture
def traced() -> Iterator[tuple[PreTrainedModel, CompiledDecode]]:
    model = tiny_model()
    with traced_only(model) as handle:
        yield model, handle


def served(handle: CompiledDecode, run: Callable[[], Any]) -> tuple[int, Any]:
    """How many decode steps graphs served, and the result."""
    before = handle.steps
    result = run()
    return handle.steps - before, result


# -- the same text -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "int8", "int4"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_padded_batch_says_what_it_says_uncompiled(
    compiled: Any, plain: PreTrainedModel, policy: str, dtype: str | None
) -> None:
    model, handle = compiled
    ids, mask = tiny_tokens(45, 30, 11)
    cache, other = CompressedCache(model, policy, dtype=dtype), CompressedCache(plain, policy, dtype=dtype)
    steps, said = served(handle, lambda: text(model, ids, mask, cache))
    assert said == text(plain, ids, mask, other)
    assert steps == 11
    for layer in range(2):
        assert torch.equal(cache.positions(layer), other.positions(layer))
    assert cache.nbytes() == other.nbytes()


@pytest.mark.parametrize("dtype", [None, "fp4"])
@pytest.mark.parametrize("policy", ["full", "compose:budget=24,prompt=full,decode=h2o"])
def test_a_cache_that_grows_and_shrinks_stays_in_its_graph(
    compiled: Any, plain: PreTrainedModel, policy: str, dtype: str | None
) -> None:
    model, handle = compiled
    ids, _ = tiny_tokens(70)
    cache = CompressedCache(model, policy, dtype=dtype)
    steps, said = served(handle, lambda: text(model, ids, cache=cache, tokens=80))
    assert said == text(plain, ids, cache=CompressedCache(plain, policy, dtype=dtype), tokens=80)
    assert steps == 79


def test_several_turns_and_a_fork(compiled: Any, plain: PreTrainedModel) -> None:
    model, handle = compiled

    def talk(model: PreTrainedModel) -> list[Any]:
        cache, ids, said = CompressedCache(model, "snapkv:budget=24,window=8"), tiny_tokens(40)[0], []
        for turn in range(3):
            said.append(text(model, ids, cache=cache))
            ids = torch.cat([ids, torch.tensor(said[-1]), tiny_tokens(9, seed=turn)[0]], dim=1)
        return [*said, text(model, ids, cache=cache.fork()), text(model, ids, cache=cache)]

    steps, said = served(handle, lambda: talk(model))
    assert said == talk(plain)
    assert steps == 5 * 11


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}], ids=str)
def test_beams_and_samples_are_rows(compiled: Any, plain: PreTrainedModel, options: dict[str, Any]) -> None:
    model, handle = compiled
    ids, _ = tiny_tokens(40)

    def say(model: PreTrainedModel) -> Any:
        torch.manual_seed(1)
        return text(model, ids, cache=CompressedCache(model, "h2o:budget=24"), **options)

    steps, said = served(handle, lambda: say(model))
    assert said == say(plain)
    assert steps == 11


@pytest.mark.parametrize("kind", OTHER_FAMILIES, ids=shown)
def test_every_structure_is_traced_as_it_is(kind: str) -> None:
    model, plain = tiny_model(kind), tiny_model(kind)
    ids, mask = tiny_tokens(40, 30)
    with traced_only(model, 2) as handle:
        steps, said = served(handle, lambda: text(model, ids, mask, CompressedCache(model, "tova:budget=24")))
    assert said == text(plain, ids, mask, CompressedCache(plain, "tova:budget=24"))
    assert steps == 11


def test_forward_calls_need_no_positions_and_may_be_in_inference_mode(compiled: Any, plain: PreTrainedModel) -> None:
    model, handle = compiled
    ids, _ = tiny_tokens(50)
    cache, other = CompressedCache(model, "h2o:budget=24"), CompressedCache(plain, "h2o:budget=24")
    got, expected = logits(model, ids, cache), logits(plain, ids, other)
    for step in range(12):
        new = expected[:, -1:].argmax(-1)
        with torch.no_grad() if step % 2 else torch.inference_mode():
            steps, out = served(handle, lambda: model(new.clone(), **{CACHE: cache}))  # noqa: B023
        got, expected = out.logits, logits(plain, new, other)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert steps == 1
        assert getattr(out, CACHE) is cache


def test_another_model_that_is_loaded_later_changes_nothing() -> None:
    model, ids = tiny_model(), tiny_tokens(20)[0]
    with traced_only(model) as handle:
        type("Another", (type(model),), {})(model.config)  # a class that transformers has not seen yet
        steps, _ = served(handle, lambda: text(model, ids, cache=CompressedCache(model, "h2o:budget=24")))
    assert steps > 0


def test_bfloat16_differs_by_rounding() -> None:
    model, plain = tiny_model().bfloat16(), tiny_model().bfloat16()
    ids, _ = tiny_tokens(50)
    with compile_decode(model) as handle:
        cache, other = CompressedCache(model, "h2o:budget=24"), CompressedCache(plain, "h2o:budget=24")
        logits(model, ids, cache), logits(plain, ids, other)
        got, expected = logits(model, ids[:, :1], cache), logits(plain, ids[:, :1], other)
    assert handle.steps == 1
    assert (got - expected).norm() < 0.02 * expected.norm()


def test_threads_share_the_graphs(compiled: Any, plain: PreTrainedModel) -> None:
    model, _ = compiled
    prompts = [tiny_tokens(40, seed=seed)[0] for seed in range(3)]
    said: dict[int, Any] = {}

    def job(which: int) -> None:
        said[which] = text(model, prompts[which], cache=CompressedCache(model, "h2o:budget=24"), tokens=30)

    threads = [threading.Thread(target=job, args=(which,)) for which in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for which, prompt in enumerate(prompts):
        cache = CompressedCache(plain, "h2o:budget=24")
        assert said[which] == text(plain, prompt, cache=cache, tokens=30)


@pytest.mark.parametrize("rows", [1, 3])
def test_other_threads_are_undisturbed_while_a_graph_is_made_and_taken_off(plain: PreTrainedModel, rows: int) -> None:
    """They decode uncompiled then, one row, for which a graph comes and goes, and three, for which there is none."""
    model, stop = tiny_model(), threading.Event()
    ids, mask = tiny_tokens(*[20] * rows, seed=1)
    expected = text(plain, ids, mask, cache=CompressedCache(plain, "h2o:budget=16"))
    said: list[Any] = []

    def job() -> None:
        while not stop.is_set():
            try:
                said.append(text(model, ids, mask, cache=CompressedCache(model, "h2o:budget=16")))
            except Exception as error:
                said.append(error)

    worker = threading.Thread(target=job)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*none of those compiled.*", UserWarning)
        worker.start()
        try:
            for _ in range(4):
                with traced_only(model):
                    time.sleep(0.05)
        finally:
            stop.set()
            worker.join()
    assert len(said) > 4
    assert [other for other in said if other != expected] == []


# -- what runs uncompiled ----------------------------------------------------------------------------------------------


def test_calls_without_our_cache_are_as_before(compiled: Any, plain: PreTrainedModel) -> None:
    model, handle = compiled
    ids, mask = tiny_tokens(30, 9, 2)
    before = handle.steps
    assert torch.equal(logits(model, ids, attention_mask=mask), logits(plain, ids, attention_mask=mask))
    assert text(model, ids, mask) == text(plain, ids, mask)
    caches: list[Any] = [DynamicCache(), DynamicCache()]
    for which, one in enumerate((model, plain)):
        logits(one, ids, caches[which])
    step = [logits(one, ids[:, :1], caches[which]) for which, one in enumerate((model, plain))]
    assert torch.equal(step[0], step[1])
    assert handle.steps == before


def test_prompts_and_their_chunks_are_not_decoded(compiled: Any) -> None:
    model, handle = compiled
    ids, _ = tiny_tokens(6)
    cache, before = CompressedCache(model, "h2o:budget=24"), handle.steps
    with cache.prompt(length=6):
        for column in range(6):
            logits(model, ids[:, column : column + 1], cache)
    assert handle.steps == before
    logits(model, ids[:, :1], cache)
    assert handle.steps == before + 1


def test_other_numbers_of_rows_are_decoded_uncompiled_and_warned_about_once(
    traced: Any, plain: PreTrainedModel
) -> None:
    model, handle = traced
    ids, mask = tiny_tokens(40, 30)
    with pytest.warns(UserWarning, match=r"with 2 row\(s\) is none of those compiled"):
        said = text(model, ids, mask, CompressedCache(model, "h2o:budget=24"))
    assert said == text(plain, ids, mask, CompressedCache(plain, "h2o:budget=24"))
    text(model, ids, mask, CompressedCache(model, "h2o:budget=24"))
    assert handle.steps == 0


def test_what_graphs_do_not_give_is_given_uncompiled(traced: Any, plain: PreTrainedModel) -> None:
    model, handle = traced
    ids, _ = tiny_tokens(40)
    cache, other = CompressedCache(model, "full"), CompressedCache(plain, "full")
    logits(model, ids[:1], cache), logits(plain, ids[:1], other)
    with torch.no_grad(), pytest.warns(UserWarning, match="with output_hidden_states is none of those compiled"):
        got, expected = (
            one(ids[:1, :1], output_hidden_states=True, **{CACHE: its}) for one, its in ((model, cache), (plain, other))
        )
    for layer, hidden in zip(expected.hidden_states, got.hidden_states, strict=True):
        assert torch.equal(layer, hidden)
    embeds = model.get_input_embeddings()(ids[:1, :1]).detach()
    assert torch.equal(
        logits(model, None, cache, inputs_embeds=embeds), logits(plain, None, other, inputs_embeds=embeds)
    )
    assert handle.steps == 0


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_gradients_and_autocast_are_refused_and_leave_the_cache_usable(traced: Any, plain: PreTrainedModel) -> None:
    model, _ = traced
    ids, _ = tiny_tokens(40)
    cache, other = CompressedCache(model, "h2o:budget=24"), CompressedCache(plain, "h2o:budget=24")
    logits(model, ids, cache), logits(plain, ids, other)
    with pytest.raises(KvwinnowError, match="no gradient"):
        model(ids[:, :1], **{CACHE: cache})
    with pytest.raises(KvwinnowError, match="without autocast"), torch.autocast("cpu", torch.bfloat16):
        logits(model, ids[:, :1], cache)
    step, expected = logits(model, ids[:, :1], cache), logits(plain, ids[:, :1], other)
    torch.testing.assert_close(step, expected, rtol=1e-5, atol=1e-5)  # kernels add in another order than torch


def change_in_place(model: Any) -> None:
    torch.nn.init.ones_(model.model.layers[1].mlp.down_proj.weight)


def change_data(model: Any) -> None:
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.data = weight.data * 2.0


def change_by_hand(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight[3, 3] = 1.0


def change_dtype(model: Any) -> None:
    model.bfloat16()


def change_module(model: Any) -> None:
    old = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(old.in_features, old.out_features, bias=False)


def change_threads(model: Any) -> None:
    torch.set_num_threads(torch.get_num_threads() + 1)


CHANGES = [change_in_place, change_data, change_by_hand, change_dtype, change_module, change_threads]


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_noticed(traced: Any, change: Callable[[Any], None]) -> None:
    model, handle = traced
    ids, _ = tiny_tokens(40)
    threads = torch.get_num_threads()
    try:
        change(model)
        with pytest.raises(KvwinnowError, match="have changed since compile_decode"):
            text(model, ids, cache=CompressedCache(model, "h2o:budget=24"))
        handle.close()
        expected = copy.deepcopy(model)
        cache = CompressedCache(expected, "h2o:budget=24")
        assert text(model, ids, cache=CompressedCache(model, "h2o:budget=24")) == text(expected, ids, cache=cache)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "change", [lambda model: model.set_adapter("other"), lambda model: model.merge_adapter()], ids=["another", "merged"]
)
def test_a_change_of_adapters_is_noticed(change: Callable[[Any], None]) -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model()
    lora = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(model, lora)
    adapted.add_adapter("other", lora)
    adapted.eval()
    ids, _ = tiny_tokens(40)
    expected = text(adapted, ids, cache=CompressedCache(adapted, "h2o:budget=24"))
    with traced_only(adapted):
        assert text(adapted, ids, cache=CompressedCache(adapted, "h2o:budget=24")) == expected
        change(adapted)
        adapted.eval()
        with pytest.raises(KvwinnowError, match="adapters"):
            text(adapted, ids, cache=CompressedCache(adapted, "h2o:budget=24"))


@pytest.mark.parametrize("sizes", [0, -1, (), (1, 2.0), True, (1, True), 1.0, None, range(1, 10), ("1",)], ids=str)
def test_batch_sizes_that_are_none(plain: PreTrainedModel, sizes: Any) -> None:
    with pytest.raises(KvwinnowError, match="batch_sizes="):
        compile_decode(plain, batch_sizes=sizes)


def test_models_that_cannot_be_compiled(traced: Any) -> None:
    with pytest.raises(KvwinnowError, match="compiled already"):
        compile_decode(traced[0])
    with pytest.raises(KvwinnowError, match=r"call model\.eval"):
        compile_decode(tiny_model().train())
    with pytest.raises(KvwinnowError, match="transformers model"):
        compile_decode(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    model = tiny_model()
    model.compile()
    with pytest.raises(KvwinnowError, match=r"model\.compile\(\)"):
        compile_decode(model)
    hooked = pytest.importorskip("accelerate").cpu_offload(tiny_model())
    with pytest.raises(KvwinnowError, match="accelerate"):
        compile_decode(hooked)


def test_a_model_that_torch_cannot_trace() -> None:
    model: Any = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(KvwinnowError, match=r"torch\.compile cannot compile the decode step of this LlamaForCausalLM"):
        compile_decode(model)
    assert text(model, tiny_tokens(9)[0], cache=CompressedCache(model, "full"))  # as it was


def test_torch_compile_switched_off() -> None:
    with torch.compiler.set_stance("force_eager"), pytest.raises(KvwinnowError, match="switched off"):
        compile_decode(tiny_model())


def test_no_compiler(tmp_path: Any) -> None:
    broken = {"cpp.cxx": (str(tmp_path / "no-compiler"),), "fx_graph_cache": False}
    with inductor.patch(broken), pytest.raises(KvwinnowError, match="needs a C\\+\\+ compiler"):
        compile_decode(tiny_model(heads=2, kv_heads=1, seed=5))


# -- coming and going --------------------------------------------------------------------------------------------------


def test_closing_leaves_the_model_as_it_was(plain: PreTrainedModel) -> None:
    model = tiny_model()
    ids, _ = tiny_tokens(40)
    handle = traced_only(model)
    assert inductor.freezing is False
    assert "forward" in vars(model.get_output_embeddings())
    handle.close()
    handle.close()
    gc.collect()
    assert not any("forward" in vars(module) for module in model.modules())
    caches = [CompressedCache(one, "h2o:budget=24") for one in (model, plain)]
    for new in (ids, ids[:, :1]):
        assert torch.equal(logits(model, new, caches[0]), logits(plain, new, caches[1]))
    with traced_only(model) as again:
        assert text(model, ids, cache=CompressedCache(model, "full")) == text(plain, ids)
        assert again.steps == 11


def test_the_handle_need_not_be_kept_and_dies_with_its_model() -> None:
    model = tiny_model()
    handle = weakref.ref(traced_only(model))
    gc.collect()
    alive = handle()
    assert alive is not None
    text(model, tiny_tokens(40)[0], cache=CompressedCache(model, "h2o:budget=24"))
    assert alive.steps == 11
    decoder = weakref.ref(model.get_decoder())
    del alive, model
    gc.collect()
    gc.collect()  # the registry lets go of the handle when the decoder is gone
    assert decoder() is None
    assert handle() is None


def test_copies_of_a_compiled_model_are_uncompiled(traced: Any) -> None:
    model, handle = traced
    ids, _ = tiny_tokens(40)
    expected = text(model, ids, cache=CompressedCache(model, "h2o:budget=24"))
    before = handle.steps
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert text(twin, ids, cache=CompressedCache(twin, "h2o:budget=24")) == expected
    assert handle.steps == before


def test_kernels_read_the_weights_of_every_linear_layer() -> None:
    """Those of queries, keys and values at once, and so those of gate and up; the head's in a graph of its own."""
    if level.current() is None:
        pytest.skip("there are no native kernels")
    model, taken = tiny_model(), []

    def backend(traced: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        own = torch.ops.kvwinnow.linear.default
        taken.append([len(node.args[1]) for node in traced.graph.nodes if node.target is own])
        assert not any(node.target is torch.nn.functional.linear for node in traced.graph.nodes)
        return traced

    CompiledDecode(model, backend=backend).close()
    assert taken == [[3, 1, 2, 1] * model.config.num_hidden_layers, [1]]


@pytest.mark.parametrize("freeze", [True, False])
def test_freezing_is_asked_for_while_compiling_and_no_longer(freeze: bool) -> None:
    asked = []

    def backend(traced: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        asked.append(inductor.freezing)
        return traced

    model = tiny_model()
    with CompiledDecode(model, freeze=freeze, backend=backend):
        assert inductor.freezing is False
        torch.nn.init.ones_(model.model.layers[0].mlp.up_proj.weight)
        ids, cache, twin = tiny_tokens(40)[0], CompressedCache(model, "full"), copy.deepcopy(model)
        if freeze:
            with pytest.raises(KvwinnowError, match="have changed"):
                text(model, ids, cache=cache)
        else:  # the graph reads the model's own weights
            assert text(model, ids, cache=cache) == text(twin, ids)
    assert asked == [freeze, freeze]


def test_the_operator_tells_its_shape_without_running() -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(3, heads, 1, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
        out: Tensor = torch.ops.kvwinnow.attend_layer(q, k, v, None, 0, 0.25, None)
    assert out.shape == (3, 1, 4, 16)
    assert out.dtype is torch.bfloat16


def test_compiling_warns_about_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced_only(tiny_model(seed=1)).close()
