"""Test that ranks expect the same order of groups again after a forward that failed on one rank only."""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import PeerError, fully_shard
from tests.helpers.run_ranks import run_ranks

WIDTH = 16


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.fails = nn.Linear(WIDTH, WIDTH), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        if self.fails:
            raise ArithmeticError
        return out


def fail_once_then_train() -> int:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), Last())
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    x = torch.ones(1, WIDTH)
    last = model[-1]
    assert isinstance(last, Last)
    last.fails = dist.get_rank() == 1
    with suppress(ArithmeticError, PeerError):
        model(x).sum().backward()
    last.fails = False
    model.reset_iter_state()  # type: ignore[operator]
    for _ in range(2):
        model(x).sum().backward()
    return 1


def test_a_forward_that_failed_on_one_rank_leaves_no_order() -> None:
    assert run_ranks(fail_once_then_train, 2, timeout=40) == [1, 1]
