"""What benchmarks cannot do is said in a sentence, before they begin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("decode_attention.py", ["--threads", "0"], "'0' is no whole number"),
        ("quantize.py", ["--tokens", "x"], "'x' is no whole number"),
        ("compaction.py", ["--tokens", "10", "--keep", "20"], "--keep 20"),
        ("compaction.py", ["--threads", "4096"], "--threads 4096: there are"),
        ("decode_attention.py", ["--tokens", "16", "--formats", "int9"], "int9"),
        ("prefill_scoring.py", ["--tokens", "16", "--level", "sse"], "'sse' is no level"),
        ("linear.py", ["--rows", "5"], "--rows 5: kernels take 4 at most"),
        ("peers/run.py", ["--rounds", "0"], "'0' is no whole number"),
    ],
)
def test_bad_arguments_get_one_sentence(script: str, arguments: list[str], said: str) -> None:
    ran = subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments], capture_output=True, text=True, check=False, timeout=300
    )
    assert ran.returncode != 0
    assert said in ran.stderr.splitlines()[-1]
    assert "Traceback" not in ran.stderr
