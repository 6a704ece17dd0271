"""The memory of a backward as read from its graph, compared with the bytes of the tensors that the backward makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from composable_fsdp import ActivationMemory
from tests._internals import HasHooksError, activation_memory
from tests.helpers.peak_memory import Peak

WIDTH, ROWS = 64, 256
TOLERANCE = 4096
"""Bytes of single numbers and of the gradients of biases, which are ready beside those of weights."""


class Residual(nn.Module):
    """A normalized gated MLP beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        out: torch.Tensor = x + self.down(nn.functional.silu(gate) * value)
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(4, ROWS // 4, 4, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        mixed: torch.Tensor = self.out((scores @ v).transpose(1, 2).reshape(ROWS, WIDTH))
        return mixed


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(self.layer(x).tanh())
        return out


def frozen() -> nn.Module:
    model = nn.Sequential(Residual(), Residual())
    model[0].up.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "residual": lambda: nn.Sequential(*(Residual() for _ in range(3))),
    "attention": lambda: nn.Sequential(Attention(), nn.GELU(), Attention()),
    "shared layer": lambda: nn.Sequential(Twice(), nn.Linear(WIDTH, WIDTH)),
    "frozen": frozen,
}


@contextmanager
def reading(model: nn.Module, output: torch.Tensor) -> Iterator[list[ActivationMemory]]:
    """Read the memory when the backward reaches ``output``."""
    parameters = {id(parameter): ("all", index) for index, parameter in enumerate(model.parameters())}
    found: list[ActivationMemory] = []

    def read(_: object) -> None:
        found.extend(activation_memory(torch._C._current_autograd_node(), parameters))

    assert output.grad_fn is not None
    handle = output.grad_fn.register_prehook(read)
    yield found
    handle.remove()


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_and_the_order_are_those_of_the_backward(name: str) -> None:
    model = MODELS[name]()
    order: list[int] = []
    for index, parameter in enumerate(model.parameters()):

        def note(parameter: torch.Tensor, index: int = index) -> None:
            order.append(index)
            parameter.grad = None

        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(note)
    with Peak() as peak:
        output = model(torch.randn(ROWS, WIDTH))
        with reading(model, output) as found:
            output.register_hook(lambda _: setattr(peak, "bytes", 0))  # what the loss has taken
            output.square().sum().backward()
    assert [each.parameter for each in found] == order
    weights = sum(parameter.nbytes for parameter in model.parameters() if parameter.dim() > 1)  # seen as operands
    predicted, incoming = max(each.peak for each in found), output.nbytes
    assert predicted == pytest.approx(peak.bytes - weights - incoming, abs=incoming + TOLERANCE)
    assert found[-1].held <= TOLERANCE


def test_activations_of_later_modules_are_freed_before_those_of_earlier_ones() -> None:
    model = MODELS["residual"]()
    output = model(torch.randn(ROWS, WIDTH, requires_grad=True))
    with reading(model, output) as found:
        output.sum().backward()
    by_module = [found[at : at + 6] for at in range(0, len(found), 6)]
    one = sum(t.nbytes for t in (torch.empty(ROWS, 8 * WIDTH), *[torch.empty(ROWS, 4 * WIDTH)] * 2))
    ends = [group[-1].held for group in by_module]
    assert ends[0] - ends[1] == pytest.approx(ends[1] - ends[2], abs=2 * ROWS * WIDTH * 4 + TOLERANCE)
    assert ends[0] - ends[1] >= one


def test_a_recomputed_module_is_not_read_and_not_recomputed() -> None:
    layer, runs = nn.Linear(WIDTH, WIDTH), []
    layer.register_forward_hook(lambda *_: runs.append(1))
    output = checkpoint(layer, torch.randn(4, WIDTH, requires_grad=True), use_reentrant=False)
    with pytest.raises(HasHooksError):
        activation_memory(output.grad_fn, {})
    assert len(runs) == 1
