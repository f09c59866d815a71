"""The error that vLLM's server answers with HTTP 400 and its sentence; any other would be a 500 that says nothing."""

from __future__ import annotations

from vllm.exceptions import VLLMValidationError

from kvwinnow.errors import KvwinnowError


class BadRequestError(VLLMValidationError, KvwinnowError):
    """A request that is refused before it reaches the engine."""
