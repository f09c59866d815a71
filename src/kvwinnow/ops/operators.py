"""Operators that torch's compilers know by name and call often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library: Any = torch.library.Library("kvwinnow", "FRAGMENT")  # type: ignore[no-untyped-call]


def register(function: Callable[..., Any], shapes: Callable[..., Any], *, key: str) -> None:
    """Make ``function`` the operator ``kvwinnow::NAME``, which changes none of its arguments and has no gradient.

    ``torch.library.custom_op`` does the same, with wrappers for gradients and mutation that take some 20 microseconds
    a call: as long as a layer's work in a short cache.

    Args:
        function: its signature is the operator's, its name NAME.
        shapes: from the same arguments to empty tensors of the right shapes; it runs while graphs are traced.
        key: for which dispatch key of torch: "CPU", or "CompositeExplicitAutograd" for all devices.
    """
    name = function.__name__
    _library.define(f"{name}{torch.library.infer_schema(function, mutates_args=())}")
    _library.impl(name, function, key)
    torch.library.register_fake(f"kvwinnow::{name}", shapes, lib=_library)
