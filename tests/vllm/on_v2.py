"""Engines on vLLM's second model runner, in a process of their own.

V2 wants Triton, and no package of Triton has a back end for CPUs. But its interpreter runs the same kernels, by numpy,
on tensors of the CPU; all that is needed is a back end by that name. V2 itself is vLLM's own, unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.vllm.offline import allow_async_scheduling

if TYPE_CHECKING:
    from tests.vllm.engines import Answer, Ask, Engines

LIMIT = 120
"""Seconds for one job, which takes ten."""
_engines: Engines | None = None


@dataclass(frozen=True)
class Events:
    """What happens to an engine while it answers, by the number of the step after which it does.

    Attributes:
        lose_all: every so many steps all requests lose their blocks; 0: never.
        give_up: (after so many steps, which request) are taken back.
        dummies: whether batches of nobody's tokens are run in between, as idle engines run them beside busy ones.
    """

    lose_all: int = 0
    give_up: tuple[tuple[int, int], ...] = ()
    dummies: bool = False


Run = Callable[..., "list[Answer | None]"]


@contextmanager
def process() -> Iterator[Run]:
    """Gives a function that does ``answers`` on V2."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_prepare) as pool:
        yield lambda *args: pool.submit(answers, *args).result(LIMIT)


def answers(options: dict[str, Any], asks: Sequence[Ask], events: Events = Events()) -> list[Answer | None]:
    """What an engine with these options answers to requests sent all at once; None for those that were taken back."""
    assert _engines is not None
    with allow_async_scheduling() if options.get("async_scheduling") else nullcontext():
        engine = _engines(**options)
    core = engine.llm.llm_engine.engine_core.engine_core
    assert (core.batch_queue is not None) == options.get("async_scheduling", False)
    worker = core.model_executor.driver_worker.worker
    assert any(kind.__module__ == "vllm.v1.worker.gpu.model_runner" for kind in type(worker.model_runner).__mro__)
    names = [engine.add(ask) for ask in asks]
    records = [engine.requests(name) for name in names]
    steps = 0
    while engine.busy():
        engine.step()
        steps += 1
        if events.dummies:
            worker.execute_dummy_batch()
        if events.lose_all and steps % events.lose_all == 0 and engine.busy():
            assert engine.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
        for at, which in events.give_up:
            if at == steps:
                engine.abort(names[which])
    assert engine.blocks_out() == 0
    lost = {which for _, which in events.give_up}
    return [
        None if at in lost else engine.answer(name, found)
        for at, (name, found) in enumerate(zip(names, records, strict=True))
    ]


class _Driver:
    """Enough for vLLM to believe that Triton runs here."""

    @staticmethod
    def is_active() -> bool:
        return True


def _prepare() -> None:
    global _engines  # noqa: PLW0603 - one a process
    os.environ.update({"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"})
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(compiler=None, driver=_Driver)
    from tests.vllm.engines import Engines

    _engines = Engines()
