"""Prompts that commands take: read from a file or stdin, and checked against the model's length."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvwinnow.errors import KvwinnowError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STDIN = "-"

_NAME = re.compile(r"[~.]?[\w.\-/\\:~]+")
"""What a hub id or a path may look like; a question has spaces or a question mark."""


def model_and_question(
    first: str | None, second: str | None, prompt_file: str | None, system: str | None
) -> tuple[str | None, str | None]:
    """Two arguments by meaning, for commands that take a text, a question or both.

    A single argument is the model, unless it can only be a question.

    Raises:
        KvwinnowError: there is neither a file nor a question, or the question or the system message is no text.
    """
    model, question = first, second
    if second is None and first is not None:
        is_model = os.path.isdir(first) or _NAME.fullmatch(first) or not first.strip()
        model, question = (first, None) if is_model else (None, first)
    for what, given in (("question", question), ("system message", system)):
        check_characters(what, given or "")
    if question is not None and not question.strip():
        raise KvwinnowError("the question is empty; give some text, or leave it out")
    if prompt_file is None and question is None:
        if model is None or not model.strip():
            raise KvwinnowError(
                "there is no prompt; name a text file with --prompt-file FILE, give a question in quotes, or both"
            )
        file = model if os.path.isfile(os.path.expanduser(model)) else "FILE"
        raise KvwinnowError(
            f"{model!r} was taken as the model, and there is no prompt; name a text file with --prompt-file {file}, "
            "give a question of several words in quotes, or both"
        )
    return model, question


def joined(text: str | None, question: str | None) -> str:
    """The user's message: the file's text, then the question."""
    return "\n\n".join(filter(None, (text, question)))


def read_prompt(name: str, *, instead: str | None = None) -> str:
    """The text of a prompt file, or of stdin for "-", in UTF-8; a byte order mark and spaces around it are dropped.

    Args:
        name: as the user gave it.
        instead: how the complaint about an empty file ends; None: the file may be left out.

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
        instead = ", or leave --prompt-file out" if instead is None else instead
        raise KvwinnowError(f"{shown} is empty; put the text to ask about into it{instead}")
    return text.strip()


def check_characters(what: str, text: str) -> None:
    """Refuse bytes of the command line that are no text in its encoding; they arrive as lone surrogates.

    Raises:
        KvwinnowError: there are some.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise KvwinnowError(
            f"character {error.start + 1} of the {what} is {text[error.start]!r}, which UTF-8 does not have: a byte "
            "that is no text in this terminal's encoding; write it in UTF-8"
        ) from error


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
