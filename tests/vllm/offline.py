"""The offline engine in a process of its own, so that nothing of it is left when it has answered.

Run as a program it reads what to do from its argument, in JSON, and prints the tokens.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32
POLICIES = ("none", "snapkv:budget=128", "h2o:budget=128", "streamingllm:budget=128")
PROMPT, NEW = 400, 32
"""Tokens of each prompt, and of each answer."""
LIMIT = 400
"""Seconds that a process may take on a busy machine."""
ENGINE = {"dtype": "float32", "max_model_len": 1024, "block_size": BLOCK, "kv_cache_memory_bytes": 2**28}
"""What engines and servers have in common."""


def environment(**others: str) -> dict[str, str]:
    """The environment of a process with vLLM: this one's, offline, on few threads, and this kvwinnow.

    But for what engines of this process have left in it for their own children, of whom that one is none.
    """
    import kvwinnow
    from kvwinnow.integrations.vllm import metrics, platform

    source = str(Path(kvwinnow.__file__).parents[1])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    fixed = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    kept = {name: value for name, value in os.environ.items() if name not in (metrics.FOLDER, platform.V2)}
    return {**kept, **fixed, "PYTHONPATH": path, **others}


def model_folder() -> str:
    from kvwinnow.integrations import default_model

    return str(default_model.model_dir())


@functools.cache
def prompts() -> list[list[int]]:
    """As many prompts as there are policies, of a text that the model can go on with."""
    from transformers import AutoTokenizer

    from kvwinnow.evaluation.document import help_chapters, paragraphs

    text = "\n\n".join(paragraphs(help_chapters()))
    ids = AutoTokenizer.from_pretrained(model_folder())(text)["input_ids"]
    return [ids[100 * at : 100 * at + PROMPT] for at in range(len(POLICIES))]


def run_engine(env: dict[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Ask an engine with these options for the answers to all prompts, each under its policy, at once."""
    given = json.dumps({"model": model_folder(), "prompts": prompts(), "options": {**ENGINE, **options}})
    return subprocess.run(
        [sys.executable, "-P", __file__, given],
        capture_output=True,
        text=True,
        check=False,
        env=environment(VLLM_LOGGING_LEVEL="ERROR", **(env or {})),
        timeout=LIMIT,
    )


@functools.cache
def single_process() -> list[list[int]]:
    """The tokens that an engine with one worker gives, which the tests of the transformers cache prove right."""
    return tokens_of(run_engine(enforce_eager=True))


def tokens_of(ran: subprocess.CompletedProcess[str]) -> list[list[int]]:
    assert ran.returncode == 0, f"{ran.stdout[-2000:]}\n{ran.stderr[-6000:]}"
    found: list[list[int]] = json.loads(ran.stdout.splitlines()[-1])
    return found


@contextlib.contextmanager
def allow_async_scheduling() -> Iterator[None]:
    """vLLM's CPU platform turns it off, as it gains nothing there; it works all the same."""
    from vllm.platforms.cpu import CpuPlatform

    known = CpuPlatform.__dict__["check_and_update_config"]

    def check_and_turn_on(cls: Any, vllm_config: Any) -> None:
        known.__func__(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_turn_on)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = known


def _main() -> None:
    from vllm import LLM, SamplingParams

    given = json.loads(sys.argv[1])
    with allow_async_scheduling() if given["options"].get("async_scheduling") else contextlib.nullcontext():
        llm = LLM(given["model"], additional_config={"kvwinnow": {}}, **given["options"])
    if given["options"].get("async_scheduling"):
        core = llm.llm_engine.engine_core.engine_core
        assert type(core.scheduler).__name__ == "EvictingAsyncScheduler"
        assert core.batch_queue is not None
    params = [
        SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True, extra_args={"kvwinnow": policy})
        for policy in POLICIES
    ]
    answers = llm.generate([{"prompt_token_ids": ids} for ids in given["prompts"]], params, use_tqdm=False)
    print(json.dumps([list(answer.outputs[0].token_ids) for answer in answers]), flush=True)


if __name__ == "__main__":
    _main()
