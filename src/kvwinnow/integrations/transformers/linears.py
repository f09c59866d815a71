"""Linear layers of a traced decode step, whose weights are nearly all that a step reads: those that kernels serve.

Layers that take the same input, as queries, keys and values do, become one operator of the graph.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from kvwinnow.ops.cpu import level
from kvwinnow.ops.cpu.linear import serves

_VALUE = "example_value"
"""Where Dynamo notes what a node gives."""
_READING = {
    "_log_api_usage_once", "add", "cat", "chunk", "contiguous", "expand", "flatten", "float", "gelu", "getattr",
    "getitem", "linear", "mean", "mul", "neg", "permute", "pow", "relu", "reshape", "rsqrt", "sigmoid", "silu", "size",
    "split", "squeeze", "sub", "tanh", "to", "transpose", "unflatten", "unsqueeze", "view",
}  # fmt: skip
"""Functions and methods of torch that only read, unless they are asked to do otherwise."""
_HELD = ("get_attr", "placeholder")
"""Nodes of weights that lie in memory, which kernels read as they lie; others are computed."""


def take_over(traced: fx.GraphModule) -> int:
    """Give linear layers of a few rows to native kernels, in place; how many there were."""
    if level.current() is None:
        return 0
    layers: dict[tuple[fx.Node, int], list[fx.Node]] = {}
    changes = 0  # what a layer takes may be another after each
    for node in traced.graph.nodes:
        if node.op == "call_function" and node.target is functional.linear:
            x, weight, bias = _arguments(node)
            if _served(node, x, weight, bias):
                layers.setdefault((x, changes), []).append(node)
        elif _may_write(node):
            changes += 1
    for nodes in layers.values():
        _replace(traced.graph, nodes)
    if layers:
        traced.recompile()
    return sum(map(len, layers.values()))


def _may_write(node: fx.Node) -> bool:
    """Whether a node may write to a tensor: all not known to read may. A yes that is none costs an operator."""
    if not node.op.startswith("call_"):
        return False
    if node.op == "call_module" or isinstance(node.target, (HigherOrderOperator, OpOverload, OpOverloadPacket)):
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name not in _READING:
        return True
    return "out" in node.kwargs or any(value is True for value in (*node.args, node.kwargs.get("inplace")))


def _arguments(node: fx.Node) -> tuple[Any, Any, Any]:
    """What a linear layer takes: input, weight and bias or None."""
    given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    return given["input"], given["weight"], given.get("bias")


def _served(node: fx.Node, x: Any, weight: Any, bias: Any) -> bool:
    known = [node, x, weight] if bias is None else [node, x, weight, bias]
    if any(not isinstance(one, fx.Node) or type(one.meta.get(_VALUE)) is not FakeTensor for one in known):
        return False
    made, *given = (one.meta[_VALUE] for one in known)
    # Under autocast a layer gives another dtype than it takes.
    return all(one.op in _HELD for one in known[2:]) and made.dtype is given[0].dtype and serves(*given)


def _replace(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """One operator in the place of the first of them, where the weights of the others are got too."""
    x, *_ = _arguments(nodes[0])  # now: it may have been a layer that is replaced already

    def got(node: Any) -> Any:
        if not isinstance(node, fx.Node) or node.op != "get_attr":
            return node
        again = graph.get_attr(str(node.target))
        again.meta.update(node.meta)
        return again

    with graph.inserting_before(nodes[0]):
        weights, biases = ([got(_arguments(node)[place]) for node in nodes] for place in (1, 2))
        made = graph.call_function(torch.ops.kvwinnow.linear.default, (x, weights, biases))
        for place, node in enumerate(nodes):
            part = graph.call_function(operator.getitem, (made, place))
            part.meta.update(node.meta)
            node.replace_all_uses_with(part)
    for node in nodes:
        held = [one for one in _arguments(node)[1:] if one is not None]
        graph.erase_node(node)
        for one in held:
            if one.op == "get_attr" and not one.users:
                graph.erase_node(one)
