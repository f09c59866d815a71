"""Prompts that commands take: read from a file or stdin, and checked against the model's length."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvwinnow.errors import KvwinnowError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STDIN = "-"


def read_prompt(name: str, *, instead: str = ", or leave --prompt-file out") -> str:
    """The text of a prompt file, or of stdin for "-", in UTF-8; a byte order mark and spaces around it are dropped.

    Args:
        name: as the user gave it.
        instead: what can be done without such a file, for the complaint about an empty one.

    Raises:
        KvwinnowError: it cannot be read, is no text, or is empty.
    """
    shown = "stdin" if name == STDIN else f"prompt file {name!r}"
    if name == STDIN and sys.stdin is None:
        raise KvwinnowError("stdin is closed, so --prompt-file - reads nothing; pipe the text in, or name a file")
    try:
        data = sys.stdin.buffer.read() if name == STDIN else Path(os.path.expanduser(name)).read_bytes()
        text = data.decode("utf-8").removeprefix("\ufeff")
    except FileNotFoundError as error:
        raise KvwinnowError(f"{shown} does not exist; check the path, or give - to read stdin") from error
    except IsADirectoryError as error:
        raise KvwinnowError(f"{shown} is a folder; name a text file in it") from error
    except OSError as error:
        raise KvwinnowError(f"{shown} cannot be read: {error.strerror or error}; name another file") from error
    except UnicodeDecodeError as error:
        raise KvwinnowError(
            f"{shown} is not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x}); convert it to UTF-8 first"
        ) from error
    except ValueError as error:  # of the path: a NUL, or a character that no file name has here
        raise KvwinnowError(f"{shown} is no path ({error}); name a text file") from error
    if not text.strip():
        raise KvwinnowError(f"{shown} is empty; put the text to ask about into it{instead}")
    return text.strip()


def check_length(model: PreTrainedModel, prompt: int, new: int, option: str) -> None:
    """Refuse a prompt that with ``new`` more tokens, which ``option`` asks for, ends beyond the model's positions.

    Raises:
        KvwinnowError: it does.
    """
    from kvwinnow.integrations.transformers.structure import trained_length

    trained = trained_length(model.config)
    if trained is not None and prompt + new > trained:
        raise KvwinnowError(
            f"the prompt has {prompt:,} tokens and {option} asks for {new:,}, {prompt + new:,} together; the "
            f"model serves {trained:,} positions; shorten the prompt or lower {option}"
        )
