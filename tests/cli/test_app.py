"""The program around the commands: help, version, interruption, memory."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import kvwinnow
from kvwinnow.cli import app
from tests.cli.conftest import Ran, program


def test_help_loads_no_torch() -> None:
    code = (
        "import sys; from kvwinnow.cli import main; code = main(sys.argv[1:]); "
        "sys.exit(code or ('torch' in sys.modules) or ('transformers' in sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    for command in ("demo", "generate", "plan", "policies", "doctor"):
        assert command in ran.stdout


def test_version(run: Callable[..., Ran]) -> None:
    assert run("--version") == Ran(0, f"kvwinnow {kvwinnow.__version__}\n", "")


def test_the_installed_program_is_the_same() -> None:
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name="kvwinnow")
    assert script.load() is app.main


# A test run in the background ignores interrupts, and its children would too.
INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from kvwinnow.cli import main
print("up", flush=True)
sys.exit(main())
"""


def started(*arguments: str) -> subprocess.Popen[str]:
    """The program, once it can be interrupted."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", INTERRUPTIBLE, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_an_interrupt_is_130_without_a_traceback() -> None:
    # A question on stdin that never ends: the program waits in the middle of its work.
    process = started("generate", "--prompt-file", "-", "Why?")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "kvwinnow: interrupted\n"


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("after", [0.1, 0.7, 1.5])
def test_an_interrupt_amid_imports_is_neither_swallowed_nor_a_traceback(after: float, tmp_path: Path) -> None:
    # The model is none, so that the program ends by itself with another code if it goes on.
    process = started("generate", str(tmp_path), "Why?")
    assert process.stderr is not None
    assert process.stderr.readline() == "... loading torch and transformers\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=after)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "kvwinnow: interrupted\n")


def test_too_little_memory_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as full:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert app._is_out_of_memory(full.value)
    assert app._is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert app._is_out_of_memory(MemoryError())
    assert not app._is_out_of_memory(RuntimeError("shapes do not match"))


@pytest.mark.parametrize("command", ["explore", "generate", "record", "plan"])
def test_ways_out_of_too_little_memory_are_options_of_the_command(command: str, run: Callable[..., Ran]) -> None:
    said = app._out_of_memory([command, "x"])
    for option in ("--kv-dtype", "--prefill-chunk"):
        assert (option in said) == (f"{option} " in run(command, "--help").out)
    assert said.startswith("out of memory; ")
    assert said.endswith("shorten the prompt")


def test_a_reader_that_stops_early_gets_no_traceback() -> None:
    code = "import sys; from kvwinnow.cli import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "policies"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
    process.wait(timeout=60)


def test_program_and_function_agree(run: Callable[..., Ran]) -> None:
    ran = program("--version")
    assert Ran(ran.returncode, ran.stdout, ran.stderr) == run("--version")
