"""Who lies in which row of a step: the one place that looks into vLLM's model runners, of which there are two.

Requests are noted as the scheduler sends them, in one way for both: V2 keeps no request's parameters. Only the order of
a step's rows is read from the runner itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvwinnow.errors import CacheStateError, UnsupportedSetupError


@dataclass(frozen=True)
class Row:
    """One request in a step.

    Attributes:
        request: its id.
        extra_args: what it was sent with.
        prompt: tokens of its prompt, without those that it had generated before it was preempted.
    """

    request: str
    extra_args: dict[str, Any] | None
    prompt: int


class RowsV1:
    """The rows of V1, whose batch stands in the runner's own order."""

    module = "vllm.v1.worker.gpu_model_runner"

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    @staticmethod
    def fits(runner: Any) -> bool:
        """Whether the runner has all that is read of it."""
        return hasattr(getattr(runner, "input_batch", None), "req_ids")

    def names(self, _: Any) -> Sequence[str]:
        """The step's requests, row by row."""
        names: Sequence[str] = self.runner.input_batch.req_ids
        return names


class RowsV2:
    """The rows of V2, whose metadata say where in the runner's table each row's request stands."""

    module = "vllm.v1.worker.gpu.model_runner"

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    @staticmethod
    def fits(runner: Any) -> bool:
        """Whether the runner has all that is read of it."""
        table = getattr(getattr(runner, "req_states", None), "index_to_req_id", None)
        return isinstance(table, dict) and serves_v2()

    def names(self, common: Any) -> Sequence[str]:
        """The step's requests, row by row."""
        table = self.runner.req_states.index_to_req_id
        return [table[index] for index in common.req_idx.tolist()]


_rows: RowsV1 | RowsV2 | None = None
_requests: dict[str, Row] = {}
_stepping = False


def serves_v2() -> bool:
    """Whether this vLLM's V2 tells what is read of it."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    return "req_idx" in CommonAttentionMetadata.__dataclass_fields__


def remember(runner: Any) -> None:
    """Keep the process's model runner, and look at each step that it is given; a process has one at a time.

    Not the worker's steps: Ray's compiled graphs ask the runner itself.

    Raises:
        UnsupportedSetupError: it is neither of the two, or not as they are known.
    """
    global _rows  # noqa: PLW0603 - a worker process has one runner
    modules = {found.__module__ for found in type(runner).__mro__}
    _rows = next((kind(runner) for kind in (RowsV1, RowsV2) if kind.module in modules and kind.fits(runner)), None)
    _requests.clear()
    if _rows is None:
        import vllm

        raise UnsupportedSetupError(
            f"vLLM {vllm.__version__} runs models by {type(runner).__module__}.{type(runner).__qualname__}, in which "
            "kvwinnow cannot find a step's requests; it knows V1 of vLLM 0.28 to 0.32 and V2 of 0.32: install one of "
            "these, or choose between them by VLLM_USE_V2_MODEL_RUNNER=0 or 1"
        )
    execute = runner.execute_model

    @functools.wraps(execute)
    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run"):  # V2's own, of a step that no scheduler has made
            return execute(scheduler_output, *args, **kwargs)
        with step(scheduler_output):
            return execute(scheduler_output, *args, **kwargs)

    runner.execute_model = execute_model


@contextlib.contextmanager
def step(scheduled: Any) -> Iterator[None]:
    """While the runner is in a step of the scheduler's; whatever runs outside is a measurement or a warm-up.

    Args:
        scheduled: the scheduler's output.
    """
    global _stepping  # noqa: PLW0603 - as above
    for request in scheduled.finished_req_ids:
        _requests.pop(request, None)
    for new in scheduled.scheduled_new_reqs:  # in V2 also those that come back after a preemption
        prompt = new.prompt_embeds if new.prompt_token_ids is None else new.prompt_token_ids
        params = new.sampling_params
        _requests[new.req_id] = Row(new.req_id, params.extra_args if params else None, len(prompt))
    _stepping = True
    try:
        yield
    finally:
        _stepping = False


def rows(common: Any) -> list[Row]:
    """The requests of the step being prepared, in the order of its rows; none while vLLM measures or warms up.

    Args:
        common: vLLM's metadata of the step, which all attention back ends get.
    """
    if _rows is None:
        raise CacheStateError("kvwinnow's attention back end runs without kvwinnow's worker; this is a bug of ours")
    return [_requests[name] for name in _rows.names(common)[: common.num_reqs]] if _stepping else []


def is_alive(request_id: str) -> bool:
    """Whether the request is not finished."""
    return request_id in _requests
