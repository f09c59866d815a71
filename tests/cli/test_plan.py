"""``kvwinnow plan``: its tables and documents, without torch, and each bad input in one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvwinnow.planning import GPUS, find, plan
from kvwinnow.planning.facts import FACTS
from tests.cli.conftest import Ran

UNITS = "1k = 1,024 tokens, 1M = 1,048,576 tokens, GB = 10^9 bytes, GiB = 2^30 bytes"

BLOCKED = """
import sys

class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "numpy"):
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Nowhere())
from kvwinnow.cli import main
code = main(sys.argv[1:])
assert not {"torch", "transformers", "numpy"} & set(sys.modules)
sys.exit(code)
"""


def without_torch(*args: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def words(text: str) -> str:
    return " ".join(text.split())


def test_it_needs_neither_torch_nor_transformers(tiny_folder: Path) -> None:
    asked = ("--context", "128k", "--gpu", "H100", "--policy", "expectedattention", "--kv-dtype", "fp4", "--fit")
    ran = without_torch("plan", "llama-3.1-8b", *asked)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    assert without_torch("plan", tiny_folder).returncode == 0
    assert without_torch("plan", "--list").returncode == 0
    assert "hf download" in without_torch("plan", "some-org/some-model").stderr


def test_the_tables_say_what_python_computes(run: Callable[..., Ran]) -> None:
    asked = ("--context", "1M", "--policy", "snapkv:budget=0.1", "--kv-dtype", "int4", "--weights-dtype", "int4")
    ran = run("plan", "llama-3.1-70b", *asked, "--gpu", "H100-80GB")
    assert (ran.code, ran.err) == (0, "")
    text = words(ran.out)
    assert "80 layers of full attention, 64 query heads, 8 KV heads of 128" in text
    assert "327,680 bytes a token (320 KiB)" in text
    assert "1M tokens: full cache, bf16 343.60 320.00" in text
    assert "in blocks of 16 tokens, as vLLM has it 343.60 320.00" in text
    assert "kvwinnow, snapkv:budget=0.1, int4 (104,857 tokens per KV head) 9.98 9.29" in text
    assert "weights, int4, 70,553,706,496 parameters 39.77 37.03" in text
    assert "memory, as its driver reports 85.52 79.65" in text
    assert "1M 1 9.98 9.30 yes 3" in text
    assert UNITS in text
    assert "positions, statistics, mean vectors" in text


def test_every_size_has_both_units(run: Callable[..., Ran]) -> None:
    asked = ("--context", "8k,32k", "--context", "128k", "--gpu", "L4", "--fit", "--kv-dtype", "int8")
    ran = run("plan", "gemma-3-4b", *asked)
    assert ran.code == 0
    for heading in ("GB GiB", "needs of each GPU, GB GiB"):
        assert heading in words(ran.out)
    for context in ("8k", "32k", "128k"):
        assert f"{context} tokens: full cache" in ran.out
    at = plan("gemma-3-4b", context="128k").contexts[0]
    assert f"{at.full / 10**9:.2f} {at.full / 2**30:.2f}" in words(ran.out)


def test_fit_tells_what_would(run: Callable[..., Ran]) -> None:
    ran = run("plan", "llama-3.1-8b", "--context", "256k", "--gpu", "24GB", "--weights-dtype", "int4", "--fit")
    assert ran.code == 0
    found = plan("llama-3.1-8b", context="256k", gpu="24GB", weights_dtype="int4", fit=True).fit
    assert found is not None
    assert f"Longest context with the full cache: {found.longest_full_context:,} tokens" in ran.out
    for option in found.contexts[0].options:
        assert "all" in ran.out if option.tokens is None else f"{option.tokens:,}" in ran.out


def test_what_a_policy_does_to_layers_is_said(run: Callable[..., Ran]) -> None:
    assert "has nothing to evict" in run("plan", "mistral-7b-v0.1", "--policy", "h2o").out
    assert "tokens per KV head on average" in run("plan", "llama-3.1-8b", "--policy", "pyramidkv").out
    assert "not been run on several GPUs" in run("plan", "llama-3.1-8b", "--policy", "h2o", "--gpu", "L4x2").out


def test_a_model_that_is_not_served_is_planned_and_said_so(run: Callable[..., Ran]) -> None:
    ran = run("plan", "deepseek-v3", "--gpu", "H200x8", "--fit")
    assert ran.code == 0
    assert "kvwinnow's cache does not serve this model: its layers cache MLA latents" in ran.out
    assert "What fits on what there is" not in ran.out
    assert "No budgets or formats: kvwinnow's cache does not serve this model" in ran.out


def test_weights_that_do_not_fit_are_no_dead_end(run: Callable[..., Ran]) -> None:
    asked = ("plan", "llama-3.1-70b", "--context", "1M", "--gpu", "H100-80GB")
    least = "With int4 weights (39.77 GB) 37.20 GB are left: add --weights-dtype int4"
    plain, fit = run(*asked).out, run(*asked, "--fit").out
    for out in (plain, fit):
        assert least in out
        assert "the weights fit on 2 of these GPUs, by tensor parallelism" in out
    assert plain.count("add --weights-dtype") == 1
    assert "With fp8 weights (72.66 GB) 4.31 GB are left" in fit
    assert "No budgets or formats of the cache: the weights do not fit" in fit
    assert "fit in no format that is known" in run("plan", "llama-3.1-405b", "--gpu", "1GB").out


def test_fit_names_the_rows(run: Callable[..., Ran]) -> None:
    out = run("plan", "llama-3.1-8b", "--batch", "8", "--gpu", "H100", "--fit").out
    assert "Longest context of 8 rows with the full cache: " in out
    assert "128k tokens x 8 rows with the full cache, by tensor parallelism: 2 of these GPUs" in out


def test_a_dtype_that_the_config_does_not_say_is_said_to_be_assumed(run: Callable[..., Ran], tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512}
    (tmp_path / "mix.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    out = run("plan", tmp_path / "mix.json").out
    assert out.startswith("mix: 2 layers")  # a file of its own name names the model
    assert "Computes in bf16 (assumed: the config does not say), trained to 512 tokens" in out
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float16", **sizes}))
    out = run("plan", tmp_path / "config.json").out
    assert out.startswith(f"{tmp_path.name}: 2 layers")
    assert "Computes in fp16, trained" in out


def test_windows_are_no_budgets(run: Callable[..., Ran]) -> None:
    asked = ("plan", "mistral-7b-v0.1", "--policy", "snapkv:budget=8192", "--context", "32k")
    assert "snapkv:budget=8192, bf16 (windows of 4,096)" in run(*asked).out
    assert json.loads(run(*asked, "--json").out)["contexts"][0]["budget"] is None
    fit = words(run(*asked, "--gpu", "L4", "--fit").out)
    assert "32k bf16 full the windows 0.5495 0.5117" in fit
    assert "100%" not in fit


def test_a_budget_that_nobody_named_is_told(run: Callable[..., Ran]) -> None:
    note = "Note: no budget named: 1,024 tokens per KV head is the default, 0.8% of 128k, 12.5% of 8k tokens."
    asked = ("plan", "llama-3.1-8b", "--context", "128k,8k", "--policy")
    assert note in run(*asked, "h2o").out
    assert json.loads(run(*asked, "h2o", "--json").out)["budget_assumed"] is True
    for named in ("h2o:budget=1024", "full"):
        assert "no budget named" not in run(*asked, named).out


def test_a_size_that_cards_are_sold_by_is_told_from_what_they_report(run: Callable[..., Ran]) -> None:
    sold = "24GB is 22.35 GiB; cards sold as 24 GB report 22.5 to 24.0 GiB: give A10 or L4 or RTX-3090 or RTX-4090"
    assert f"Note: {sold}, or 24GiB." in run("plan", "llama-3.1-8b", "--gpu", "24GB").out
    assert (
        "12GB is 11.18 GiB; for a card that is sold as 12 GB give 12GiB"
        in run("plan", "llama-3.2-1b", "--gpu", "2x12GB").out
    )
    for clear in ("24GiB", "L4", "H100"):
        assert "sold as" not in run("plan", "llama-3.1-8b", "--gpu", clear).out


def test_a_longest_context_beyond_the_trained_length_is_told(run: Callable[..., Ran]) -> None:
    note = "the longest context: more than the 8k tokens that the model was trained to, so CompressedCache refuses"
    assert note in run("plan", "llama-3-8b", "--gpu", "H100", "--fit").out
    assert "the longest context" not in run("plan", "llama-3-8b", "--gpu", "17.5GiB", "--fit").out


def test_json_is_the_plan_and_nothing_else(run: Callable[..., Ran]) -> None:
    ran = run(
        "plan", "qwen3-8b", "--context", "32k", "--batch", "4", "--gpu", "L40S", "--policy", "h2o", "--json", "--fit"
    )
    assert (ran.code, ran.err) == (0, "")
    expected = plan("qwen3-8b", context="32k", batch=4, gpu="L40S", policy="h2o", fit=True)
    assert json.loads(ran.out) == json.loads(json.dumps(expected.to_json()))


def test_a_folder_and_its_config(run: Callable[..., Ran], tiny_folder: Path) -> None:
    ran = run("plan", tiny_folder, "--json")
    assert ran.code == 0
    document = json.loads(ran.out)
    assert document["contexts"][0]["context"] == 512
    assert document["weights"] == find(str(tiny_folder)).checkpoint
    assert json.loads(run("plan", tiny_folder / "config.json", "--json").out)["weights"] == document["weights"]


def test_the_list(run: Callable[..., Ran]) -> None:
    ran = run("plan", "--list")
    assert ran.code == 0
    for name in (*FACTS, *GPUS):
        assert f"\n{name} " in ran.out


# name: (arguments; TMP is a folder of files), parts of the sentence
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "model missing": ((), ("model is missing", "--list")),
    "model unknown": (("llama-3.1-71b",), ("llama-3.1-71b", "did you mean llama-3.1-70b", "--list")),
    "model unknown at the hub": (("some-org/some-model",), ("some-org/some-model", "hf download")),
    "model empty": (("  ",), ("empty", "llama-3.1-8b")),
    "model a path that is none": (("./none",), ("./none", "does not exist")),
    "model a config that is none": (("TMP/none.json",), ("none.json", "does not exist")),
    "model with a NUL": (("a\0b",), ("a\\x00b", "not built in")),
    "model a long name": (("n" * 5000,), ("not built in",)),
    "config too deep": (("TMP/deep.json",), ("deep.json", "no JSON")),
    "folder without config": (("TMP/hollow",), ("hollow", "config.json")),
    "config not JSON": (("TMP/torn.json",), ("torn.json", "no JSON")),
    "config not text": (("TMP/binary.json",), ("binary.json", "no JSON")),
    "config a list": (("TMP/list.json",), ("list.json", "list", "config.json of a model")),
    "config without layers": (("TMP/bare.json",), ("num_hidden_layers", "decoder")),
    "config of a state-space model": (("TMP/mamba.json",), ("state-space", "counts")),
    "context zero": (("llama-3.1-8b", "--context", "0"), ("context '0'", "1 or more", "128k")),
    "context in words": (("llama-3.1-8b", "--context", "long"), ("context 'long'", "128k")),
    "context with an empty part": (("llama-3.1-8b", "--context", "8k,"), ("context ''", "128k")),
    "batch negative": (("llama-3.1-8b", "--batch", "-1"), ("batch='-1'", "1 or more")),
    "batch in words": (("llama-3.1-8b", "--batch", "two"), ("batch='two'", "1 or more")),
    "block size zero": (("llama-3.1-8b", "--block-size", "0"), ("block='0'", "1 or more")),
    "GPU unknown": (("llama-3.1-8b", "--gpu", "H10"), ("H10", "H100-80GB", "24GiB")),
    "GPU without number": (("llama-3.1-8b", "--gpu", "H100x0"), ("H100x0", "1 or more")),
    "GPUs that do not divide": (("llama-3.1-8b", "--gpu", "H100x5"), ("5 GPUs", "32 query heads", "8 KV heads")),
    "fit without GPU": (("llama-3.1-8b", "--fit"), ("--gpu", "24GiB")),
    "overhead too large": (("llama-3.1-8b", "--gpu", "24GB", "--overhead", "24GB"), ("24GB", "give less")),
    "overhead in words": (("llama-3.1-8b", "--gpu", "24GB", "--overhead", "some"), ("some", "10%")),
    "policy unknown": (("llama-3.1-8b", "--policy", "snapkw"), ("snapkw", "snapkv")),
    "budget too small": (("llama-3.1-8b", "--policy", "snapkv:budget=8"), ("budget=8", "36")),
    "budget of too few bytes": (("llama-3.1-8b", "--policy", "h2o:budget=1KiB"), ("1KiB", "at least 1 tokens")),
    "dtype unknown": (("llama-3.1-8b", "--kv-dtype", "int3"), ("int3", "int4")),
    "dtype twice": (("llama-3.1-8b", "--kv-dtype", "int4", "--k-dtype", "int8"), ("int4", "int8", "--v-dtype")),
    "group that does not divide": (("llama-3.1-8b", "--kv-dtype", "int4:group=48"), ("group=48", "128")),
    "policy for MLA": (("deepseek-v3", "--policy", "h2o"), ("MLA", "leave the policy out")),
    "weights unknown": (("llama-3.1-8b", "--weights-dtype", "int5"), ("int5", "mxfp4")),
    "weights of no experts": (("llama-3.1-8b", "--weights-dtype", "mxfp4"), ("experts", "int4")),
    "parameters in words": (("llama-3.1-8b", "--parameters", "many"), ("many", "70.6B")),
    "parameters unknown": (("TMP/novel.json", "--gpu", "24GB"), ("not known", "--parameters 70B")),
    "context unknown": (("TMP/novel.json",), ("how long a context", "128k")),
    "chunk zero": (("llama-3.1-8b", "--prefill-chunk", "0"), ("prefill chunk '0'", "1 or more")),
    "new tokens negative": (("llama-3.1-8b", "--new-tokens", "-5"), ("new tokens '-5'", "0 or more")),
    "contexts without commas": (
        ("llama-3.1-8b", "--context", "32k", "64k"), ("64k", "--context 32k,64k", "kvwinnow plan --help"),
    ),
    "option unknown": (("llama-3.1-8b", "--contxt", "32k"), ("--contxt", "kvwinnow plan --help")),
    "budget as an option": (("llama-3.1-8b", "--budget", "0.1"), ("--budget 0.1", "--policy snapkv:budget=0.1")),
    "list of something": (("llama-3.1-8b", "--list"), ("--list", "leave the rest out")),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("configs")
    (made / "hollow").mkdir()
    (made / "torn.json").write_text('{"model_type": ')
    (made / "binary.json").write_bytes(b"\xff\xfe\x00\x81")
    (made / "deep.json").write_text("[" * 200_000)
    (made / "list.json").write_text("[1, 2]")
    (made / "bare.json").write_text('{"model_type": "llama"}')
    novel = {"model_type": "novel", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    (made / "mamba.json").write_text(json.dumps({**novel, "mamba_d_state": 16}))
    (made / "novel.json").write_text(json.dumps(novel))
    return made


@pytest.mark.parametrize("name", CASES)
def test_bad_input(run: Callable[..., Ran], folder: Path, name: str) -> None:
    arguments, parts = CASES[name]
    if name == "parameters unknown":
        arguments = (*arguments, "--context", "1k")
    ran = run("plan", *(argument.replace("TMP", str(folder)) for argument in arguments))
    assert ran.code == 2
    assert ran.out == ""
    for part in parts:
        assert part in ran.complaint()


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may read everything")
def test_a_config_that_may_not_be_read(run: Callable[..., Ran], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "config.json").chmod(0)
    assert "cannot be read" in run("plan", tmp_path / "config.json").complaint()
