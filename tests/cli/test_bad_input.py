"""Each bad input on the command line gets exit code 2 and one sentence that names the value, the limit, the way out."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import TRAINED, Ran, byte_tokenizer, program
from tests.models import tiny_model

Q = "What was decided?"

# name: (arguments; MODEL is the tiny model's folder and TMP a folder of files), parts of the sentence
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no command": ((), ("Missing command", "--help")),
    "unknown command": (("compress",), ("compress", "--help")),
    "unknown option": (("generate", "--polcy", "full", Q), ("--polcy", "--help")),
    "too many arguments": (("generate", "MODEL", Q, "really?"), ("really?",)),
    "question missing": (("generate",), ("question is missing", "in quotes")),
    "question missing after a model": (("generate", "MODEL"), ("question is missing", "is a folder")),
    "question of stray bytes": (("generate", "MODEL", "Wh\udce9?"), ("character 3 of the question", "dce9", "UTF-8")),
    "question empty": (("generate", "MODEL", "  "), ("question is empty", "give some text")),
    "new tokens zero": (("generate", "MODEL", Q, "--max-new-tokens", "0"), ("--max-new-tokens", "1")),
    "new tokens in words": (("generate", "MODEL", Q, "--max-new-tokens", "ten"), ("--max-new-tokens",)),
    "chunk zero": (("generate", "MODEL", Q, "--prefill-chunk", "0"), ("--prefill-chunk", "1")),
    "policy unknown": (("generate", "MODEL", Q, "--policy", "snapkw"), ("snapkw", "snapkv")),
    "policy parameter unknown": (("generate", "MODEL", Q, "--policy", "snapkv:windw=3"), ("windw", "window")),
    "policy parameter without value": (("generate", "MODEL", Q, "--policy", "snapkv:window"), ("window", "=")),
    "budget zero": (("generate", "MODEL", Q, "--policy", "h2o:budget=0"), ("budget", "0")),
    "budget above the whole": (("generate", "MODEL", Q, "--policy", "h2o:budget=1.5"), ("budget", "1.5")),
    "budget under the protected": (("generate", "MODEL", Q, "--policy", "snapkv:budget=8"), ("budget=8", "36")),
    "dtype unknown": (("generate", "MODEL", Q, "--kv-dtype", "int3"), ("int3", "int4")),
    "dtype group": (("generate", "MODEL", Q, "--kv-dtype", "int4:group=7"), ("7", "16")),
    "dtype twice": (("generate", "MODEL", Q, "--kv-dtype", "int4", "--k-dtype", "int8"), ("int4", "int8")),
    "file missing": (("generate", "MODEL", Q, "--prompt-file", "TMP/none.txt"), ("none.txt", "does not exist")),
    "file a folder": (("generate", "MODEL", Q, "--prompt-file", "TMP"), ("is a folder", "text file")),
    "file with a NUL": (("generate", "MODEL", Q, "--prompt-file", "a\0b"), ("'a\\x00b'", "no path", "text file")),
    "file empty": (("generate", "MODEL", Q, "--prompt-file", "TMP/empty.txt"), ("empty.txt", "is empty")),
    "file not UTF-8": (("generate", "MODEL", Q, "--prompt-file", "TMP/latin1.txt"), ("latin1.txt", "UTF-8", "0xe9")),
    "prompt too long": (
        ("generate", "MODEL", Q, "--prompt-file", "TMP/long.txt"),
        (f"{600 + 2 + len(Q)} tokens", "128", f"{TRAINED}", "shorten"),
    ),
    "prompt and answer too long": (("generate", "MODEL", Q, "--max-new-tokens", "500"), ("517", "500", f"{TRAINED}")),
    "system without template": (("generate", "MODEL", Q, "--system", "Be brief."), ("chat template", "leave it out")),
    "system of stray bytes": (
        ("generate", "MODEL", Q, "--system", "\udcff"),
        ("character 1 of the system message", "dcff", "UTF-8"),
    ),
    "system refused by the template": (
        ("generate", "TMP/systemless", Q, "--system", "Be brief."),
        ("chat template", "System role not supported", "leave the system message out"),
    ),
    "template with a wrong syntax": (("generate", "TMP/unclosed", Q), ("chat template", "correct", "jinja")),
    "template that fails": (("generate", "TMP/adding", Q), ("chat template", "concatenate", "correct")),
    "tokenizer of a larger model": (("generate", "TMP/narrow", "\xff"), ("token id", "ends at 63", "tokenizer")),
    "model folder missing": (("generate", "TMP/no-model", Q), ("no-model", "does not exist")),
    "model of several words": (("generate", "Why is it?", Q), ("'Why is it?' is no model name", "hub id")),
    "model not cached": (("generate", "some-org/some-model", Q), ("some-org/some-model", "hf download")),
    "model a file": (("generate", "TMP/long.txt", Q), ("long.txt", "is a file", "folder")),
    "model without config": (("generate", "TMP/hollow", Q), ("hollow", "config.json")),
    "model config not JSON": (("generate", "TMP/torn", Q), ("torn", "config.json", "JSON")),
    "model of unknown type": (("generate", "TMP/alien", Q), ("alien", "zork")),
    "model that writes no text": (("generate", "TMP/vision", Q), ("vit", "decoder")),
    "model without weights": (("generate", "TMP/weightless", Q), ("weightless", "weights")),
    "model with other weights": (("generate", "TMP/mismatched", Q), ("mismatched", "lack 9 tensors")),
    "model without tokenizer": (("generate", "TMP/wordless", Q), ("wordless", "tokenizer")),
    "model name empty": (("generate", "", Q), ("empty", "leave it out")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """Files and model folders that are wrong in one way each."""
    top = tmp_path_factory.mktemp("wrong")
    (top / "empty.txt").write_text(" \n")
    (top / "latin1.txt").write_bytes("café".encode("latin-1"))
    (top / "long.txt").write_text("x" * 600)
    config = json.loads((tiny_folder / "config.json").read_text())
    weights = (tiny_folder / "model.safetensors").read_bytes()
    deeper = json.dumps({**config, "num_hidden_layers": config["num_hidden_layers"] + 1})
    tiny = {file.name: file.read_bytes() for file in tiny_folder.iterdir()}
    models: dict[str, dict[str, bytes | str]] = {
        "hollow": {"readme.txt": "nothing"},
        "torn": {"config.json": "{"},
        "alien": {"config.json": '{"model_type": "zork"}'},
        "vision": {"config.json": '{"model_type": "vit"}'},
        "weightless": {"config.json": json.dumps(config)},
        "mismatched": {"config.json": deeper, "model.safetensors": weights},
        "systemless": {**tiny, "chat_template.jinja": "{{ raise_exception('System role not supported') }}"},
        "unclosed": {**tiny, "chat_template.jinja": "{% if messages %}"},
        "adding": {**tiny, "chat_template.jinja": "{{ 'x' + 1 }}"},
        "wordless": {"config.json": json.dumps(config), "model.safetensors": weights},
    }
    for name, files in models.items():
        (top / name).mkdir()
        for file, content in files.items():
            (top / name / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    tiny_model(vocab_size=64).save_pretrained(top / "narrow")
    byte_tokenizer().save_pretrained(top / "narrow")
    return top


@pytest.mark.parametrize("case", CASES)
def test_bad_input_gets_one_sentence(case: str, run: Callable[..., Ran], folder: Path, tiny_folder: Path) -> None:
    args, parts = CASES[case]
    ran = run(*(arg.replace("TMP", str(folder)).replace("MODEL", str(tiny_folder)) for arg in args))
    assert ran.code == 2
    assert "Traceback" not in ran.out + ran.err
    complaint = ran.complaint()
    for part in parts:
        assert part in complaint
    assert not ran.out


def test_a_very_long_question_is_no_path(run: Callable[..., Ran], tiny_folder: Path) -> None:
    assert run("generate", tiny_folder, "why " * 90, "--max-new-tokens", 2).code == 0
    assert "does not exist" in run("generate", "/" + "x" * 400, "Why?").complaint()


def test_as_a_program_there_is_no_traceback_either(tmp_path: Path, tiny_folder: Path) -> None:
    shutil.copytree(tiny_folder, tmp_path / "torn")
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"\0" * 100)
    ran = program("generate", tmp_path / "torn", "Why?")
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr
    assert "weights of model" in ran.stderr.splitlines()[-1]


# name: (arguments, what the shell does to the streams, exit code, parts of what stderr says; none: it says nothing)
STREAMS: dict[str, tuple[tuple[str, ...], str, int, tuple[str, ...]]] = {
    "stdout full": (("--version",), ">/dev/full", 2, ("output cannot be written", "No space left", "room")),
    "stdout full, in a table": (("policies",), ">/dev/full", 2, ("output cannot be written", "No space left", "room")),
    "stdout closed": (("--version",), ">&-", 2, ("stdout is closed", "redirect")),
    "stdout for reading": (("--version",), "1</dev/null", 2, ("output cannot be written", "descriptor")),
    "stdin closed": (("generate", Q, "--prompt-file", "-"), "<&-", 2, ("stdin is closed", "name a file")),
    "stderr closed": (("--version",), "2>&-", 0, ()),
    "stderr closed, bad input": (("compress",), "2>&-", 2, ()),
    "stderr full, bad input": (("compress",), "2>/dev/full", 2, ()),
}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("case", STREAMS)
def test_a_stream_that_cannot_be_used_gets_one_sentence(case: str, unbuffered: str) -> None:
    args, redirection, code, parts = STREAMS[case]
    program_text = "import sys; from kvwinnow.cli import main; sys.exit(main())"
    ran = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", program_text, *args],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    assert ran.returncode == code, ran.stderr
    assert len(ran.stderr.splitlines()) == bool(parts), ran.stderr
    for part in parts:
        assert part in ran.stderr
    assert "kvwinnow: " not in ran.stdout


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_character_that_stdout_does_not_have_is_replaced(
    encoding: str, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Ran], tiny_folder: Path
) -> None:
    args = ("generate", tiny_folder, "Why is the sky blue?", "--max-new-tokens", 12)
    whole = run(*args).out
    assert whole.encode(encoding, "ignore") != whole.encode()
    stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stdout)
    assert run(*args).code == 0
    assert stdout.buffer.getvalue() == whole.encode(encoding, "replace")  # type: ignore[attr-defined]
