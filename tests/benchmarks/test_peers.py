"""The benchmark beside other libraries: what becomes of a row, whatever its runner does."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvwinnow import CompressedCache
from tests.cli.conftest import byte_tokenizer
from tests.models import tiny_model

FOLDER = Path(__file__).parents[2] / "benchmarks"
NAMES = (
    "contract", "environments", "harness", "machine", "models", "ours", "report", "rows", "run", "texts",
    "token_times", "torch_decoding", "transformers_caches",
)  # fmt: skip

ANSWERS = """
import json, sys
task = json.load(open(sys.argv[1]))
open({log!r}, "a").write(task["setting"] + (" filled " if task["filled"] else " "))
print("loading, this may take a while")
print(json.dumps({{"first_token_s": 0.5, "decode_tokens_per_s": {rate}, "peak_rss_bytes": 2**30, "cache_bytes": 2**20,
                  "tokens": {tokens}, "version": "1.0"}}))
"""
REFUSES = """
import sys
open({log!r}, "a").write("refused ")
print("Traceback (most recent call last):", file=sys.stderr)
sys.exit("no such cache: 5 bits")
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a module of the benchmark as its runners do; none of their plain names stays behind."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.syspath_prepend(FOLDER / "peers")

    def module(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield module
    for name in NAMES:
        sys.modules.pop(name, None)


class Fakes:
    """Runners that are written into a folder, and what they were asked."""

    def __init__(self, bench: Any, folder: Path) -> None:
        self.bench, self.folder, self.log = bench, folder, folder / "log"
        self.said: list[str] = []

    def peer(self, name: str, script: str, settings: tuple[str, ...] = ("a",), **more: Any) -> Any:
        runner = self.folder / f"{name}.py"
        runner.write_text(script)
        return self.bench("rows").Peer(name, runner, more.pop("environment", None), settings, **more)

    def answers(self, tokens: list[int], rate: float = 4.0) -> str:
        return ANSWERS.format(log=str(self.log), tokens=tokens, rate=rate)

    def measured(self, *peers: Any, rounds: int = 1, filled: bool = False) -> dict[str, Any]:
        rows = [self.bench("rows").Row(peer, setting) for peer in peers for setting in peer.settings]
        task = self.bench("contract").Task("model", [1, 2, 3], 4, "", 1, filled=filled)
        harness = self.bench("harness")
        found = harness.interpreters(peers, self.said.append)
        return harness.measure(rows, task, rounds, found, self.said.append)  # type: ignore[no-any-return]


@pytest.fixture
def fakes(bench: Any, tmp_path: Path) -> Fakes:
    return Fakes(bench, tmp_path)


def test_rows_take_turns_and_every_other_round_runs_backwards(fakes: Fakes) -> None:
    outcomes = fakes.measured(fakes.peer("one", fakes.answers([7, 8, 9, 9]), ("a", "b", "c")), rounds=3)

    assert fakes.log.read_text().split() == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]
    assert [len(outcome.runs) for outcome in outcomes.values()] == [3, 3, 3]
    assert outcomes["one/b"].runs[0].tokens == [7, 8, 9, 9]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (REFUSES, "no such cache: 5 bits"),
        ("import os; os.kill(os.getpid(), 11)", "it died of signal 11 (SIGSEGV)"),
        ("raise SystemExit(3)", "it ended with status 3"),
        ("print('done')", "its last line is no answer (Expecting value: line 1 column 1 (char 0))"),
        ("print('{}')", "its last line is no answer"),
        ('print(\'{"first_token_s": 1, "decode_tokens_per_s": "x"}\')', "its last line is no answer"),
    ],
)
def test_a_row_that_fails_says_why_and_the_others_go_on(fakes: Fakes, script: str, reason: str) -> None:
    bad = fakes.peer("bad", script.replace("{log!r}", repr(str(fakes.log))))
    outcomes = fakes.measured(bad, fakes.peer("good", fakes.answers([1, 2, 3, 4]), ("b",)), rounds=2)

    assert reason in outcomes["bad/a"].failed
    assert not outcomes["bad/a"].runs
    assert len(outcomes["good/b"].runs) == 2
    if script is REFUSES:  # once, not in each round
        assert fakes.log.read_text().split() == ["refused", "b", "b"]
    assert sum("bad/a failed" in line for line in fakes.said) == 1


def test_a_runner_that_takes_too_long_goes_with_what_it_started(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fakes.bench("harness"), "MOST_SECONDS", 1)
    late = tmp_path / "late"
    child = f"import time; time.sleep(2); open({str(late)!r}, 'w')"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"

    assert "it took longer than 1 seconds" in fakes.measured(fakes.peer("slow", script))["slow/a"].failed
    time.sleep(2)
    assert not late.exists()


def test_only_caches_that_cannot_be_filled_compute_a_prompt_and_do_so_once(fakes: Fakes) -> None:
    filling = fakes.peer("filling", fakes.answers([1, 2]), ("a",), fills=True)
    computing = fakes.peer("computing", fakes.answers([1, 2]), ("b",))
    outcomes = fakes.measured(filling, computing, rounds=2, filled=True)

    assert fakes.log.read_text().split() == ["a", "filled", "b", "a", "filled"]
    assert [len(outcome.runs) for outcome in outcomes.values()] == [2, 1]


def test_a_peer_that_cannot_be_installed_is_skipped_with_one_line(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environments = fakes.bench("environments")
    monkeypatch.setattr(environments, "HERE", tmp_path)
    monkeypatch.setenv("KVWINNOW_PEERS", str(tmp_path / "made"))
    for name in ("INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    wanted = tmp_path / "requirements-odd.txt"
    wanted.write_text("./no-such-package\n")
    odd = fakes.peer("odd", fakes.answers([1, 2, 3, 4]), ("a", "b"), environment=environments.Environment("odd"))

    outcomes = fakes.measured(odd)
    assert not fakes.log.exists()
    skipped = outcomes["odd/a"].skipped
    assert skipped.startswith("it cannot be installed here: odd: ")
    assert "no-such-package" in skipped
    assert "\n" not in skipped
    assert outcomes["odd/b"].skipped == skipped
    assert [line for line in fakes.said if "skipped" in line] == [f"odd is skipped: {skipped}"]

    # What stopped it is mended: the half-made environment is taken up again, and a finished one is left as it is.
    wanted.write_text("# nothing more than Python\n")
    assert len(fakes.measured(odd)["odd/a"].runs) == 1
    monkeypatch.setattr(environments, "_pip", lambda *words: pytest.fail(f"pip was asked again: {words}"))
    assert len(fakes.measured(odd)["odd/a"].runs) == 1


def test_an_environment_that_cannot_be_made_leaves_nothing_half_made(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environments = fakes.bench("environments")
    monkeypatch.setattr(environments, "HERE", tmp_path)
    monkeypatch.setenv("KVWINNOW_PEERS", str(tmp_path / "made"))
    (tmp_path / "requirements-odd.txt").write_text("")
    odd = fakes.peer("odd", fakes.answers([1, 2, 3, 4]), environment=environments.Environment("odd"))

    def without_ensurepip(home: Path, *, with_pip: bool) -> None:
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "python").touch()
        raise subprocess.CalledProcessError(1, "python -m ensurepip", output=b"No module named ensurepip\n")

    with monkeypatch.context() as patched:
        patched.setattr(environments.venv, "create", without_ensurepip)
        skipped = fakes.measured(odd)["odd/a"].skipped
    assert skipped == "it cannot be installed here: odd: No module named ensurepip"
    assert not (tmp_path / "made" / "odd").exists()

    (tmp_path / "made" / "odd").mkdir(parents=True)
    (tmp_path / "made" / "odd" / "bin").touch()  # a file where a folder must be
    assert "\n" not in fakes.measured(odd)["odd/a"].skipped

    fakes.folder.joinpath("odd.py").unlink()
    assert fakes.measured(odd)["odd/a"].skipped == "there is no odd.py"


def test_tables_tell_medians_ratios_within_rounds_and_what_is_missing(bench: Any) -> None:
    report, harness, contract = bench("report"), bench("harness"), bench("contract")

    def runs(firsts: list[float | None], rates: list[float], tokens: list[int]) -> Any:
        return harness.Outcome(
            [
                contract.Answer(first, rate, 3 * 2**20, 2**19, tokens, "2.0")
                for first, rate in zip(firsts, rates, strict=True)
            ]
        )

    outcomes = {
        "kvwinnow/full": runs([2.0, 4.0, 3.0], [10.0, 20.0, 30.0], [5, 6, 7, 8]),
        "kvwinnow/h2o-8x": runs([2.2, 4.8, 3.0], [30.0, 20.0, 90.0], [5, 6, 1, 8]),
        "transformers/dynamic": runs([1.0, 1.0, 1.0], [10.0, 10.0, 90.0], [5, 6, 7, 8]),
        "kvpress/snapkv-8x": runs([None], [5.0], [5, 6]),
        "openvino/u8": harness.Outcome(skipped="no wheel"),
        "llama.cpp/q4_0": harness.Outcome(failed="no such file"),
    }
    assert report.table(outcomes) == [
        ["kvwinnow/full", "3.00", "20.0", "1.00", "3", "0.5", "4"],
        ["kvwinnow/h2o-8x", "3.00", "30.0", "2.00", "3", "0.5", "2"],
        ["transformers/dynamic", "1.00", "10.0", "1.00", "3", "0.5", "4"],
        ["kvpress/snapkv-8x", "-", "5.0", "0.50", "3", "0.5", "-"],
    ]
    notes = report.notes(outcomes, 4)
    assert "openvino/u8: skipped, no wheel" in notes
    assert "llama.cpp/q4_0: failed, no such file" in notes
    assert "kvpress/snapkv-8x: 2 of 4 tokens, then its time was up" in notes
    assert any(
        note.startswith("kvwinnow/h2o-8x: first token 1.100 times") and "1.000 to 1.200" in note for note in notes
    )
    page = report.markdown("A title", outcomes, 4)
    assert "| kvwinnow/h2o-8x | 3.00 | 30.0 | 2.00 | 3 | 0.5 | 2 |" in page.splitlines()


def test_names_choose_a_peer_or_a_row_and_unknown_ones_are_refused(bench: Any) -> None:
    rows = bench("rows")
    assert [row.name for row in rows.chosen(["kvpress", "kvwinnow/full"])] == ["kvpress/snapkv-8x", "kvwinnow/full"]
    assert [row.name for row in rows.chosen(["kvwinnow/full-compiled"])] == ["kvwinnow/full-compiled"]
    assert len(rows.chosen(None)) == sum(len(peer.settings) for peer in rows.PEERS)
    with pytest.raises(SystemExit, match="--only 'vlm' is no peer; take some of kvwinnow, transformers, kvpress"):
        rows.chosen(["vlm"])


def test_the_command_writes_all_its_figures_or_leaves_the_file(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, models, rows = fakes.bench("run"), fakes.bench("models"), fakes.bench("rows")
    monkeypatch.setattr(models, "root", lambda: tmp_path / "models")
    monkeypatch.setitem(models._WRITERS, models.SMOLLM2, lambda folder: byte_tokenizer().save_pretrained(folder))
    good, bad = fakes.peer("good", fakes.answers([1, 2, 3], 8.0)), fakes.peer("bad", REFUSES.format(log=""))
    monkeypatch.setattr(rows, "PEERS", (good, bad))
    file = tmp_path / "figures.json"
    monkeypatch.setattr(
        sys, "argv", ["run.py", "--contexts", "128", "200", "--new-tokens", "3", "--rounds", "2", "--json", str(file)]
    )
    assert run.main() == 0

    written = json.loads(file.read_text())
    assert list(written["contexts"]) == ["128", "200"]
    assert [answer["decode_tokens_per_s"] for answer in written["contexts"]["200"]["good/a"]["runs"]] == [8.0, 8.0]
    assert "runs" in written["contexts"]["128"]["bad/a"]
    assert written["contexts"]["128"]["bad/a"]["failed"]
    assert "| good/a | 0.50 | 8.0 |" in capsys.readouterr().out

    before = file.read_text()

    def stopped(*asked: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run, "measure", stopped)
        with pytest.raises(KeyboardInterrupt):
            run.main()
    assert file.read_text() == before
    assert not list(tmp_path.glob(".figures*"))

    good.runner.write_text(bad.runner.read_text())  # now there is no figure at all
    assert run.main() == 1


def test_what_takes_the_larger_model_too_long_is_told_as_skipped(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, models, rows = fakes.bench("run"), fakes.bench("models"), fakes.bench("rows")
    monkeypatch.setattr(models, "root", lambda: tmp_path / "models")
    monkeypatch.setitem(models._WRITERS, models.LLAMA_1B, lambda folder: byte_tokenizer().save_pretrained(folder))
    caches = fakes.peer("transformers", fakes.answers([1, 2]), ("dynamic", "hqq-int4"), fills=True)
    monkeypatch.setattr(rows, "PEERS", (caches,))
    asked = ["run.py", "--model", "llama-1b", "--contexts", "128", "--new-tokens", "2"]

    monkeypatch.setattr(sys, "argv", asked)
    assert run.main() == 0
    assert fakes.log.read_text().split() == ["dynamic", "filled"]
    assert "transformers/hqq-int4: skipped, to quantise 32k tokens" in " ".join(capsys.readouterr().out.split())

    monkeypatch.setattr(sys, "argv", [*asked, "--only", "transformers/hqq-int4"])
    assert run.main() == 0
    assert fakes.log.read_text().split() == ["dynamic", "filled", "hqq-int4", "filled"]


# -- the runners that need nothing but torch and transformers -------------------------------------------------


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    return folder


PROMPT = [3 + (7 * i) % 190 for i in range(256)]


@torch.inference_mode()
def greedy(new: int) -> list[int]:
    """What the model says with its own cache."""
    model, cache, ids = tiny_model(), DynamicCache(), torch.tensor([PROMPT])
    said: list[int] = []
    while len(said) < new:
        said.append(int(model(ids, past_key_values=cache).logits[0, -1].argmax()))
        ids = torch.tensor([said[-1:]])
    return said


def test_ours_makes_the_models_own_tokens_in_a_process_of_its_own(bench: Any, tiny_folder: Path) -> None:
    ours, _ = bench("rows").PEERS[:2]
    task = {"model": str(tiny_folder), "prompt": PROMPT, "new_tokens": 6, "setting": "full", "threads": 1}
    answer = bench("harness").run_once(sys.executable, ours, task)

    assert answer.tokens == greedy(6)
    assert answer.first_token_s > 0
    assert answer.decode_tokens_per_s > 0
    assert answer.peak_rss_bytes > 50 * 2**20
    # 256 + 5 tokens in slots of 32, 2 layers, 2 KV heads: keys and values of 16 float32 numbers and a position.
    assert answer.cache_bytes == 288 * 2 * 2 * (2 * 16 * 4 + 4)


def test_a_filled_cache_of_ours_has_the_slots_that_the_policy_leaves(bench: Any, tiny_folder: Path) -> None:
    ours, contract = bench("ours"), bench("contract")
    task = contract.Task(str(tiny_folder), PROMPT, 4, "", 1)
    for setting in ours.SETTINGS:
        computed, filled = (
            ours.run(contract.Task(**{**vars(task), "setting": setting, "filled": how})) for how in (False, True)
        )
        assert filled.cache_bytes == computed.cache_bytes, setting
        assert filled.first_token_s is None
        assert filled.peak_rss_bytes is None
        assert len(filled.tokens) == len(computed.tokens) == 4
    with pytest.raises(ValueError, match="setting 'snapkv-9x' is none of full, snapkv-8x"):
        ours.run(contract.Task(**{**vars(task), "setting": "snapkv-9x"}))


def test_filling_leaves_the_tokens_that_a_prompt_would(bench: Any) -> None:
    ours, model = bench("ours"), tiny_model()
    for (policy, dtype), kept in zip(ours.SETTINGS.values(), (256, 36, 36, 32), strict=True):
        filled, fed = (CompressedCache(model, policy, dtype=dtype) for _ in range(2))
        ours.fill(model, filled, len(PROMPT))
        with torch.no_grad():
            model(torch.tensor([PROMPT]), past_key_values=fed)
        assert filled.report().tokens_kept == fed.report().tokens_kept == kept
        assert filled.report().tokens_seen == len(PROMPT)
        for layer in range(2):
            for head in filled.positions(layer)[0]:
                assert len(set(head[head >= 0].tolist())) == kept
                assert int(head.max()) == len(PROMPT) - 1  # what came last is always protected


def test_transformers_caches_make_the_models_own_tokens_and_tell_their_bytes(bench: Any, tiny_folder: Path) -> None:
    caches, contract = bench("transformers_caches"), bench("contract")
    task = contract.Task(str(tiny_folder), PROMPT, 6, "dynamic", 1)
    answer = caches.run(task)

    assert answer.tokens == greedy(6)
    assert answer.cache_bytes == 261 * 2 * 2 * 2 * 16 * 4  # tokens, layers, KV heads, keys and values, D, float32
    filled = caches.run(contract.Task(**{**vars(task), "filled": True}))
    assert filled.cache_bytes == 262 * 2 * 2 * 2 * 16 * 4  # the first of the 6 tokens is a decoded one too
    with pytest.raises(ValueError, match="setting 'int3' is none of dynamic, quanto-int4, hqq-int4, fp8"):
        caches.run(contract.Task(**{**vars(task), "setting": "int3"}))
