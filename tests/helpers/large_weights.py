"""A model with large weights in one group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp import fully_shard
from tests.helpers.counted_collectives import counted_collectives

WIDTH = 740


class Tower(nn.Module):
    """Four large weights in one group. A forward uses those in ``used``."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.floors = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.used = [0, 1, 2, 3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.used:
            x = torch.tanh(self.floors[i](x))
        return x


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def play(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step, rank)).square().mean()
    loss.backward()
    return loss.detach()


def use_different_weights() -> None:
    """Use different weights on each rank. No rank has all gradients, so all reduce at the end."""
    model, rank, size = Tower(), dist.get_rank(), dist.get_world_size()
    fully_shard(model)
    reference = Tower()
    routes = {0: [0, 1, 2, 3], 1: [0, 2], 2: [1], 3: [0, 1, 2]}
    expected: dict[str, torch.Tensor] = {}
    for other in range(size):
        reference.zero_grad()
        reference.used = routes[other]
        play(reference, 0, other)
        for name, parameter in reference.named_parameters():
            if parameter.grad is not None:
                expected[name] = expected.get(name, torch.zeros_like(parameter)) + parameter.grad / size
    model.used = routes[rank]
    with counted_collectives() as counts:
        play(model, 0, rank)
    assert counts["reduce_scatter"] == 1
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        torch.testing.assert_close(parameter.grad.full_tensor(), expected[name])
