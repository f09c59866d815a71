"""Each bad input on the command line gets exit code 2 and one sentence that names the value, the limit, the way out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import TRAINED, Ran, program

Q = "What was decided?"

# name: (arguments; MODEL is the tiny model's folder and TMP a folder of files), parts of the sentence
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no command": ((), ("Missing command", "--help")),
    "unknown command": (("compress",), ("compress", "--help")),
    "unknown option": (("generate", "--polcy", "full", Q), ("--polcy", "--help")),
    "too many arguments": (("generate", "MODEL", Q, "really?"), ("really?",)),
    "question missing": (("generate",), ("question is missing", "in quotes")),
    "question missing after a model": (("generate", "MODEL"), ("question is missing", "is a folder")),
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
    "file empty": (("generate", "MODEL", Q, "--prompt-file", "TMP/empty.txt"), ("empty.txt", "is empty")),
    "file not UTF-8": (("generate", "MODEL", Q, "--prompt-file", "TMP/latin1.txt"), ("latin1.txt", "UTF-8", "0xe9")),
    "prompt too long": (
        ("generate", "MODEL", Q, "--prompt-file", "TMP/long.txt"),
        (f"{600 + 2 + len(Q)} tokens", "128", f"{TRAINED}", "shorten"),
    ),
    "prompt and answer too long": (("generate", "MODEL", Q, "--max-new-tokens", "500"), ("517", "500", f"{TRAINED}")),
    "system without template": (("generate", "MODEL", Q, "--system", "Be brief."), ("chat template", "leave it out")),
    "model folder missing": (("generate", "TMP/no-model", Q), ("no-model", "does not exist")),
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
    models: dict[str, dict[str, bytes | str]] = {
        "hollow": {"readme.txt": "nothing"},
        "torn": {"config.json": "{"},
        "alien": {"config.json": '{"model_type": "zork"}'},
        "vision": {"config.json": '{"model_type": "vit"}'},
        "weightless": {"config.json": json.dumps(config)},
        "mismatched": {"config.json": deeper, "model.safetensors": weights},
        "wordless": {"config.json": json.dumps(config), "model.safetensors": weights},
    }
    for name, files in models.items():
        (top / name).mkdir()
        for file, content in files.items():
            (top / name / file).write_bytes(content if isinstance(content, bytes) else content.encode())
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
