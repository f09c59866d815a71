"""Which linear layers of a traced graph kernels take over, and that they compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from kvwinnow.integrations.transformers.linears import take_over
from kvwinnow.ops.cpu import level, library


@pytest.fixture(autouse=True)
def _kernels() -> None:
    found = library.load()
    if isinstance(found, library.Absent):
        pytest.skip(found.reason)


def traced(module: nn.Module, x: Tensor, *, constants: bool) -> tuple[fx.GraphModule, list[Any]]:
    """As Dynamo traces it, with its weights as constants or as inputs; and the inputs."""
    made: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(graph: fx.GraphModule, given: list[Any]) -> Any:
        made.append((graph, given))
        return graph

    torch.compiler.reset()
    with torch.no_grad(), torch._inductor.config.patch(freezing=constants):
        torch.compile(module, backend=backend, fullgraph=True)(x)
    return made[0]


def operators(graph: fx.GraphModule) -> list[int]:
    """How many layers each operator of ours computes."""
    own = torch.ops.kvwinnow.linear.default
    return [len(node.args[1]) for node in graph.graph.nodes if node.target is own]


def check(graph: fx.GraphModule, given: list[Any], module: nn.Module, x: Tensor, near: float = 1e-5) -> None:
    """The graph gives what the module gives."""
    with torch.no_grad():
        expected = module(x)
        out = tuple(graph(*given))
    torch.testing.assert_close(out, expected if isinstance(expected, tuple) else (expected,), rtol=near, atol=near / 10)


class Block(nn.Module):
    """Attention's projections and an MLP, as decoders have them."""

    def __init__(self, dtype: torch.dtype, *, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, n, bias=bias, dtype=dtype) for n in (64, 16, 16))
        self.o = nn.Linear(96, 64, bias=bias, dtype=dtype)
        self.odd = nn.Linear(64, 40, bias=bias, dtype=dtype)
        self.last = nn.Linear(40, 8, dtype=dtype)  # 40 is no multiple of 32

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.cat((self.q(x), self.k(x), self.v(x)), -1)
        x = x + self.o(mixed)
        return self.last(functional.silu(self.odd(x)))


@pytest.mark.parametrize("constants", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_one_input_become_one_operator(dtype: torch.dtype, bias: bool, constants: bool) -> None:
    torch.manual_seed(0)
    block, x = Block(dtype, bias=bias), torch.randn(1, 1, 64, dtype=dtype)
    graph, given = traced(block, x, constants=constants)
    assert take_over(graph) == 5
    assert operators(graph) == [3, 1, 1]
    check(graph, given, block, x, near=2e-2 if dtype is torch.bfloat16 else 1e-5)


def test_what_is_computed_first_is_no_weight() -> None:
    """Merged adapters and weights that a graph dequantises."""

    class Merged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.more = (nn.Linear(64, 64, bias=False) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.base.weight + self.more.weight)

    graph, _ = traced(Merged(), torch.randn(1, 64), constants=True)
    assert take_over(graph) == 0
    assert operators(graph) == []


@pytest.mark.parametrize(("rows", "taken"), [(4, 5), (5, 0)])
def test_many_rows_are_left_to_torch(rows: int, taken: int) -> None:
    graph, _ = traced(Block(torch.float32, bias=False), torch.randn(rows, 1, 64), constants=True)
    assert take_over(graph) == taken


def test_nothing_is_taken_over_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = traced(Block(torch.float32, bias=False), torch.randn(1, 1, 64), constants=True)
    monkeypatch.setenv(level.VARIABLE, level.OFF)
    assert take_over(graph) == 0


def test_one_weight_may_serve_many_layers() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(self.one(x)) + self.one(x)

    torch.manual_seed(0)
    shared, x = Shared(), torch.randn(2, 64)
    graph, given = traced(shared, x, constants=True)
    assert take_over(graph) == 3
    check(graph, given, shared, x)


def _by_method(x: Tensor) -> None:
    x.mul_(2)


def _by_operator(x: Tensor) -> None:
    x *= 2


def _by_item(x: Tensor) -> None:
    x[..., :32] = 3


def _by_view(x: Tensor) -> None:
    x.view(-1).add_(1)


def _by_function(x: Tensor) -> None:
    functional.relu(x, inplace=True)


def _by_place(x: Tensor) -> None:
    torch.add(x, 1, out=x)


def _by_operator_of_torch(x: Tensor) -> None:
    torch.ops.aten.mul_.Tensor(x, 2)


def _by_hidden_method(x: Tensor) -> None:
    x.__imul__(2)


def _by_packet(x: Tensor) -> None:
    torch.ops.aten.mul_(x, 2)


def _by_statistics(x: Tensor) -> None:
    functional.batch_norm(torch.ones(2, 64), x[0], torch.ones(64), training=True)


CHANGES = [
    _by_hidden_method, _by_packet, _by_statistics, _by_method, _by_operator, _by_item, _by_view, _by_function,
    _by_place, _by_operator_of_torch,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_layers_before_and_after_a_change_of_their_input_stay_apart(change: Callable[[Tensor], None]) -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = (nn.Linear(64, 32) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = x + 0
            early = self.before(x)
            change(x)
            return early + self.after(x)

    torch.manual_seed(0)
    module, x = Changing(), torch.randn(1, 64)
    graph, given = traced(module, x, constants=True)
    assert take_over(graph) == 2
    assert operators(graph) == [1, 1]
    check(graph, given, module, x)


def test_what_is_written_to_a_layers_result_is_seen_in_no_other() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (nn.Linear(64, 32) for _ in range(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            one, two = self.one(x), self.two(x)
            one.view(-1)[:4].add_(5)
            return one, two

    torch.manual_seed(0)
    module, x = Written(), torch.randn(1, 64)
    graph, given = traced(module, x, constants=True)
    assert take_over(graph) == 2
    check(graph, given, module, x)


def test_what_autocast_makes_of_a_layer_is_left_to_it() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (nn.Linear(64, 32) for _ in range(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                one = self.one(x)
            return one, self.two(x)

    torch.manual_seed(0)
    module, x = Cast(), torch.randn(1, 64)
    graph, given = traced(module, x, constants=True)
    assert take_over(graph) == 1
    with torch.no_grad():
        one, two = graph(*given)
        expected = module(x)
    assert one.dtype is torch.bfloat16
    assert torch.equal(one, expected[0])
    torch.testing.assert_close(two, expected[1], rtol=1e-5, atol=1e-6)
