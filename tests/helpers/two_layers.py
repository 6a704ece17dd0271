"""A model of two layers that can run in both orders, and functions that make one rank fail in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import DivergenceError, PeerError, fully_shard


class Two(nn.Module):
    """Two layers of the same size that can run in both orders."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.swapped = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner, outer = (self.second, self.first) if self.swapped else (self.first, self.second)
        return cast(torch.Tensor, outer(torch.tanh(inner(x))))


def build() -> Any:
    model: Any = Two()
    for layer in (model.first, model.second):
        fully_shard(layer)
    fully_shard(model)
    model.set_schedule(max_fused_bytes=0)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 64) + dist.get_rank()).square().mean().backward()
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def swap(model: Two) -> Callable[[], None]:
    model.swapped = True

    def undo() -> None:
        model.swapped = False

    return undo


def raise_in_forward(model: Two) -> Callable[[], None]:
    return model.second.register_forward_pre_hook(_fail).remove


def raise_in_backward(model: Two) -> Callable[[], None]:
    def watchdog(module: nn.Module, args: object, output: torch.Tensor) -> None:
        output.register_hook(_fail)

    return model.first.register_forward_hook(watchdog).remove


def _fail(*_: object) -> None:
    raise ArithmeticError("test failure")


FAULTS: dict[str, tuple[Callable[[Two], Callable[[], None]], type[Exception], str]] = {
    "order": (swap, DivergenceError, r"^Forward order differs across ranks"),
    "forward": (raise_in_forward, PeerError, r"rank \d raised ArithmeticError: test failure in the forward of second"),
    "backward": (raise_in_backward, PeerError, r"rank \d raised in the backward of (first|second)"),
}
