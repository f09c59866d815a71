"""The counters: summed over processes, those that have ended too, and nothing left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from tests.vllm.offline import environment

NUMBERS = """
import multiprocessing, os, sys
from prometheus_client import REGISTRY, generate_latest
from kvwinnow.integrations.vllm import metrics

def work(blocks):
    metrics.start()  # as every process does that gets the configuration
    metrics.add(metrics.BLOCKS_FREED, blocks)
    metrics.add(metrics.SECONDS, 0.25)

def shown(registry):
    return sorted(line for line in generate_latest(registry).decode().splitlines() if line.startswith("kvwinnow"))

if __name__ == "__main__":
    registry = REGISTRY
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        metrics.add(metrics.BLOCKS_FREED, 1000)  # belongs to no server yet
    metrics.start()
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        from vllm.v1.metrics.prometheus import get_prometheus_registry
        registry = get_prometheus_registry()
        assert not shown(REGISTRY)
    print(*shown(registry))
    for way in ("spawn", "fork"):
        child = multiprocessing.get_context(way).Process(target=work, args=(2,))
        child.start()
        child.join()
        assert child.exitcode == 0
    if os.fork() == 0:  # ends like a program, so that what is to be done at exit is done
        metrics.add(metrics.TOKENS_EVICTED, 32)
        sys.exit()
    os.wait()
    metrics.add(metrics.BLOCKS_FREED, 1)
    metrics.start()
    print(*shown(registry))
"""


@pytest.mark.parametrize("several_servers", [False, True])
def test_sums(tmp_path: Path, several_servers: bool) -> None:
    program, folder = tmp_path / "count_blocks.py", tmp_path / "folder"
    program.write_text(NUMBERS)
    folder.mkdir()
    shared = {"PROMETHEUS_MULTIPROC_DIR": str(folder)} if several_servers else {}
    ran = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(TMPDIR=str(folder), **shared),
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    first, last = ran.stdout.splitlines()
    assert first == (
        "kvwinnow_blocks_freed_total 0.0 kvwinnow_compaction_seconds_total 0.0 kvwinnow_tokens_evicted_total 0.0"
    )
    assert last == (
        "kvwinnow_blocks_freed_total 5.0 kvwinnow_compaction_seconds_total 0.5 kvwinnow_tokens_evicted_total 32.0"
    )
    assert not list(folder.glob("kvwinnow-*"))
    assert bool(list(folder.glob("counter_kvwinnow*.db"))) is several_servers
