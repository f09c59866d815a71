"""``kvwinnow simulate``: what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from kvwinnow.policies import parse
from kvwinnow.simulation import parquet, render
from kvwinnow.simulation.record import record
from kvwinnow.simulation.run import simulate
from kvwinnow.simulation.states import Head
from kvwinnow.simulation.trace import demo
from tests.cli.conftest import Ran
from tests.models import tiny_model, tiny_tokens

Run = Callable[..., Ran]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "t.parquet"
    parquet.write(record(tiny_model("gemma3", layers=4), tiny_tokens(60)[0], new_tokens=12, vectors=True), path)
    return path


def rows(text: str) -> list[str]:
    """The lines of the table of arrivals."""
    return [line.strip() for line in text.splitlines() if re.match(r"\s*[\d,]+ │", line)]


def test_the_demo_shows_each_arrival(run: Run) -> None:
    ran = run("simulate")
    assert ran.code == 0
    lines = rows(ran.out)
    assert len(lines) == 8
    assert lines[0].split("│")[1:] == [" Ada      ", " S:Ada"]
    assert lines[5].endswith("S:Ada  S:Lovelace  H:was  H:born  W:in  W:a")
    assert lines[6].endswith("S:Ada  S:Lovelace  H:was  H:born  x:in (0.05)  W:a  W:December")
    assert lines[7].endswith("S:Ada  S:Lovelace  x:was (0.1)  H:born  H:a  W:December  W:1815")
    assert "6 of 8 tokens are held (2 S, 2 H, 2 W): positions 0-1, 3, 5-7" in ran.out
    assert "Ada Lovelace ... born ... a December 1815" in ran.out


def test_the_seeds_command_gives_the_seeds_sets(run: Run) -> None:
    told = json.loads(run("simulate", "--policy", "hybrid:sinks=2", "--budget", "6", "--json").out)
    assert told["tokens"][0] == "Ada"
    assert [arrival["evicted"] for arrival in told["arrivals"]] == [[]] * 6 + [[4], [2]]
    assert [arrival["held"] for arrival in told["arrivals"]] == [1, 2, 3, 4, 5, 6, 6, 6]
    roles = {kept["position"]: kept["role"] for kept in told["held"]}
    assert roles == {0: "sink", 1: "sink", 3: "heavy", 5: "heavy", 6: "window", 7: "window"}


def test_a_window_in_blocks_is_a_window_that_slides_by_blocks(run: Run) -> None:
    policy = "blocks:policy=streamingllm(budget=4,sinks=1),multiple_of=2"
    told = json.loads(run("simulate", "--policy", policy, "--json").out)
    assert [arrival["evicted"] for arrival in told["arrivals"]] == [[]] * 5 + [[1, 2], [], [3, 4]]
    roles = {kept["position"]: kept["role"] for kept in told["held"]}
    assert roles == {0: "sink", 5: "window", 6: "window", 7: "window"}


def test_scores_tell_why_a_token_went(run: Run) -> None:
    told = json.loads(run("simulate", "--json").out)
    # At the last choice token 4 was gone; it has the score at which it went.
    assert told["scores"] == [0.95, 0.85, 0.1, 0.9, 0.05, 0.2, 0.15, 0.75]
    assert json.loads(run("simulate", "--budget", "8", "--json").out)["scores"] == [None] * 8
    assert "evicted (its score)" in run("simulate").out


def test_a_policy_without_a_limit_marks_nothing_as_kept_for_a_score(run: Run) -> None:
    ran = run("simulate", "--policy", "full")
    assert "heavy hitter" not in ran.out
    assert "8 of 8 tokens are held (8 K)" in ran.out
    assert rows(ran.out)[1].endswith("K:Ada  K:Lovelace")
    told = json.loads(run("simulate", "--policy", "full", "--json").out)
    assert {kept["role"] for kept in told["held"]} == {"kept"}


@pytest.mark.parametrize(
    ("policy", "heavy"), [("h2o", True), ("hybrid:sinks=2", True), ("tova", False), ("streamingllm:sinks=2", False)]
)
def test_a_heavy_hitter_is_one_of_accumulated_attention(run: Run, policy: str, heavy: bool) -> None:
    shown = run("simulate", "--policy", policy).out
    assert "kept for its score" in shown
    assert ("heavy hitter, kept" in shown) == heavy


def test_quiet_tells_the_end_alone(run: Run) -> None:
    ran = run("simulate", "--quiet")
    assert not rows(ran.out)
    assert "6 of 8 tokens" in ran.out
    assert "arrivals" not in json.loads(run("simulate", "--quiet", "--json").out)


def test_colours_and_strikes_on_a_terminal() -> None:
    console = Console(force_terminal=True, color_system="standard", width=120, legacy_windows=False)
    with console.capture() as capture:
        console.print(render.arrivals(Head(simulate(demo(), parse("hybrid:budget=6,sinks=2")), 0, 0)))
    shown = capture.get()
    assert re.search(r"\x1b\[[\d;]*9[;m][^\x1b]*x:was", shown)  # 9 strikes through
    assert re.search(r"\x1b\[36mS:Ada", shown)


def test_a_long_trace_is_shown_in_few_lines(run: Run, tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).random(4000)
    text = "".join(json.dumps({"token": f"w{i} ", "attention": n}) + "\n" for i, n in enumerate(numbers))
    (tmp_path / "long.jsonl").write_text(text)
    ran = run("simulate", "--trace", tmp_path / "long.jsonl", "--policy", "h2o:recent=20", "--budget", 100)
    assert ran.code == 0
    assert len(ran.out.splitlines()) < 80
    lines = rows(ran.out)
    assert lines[-1].startswith("4,000 │")
    assert "100 │ 0 S, 80 H, 20 W" in lines[-1]
    # The 80 largest numbers but for the latest 20, which lie in the window.
    best = set(np.argsort(-numbers[:3980], kind="stable")[:80].tolist()) | set(range(3980, 4000))
    told = json.loads(
        run("simulate", "--trace", tmp_path / "long.jsonl", "--policy", "h2o:recent=20", "--budget", 100, "--json").out
    )
    assert {kept["position"] for kept in told["held"]} == best


def test_a_prompt_of_which_little_is_left_is_not_printed_whole(run: Run, recorded: Path) -> None:
    ran = run("simulate", "--trace", recorded, "--policy", "h2o", "--budget", 8)
    lines = rows(ran.out)
    assert len(lines) == 13
    assert "the prompt, 60 tokens" in lines[0]
    assert "8 │ 0 S, 4 H, 4 W │" in lines[0]
    assert lines[0].endswith("and 48 more")


def test_a_recorded_trace_by_layer_and_head(run: Run, recorded: Path) -> None:
    args = ("simulate", "--trace", recorded, "--policy", "h2o", "--budget", "0.4")
    told = json.loads(run(*args, "--layer", 3, "--head", 1, "--json").out)
    assert (told["layer"], told["head"], told["budget"], told["prompt"]) == (3, 1, 24, 60)
    expected = np.flatnonzero(simulate(parquet.read(recorded), parse("h2o:budget=24")).held()[1, 1]).tolist()
    assert [kept["position"] for kept in told["held"]] == expected
    ran = run(*args)
    assert "layer 1, KV head 0" in ran.out  # the first that is recorded
    lines = rows(ran.out)
    assert len(lines) == 13
    assert "the prompt, 60 tokens" in lines[0]
    assert run(*args, "--layer", 0).complaint().startswith("layer 0 is none of the trace's layers 1, 3")
    assert "head 2 is none of the trace's KV heads 0 to 1" in run(*args, "--head", 2).complaint()


def test_a_prompt_is_cut_at_once(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("token,attention\na,5\nb,1\nc,4\nd,2\ne,3\n")
    args = (
        "simulate",
        "--trace",
        tmp_path / "a.csv",
        "--policy",
        "h2o:recent=0",
        "--budget",
        2,
        "--prompt",
        4,
        "--json",
    )
    told = json.loads(run(*args).out)
    assert [arrival["seen"] for arrival in told["arrivals"]] == [4, 5]
    assert [arrival["evicted"] for arrival in told["arrivals"]] == [[1, 3], [4]]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_sweep(run: Run, recorded: Path, tmp_path: Path, as_json: bool) -> None:
    page = tmp_path / "sweep.html"
    args = ("simulate", "--trace", recorded, "--sweep", "budget=40..64", "-o", page, *(["--json"] if as_json else []))
    ran = run(*args)
    assert ran.code == 0
    assert page.stat().st_size > 1e6
    if as_json:
        told = json.loads(ran.out)
        assert told["budgets"] == [40, 64]
        assert told["left_out"] == {}
        assert {point["budget"] for point in told["points"] if point["name"] == "snapkv"} == {40, 64}
        assert all(0 < point["retained"] <= 1 and point["nbytes"] > 0 for point in told["points"])
    else:
        for name in ("full", "streamingllm", "expectedattention", "compose"):
            assert re.search(rf"│ {name} +│ +\d+\.\d% │", ran.out)
        assert "The plot is in" in ran.out


def test_a_sweep_of_some_policies_at_one_head(run: Run, recorded: Path) -> None:
    args = ("simulate", "--trace", recorded, "--sweep", "budget=16,0.5", "--policy", "h2o:sinks=2", "--policy", "tova")
    everywhere = json.loads(run(*args, "--json").out)
    assert [point["name"] for point in everywhere["points"]] == ["h2o:sinks=2"] * 2 + ["tova"] * 2
    one = json.loads(run(*args, "--layer", 3, "--head", 0, "--json").out)
    assert one["points"][0]["retained"] != everywhere["points"][0]["retained"]
    assert "50% of prompt" in run(*args).out or "0.5 of prompt" in run(*args).out


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--policy", "h3o"], "policy 'h3o' is unknown"),
        (["--trace", "none.csv"], "does not exist"),
        (["--trace", "demo.txt"], "neither demo nor demo-rows"),
        (["--budget", "0"], "cannot hold a cache"),
        (["--budget", "2"], "under the 3 tokens"),
        (["--budget", "some"], "is no budget"),
        (["--policy", "h2o", "--budget", "6,recent=3"], "budget '6,recent=3' is none"),
        (["--policy", "full", "--budget", "6"], "--budget 6 is of no use to --policy full"),
        (["--policy", "hybrid:budget=6", "--budget", "6"], "given twice"),
        (["--policy", "h2o", "--policy", "tova"], "only a sweep takes several"),
        (["-o", "a.html"], "for the plot of a sweep"),
        (["--sweep", "budget=8", "--quiet"], "--quiet contradicts --sweep"),
        (["--sweep", "budget=8", "--budget", "6"], "--budget contradicts --sweep"),
        (["--sweep", "8..9"], "write budget=64..4096"),
        (["--sweep", "budget=4", "-o", "a.png"], "ending in .html"),
        (["--sweep", "budget=4", "-o", "none/a.html"], "does not exist; make it"),
        (["--layer", "1"], "layer 1 is not in this trace"),
        (["--head", "-1"], "KV heads 0 to 0"),
        (["--sweep", "budget=4", "--layer", "7"], "layer 7 is not in this trace"),
        (["--prompt", "9"], "prompt has 9 tokens"),
        (["--policy", "keydiff", "--budget", "4"], "--vectors"),
        (["--budget", "0.5"], "this trace has none"),
    ],
)
def test_bad_input_is_one_sentence(
    run: Run, args: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run("simulate", *args)
    assert ran.code == 2
    assert sentence in ran.complaint()
    assert ran.out == ""
    assert list(tmp_path.iterdir()) == []


def test_other_traces_need_a_budget(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("token,attention\na,5\n")
    assert "names no budget; add --budget" in run("simulate", "--trace", tmp_path / "a.csv").complaint()
    assert run("simulate", "--trace", tmp_path / "a.csv", "--policy", "full").code == 0


def test_without_plotly_or_pyarrow_the_way_out_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    monkeypatch.setitem(sys.modules, "plotly", None)
    args = ("simulate", "--sweep", "budget=8", "-o", tmp_path / "a.html")
    assert "pip install 'kvwinnow[tools]'" in run(*args).complaint()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'kvwinnow[tools]'" in run("simulate", "--trace", tmp_path / "a.parquet").complaint()


def test_a_token_cannot_steer_the_terminal(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"token": "\\u001b[2Jgone", "attention": 1}\n')
    shown = run("simulate", "--trace", tmp_path / "a.jsonl", "--policy", "full").out
    assert "\x1b" not in shown
    assert "\\x1b[2Jgone" in shown
