"""A tiny model in a folder, with a tokenizer of bytes and no chat template: loads in milliseconds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvwinnow.cli import main
from tests.models import tiny_model

TRAINED = 512  # tokens


@dataclass(frozen=True)
class Ran:
    """What one run of the command line left."""

    code: int
    out: str
    err: str

    def complaint(self) -> str:
        """The one sentence on stderr, stages aside."""
        lines = [line for line in self.err.splitlines() if line and not line.startswith("... ")]
        assert len(lines) == 1, self.err
        assert lines[0].startswith("kvwinnow: ")
        return lines[0].removeprefix("kvwinnow: ")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs the command line in this process."""

    def call(*args: object) -> Ran:
        code = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


def program(
    *args: object, env: dict[str, str] | None = None, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command line as a program of its own."""
    code = "import sys; from kvwinnow.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, check=False, env=env, input=stdin
    )


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-model")
    tiny_model(trained=TRAINED, vocab_size=257).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that a text's length is its prompt's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)
