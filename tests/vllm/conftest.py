"""One engine at a time, the text it is asked about, and what the transformers cache answers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvwinnow import CompressedCache
from kvwinnow.evaluation.document import help_chapters, paragraphs
from tests.models import tiny_model, tiny_tokens
from tests.running import CACHE

if TYPE_CHECKING:
    from tests.vllm.engines import Engines

Reference = Callable[..., list[int]]
TinyEngines = Callable[..., Any]


@pytest.fixture(scope="session")
def engines() -> Iterator[Engines]:
    """Gives the engine with these options, ``engines(max_num_batched_tokens=64)``; another is ended before."""
    from tests.vllm.engines import Engines

    made = Engines()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def every_block_is_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test that used an engine nothing runs, and every block is in the pool."""
    yield
    engines: Engines | None = request.getfixturevalue("engines") if "engines" in request.fixturenames else None
    if engines is None or engines.engine is None:
        return
    left = engines.engine.blocks_out()
    if left or engines.engine.busy():
        engines.close()  # so that no other test fails for what this one left
    assert left == 0


@pytest.fixture(scope="session")
def document(smollm2: tuple[Any, Any]) -> list[int]:
    """The tokens of some prose."""
    text = "\n\n".join(paragraphs(help_chapters()))
    return list(smollm2[1](text)["input_ids"])


def reference(model: Any) -> Reference:
    """Greedy tokens of the library's own cache, which evicts the same blocks."""

    @functools.cache
    def answer(prompt: tuple[int, ...], policy: str, *, block: int, tokens: int, chunk: int) -> list[int]:
        cache = CompressedCache(model, policy, multiple_of=block)
        ids = torch.tensor([prompt])
        found: list[int] = []
        with torch.no_grad():
            with cache.prompt(length=len(prompt)):
                for piece in ids.split(chunk, dim=1):
                    logits = model(piece, logits_to_keep=1, **{CACHE: cache}).logits
            while len(found) < tokens:
                found.append(int(logits[0, -1].argmax()))
                logits = model(torch.tensor([found[-1:]]), **{CACHE: cache}).logits
        return found

    return lambda prompt, policy, *, block=32, tokens=40, chunk=2**20: answer(
        tuple(prompt), policy, block=block, tokens=tokens, chunk=chunk
    )


@pytest.fixture(scope="session")
def transformers_cache(smollm2: tuple[Any, Any]) -> Reference:
    """What SmolLM2 answers with the transformers cache."""
    return reference(smollm2[0])


# -- a tiny model, for tests of which steps a request is made of ------------------------------------


@pytest.fixture(scope="session")
def tiny() -> Any:
    """A random model of three layers, each of 4 query and 2 KV heads."""
    return tiny_model(heads=4, kv_heads=2, dim=32, layers=3, trained=8192, seed=3)


@pytest.fixture(scope="session")
def tiny_folder(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the tiny model is saved."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_engines(engines: Engines, tiny_folder: str) -> TinyEngines:
    """``engines``, of the tiny model."""
    return lambda **options: engines(model=tiny_folder, skip_tokenizer_init=True, **options)


@pytest.fixture(scope="session")
def tiny_cache(tiny: Any) -> Reference:
    """What the tiny model answers with the transformers cache."""
    return reference(tiny)


@pytest.fixture(scope="session")
def noise() -> list[int]:
    """Tokens for the tiny model."""
    return list(tiny_tokens(6000)[0][0].tolist())
