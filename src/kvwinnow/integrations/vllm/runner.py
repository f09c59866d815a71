"""Who lies in which row of a step: the one place that looks at vLLM's model runner (V1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvwinnow.errors import CacheStateError

_runner: Any = None


@dataclass(frozen=True)
class Row:
    """One request in a step.

    Attributes:
        request: its id.
        extra_args: what it was sent with.
        prompt: tokens of its prompt.
    """

    request: str
    extra_args: dict[str, Any] | None
    prompt: int


def remember(runner: Any) -> None:
    """Keep the process's model runner; a process has one."""
    global _runner  # noqa: PLW0603 - a worker process has one runner
    _runner = runner


def rows() -> list[Row]:
    """The requests of the step being prepared, in the order of its rows; none while vLLM measures or warms up."""
    if _runner is None:
        raise CacheStateError("kvwinnow's attention back end runs without kvwinnow's worker; this is a bug of ours")
    found = []
    for request_id in _runner.input_batch.req_ids:
        request = _runner.requests[request_id]
        params = request.sampling_params
        found.append(Row(request_id, params.extra_args if params else None, request.num_prompt_tokens))
    return found


def is_alive(request_id: str) -> bool:
    """Whether the runner still knows a request."""
    return _runner is not None and request_id in _runner.requests
