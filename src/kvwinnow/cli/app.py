"""The program: its commands, and how everything that can go wrong becomes an exit code and one sentence."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from kvwinnow import __version__
from kvwinnow.cli.console import BAD_INPUT
from kvwinnow.cli.demo import demo
from kvwinnow.cli.doctor import doctor
from kvwinnow.cli.explore import explore
from kvwinnow.cli.generate import generate
from kvwinnow.cli.plan import plan
from kvwinnow.cli.policies import policies
from kvwinnow.cli.record import record
from kvwinnow.cli.serve import CONTEXT, serve
from kvwinnow.cli.simulate import simulate
from kvwinnow.errors import KvwinnowError

INTERRUPTED = 130

# What click returns for a reader of stdout that stopped early.
_READER_GONE = 1

_LESS_MEMORY = {
    "--policy": "take a smaller budget",
    "--kv-dtype": "take a smaller --kv-dtype",
    "--prefill-chunk": "feed the prompt in pieces with --prefill-chunk",
}
"""What can be done where memory is short, by the option that a command must have for it."""

app = typer.Typer(
    name="kvwinnow",
    help="Generate with a compressed KV cache: fewer tokens, fewer bits, the same model.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, generate, plan, simulate, record, explore, policies, doctor):
    app.command()(command)
app.command(context_settings=CONTEXT)(serve)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvwinnow {__version__}")
        raise typer.Exit


# transformers imports torchao where it is installed, which tells of every library of its own that it cannot load.
logging.getLogger("torchao").setLevel(logging.ERROR)
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after the program's name; None: those of the process.

    Returns:
        The exit code: 0, what the command says (``demo``: 1 if an answer is wrong), 2 for bad input or too little
        memory, 130 if interrupted. Whatever ends the program early is told in one sentence on stderr.
    """
    if sys.stderr is None:  # closed by the caller; whoever writes there must not fall back to stdout
        sys.stderr = io.StringIO()
    if sys.stdout is None:
        return _complain("stdout is closed, so there is nowhere to write to; redirect it to a file, or to /dev/null")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model writes characters that the encoding may not have
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        result = typer.main.get_command(app).main(given, prog_name="kvwinnow", standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        return _complain(_misused(error))
    except KvwinnowError as error:
        return _complain(_one_line(str(error)))
    except (KeyboardInterrupt, typer.Abort):
        result = INTERRUPTED
    except BrokenPipeError:
        _discard_rest()
        return _READER_GONE
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        _discard_rest()
        return _complain(
            f"the output cannot be written: {error.strerror}; send stdout and stderr to where there is room"
        )
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        return _complain(_out_of_memory(given))
    if result == INTERRUPTED:
        return _complain("interrupted", INTERRUPTED)
    return result if isinstance(result, int) else 0


def _complain(sentence: str, code: int = BAD_INPUT) -> int:
    try:
        print(f"kvwinnow: {sentence}", file=sys.stderr, flush=True)
    except OSError:  # stderr itself cannot be written; the code still tells
        _discard_rest()
    return code


def _discard_rest() -> None:
    """Lets what a stream still holds and cannot write go nowhere, or Python complains about it at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")


def _misused(error: typer.TyperException) -> str:
    """The complaint about arguments that no command takes, with the help of the command that was given."""
    context = getattr(error, "ctx", None)
    command = getattr(context, "command_path", None) or "kvwinnow"
    sentence = _one_line(error.format_message())
    if command == "kvwinnow plan" and "unexpected extra argument" in sentence:
        sentence += "; several contexts are written with commas, such as --context 32k,64k"
    return f"{sentence} (see {command} --help)"


def _out_of_memory(given: Sequence[str]) -> str:
    """The complaint, with the ways out that the command which was given has."""
    commands: dict[str, Any] = getattr(typer.main.get_command(app), "commands", {})
    named = next((commands[word] for word in given if word in commands), None)
    options = {name for param in (named.params if named else ()) for name in param.opts}
    ways = [way for option, way in _LESS_MEMORY.items() if option in options]
    return f"out of memory; {', '.join([*ways, 'or shorten the prompt' if ways else 'shorten the prompt'])}"


def _is_out_of_memory(error: Exception) -> bool:
    """torch raises its own kind on a GPU and a bare RuntimeError on the CPU."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )
