"""Backwards that come after several forwards, as pipelines and contrastive losses run them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from composable_fsdp import fully_shard
from tests.helpers.run_ranks import run_ranks
from tests.helpers.sharding import full_value
from tests.helpers.transports import SOCKETS


class UsedTwice(nn.Module):
    """Its input's gradient needs the weight after the weight's own gradient is complete."""

    def __init__(self, times: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        return self.times(self.times(x, self.weight.detach()), self.weight)


def compare(steps: str, times: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Play ``steps`` as an unsharded model does: F a forward, X one that raises, B the oldest forward's backward."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 8), UsedTwice(times), UsedTwice(times))
    model: Any = copy.deepcopy(whole)
    for module in (*model, model):
        fully_shard(module)
    for each in (whole, model):
        torch.manual_seed(1)
        outputs: list[torch.Tensor] = []
        for step in steps:
            if step == "F":
                outputs.append(each(torch.randn(8, 8)))
            elif step == "B":
                outputs.pop(0).sum().backward()
            else:
                with pytest.raises(ValueError, match="not a number"):
                    each(torch.full((8, 8), torch.nan))
    for parameter, expected in zip(model.parameters(), whole.parameters(), strict=True):
        assert_close(full_value(parameter.grad), expected.grad)


def compare_all(steps: Sequence[str]) -> None:
    for each in steps:
        for times in (torch.matmul, torch.mul):
            compare(each, times)


@pytest.mark.parametrize("steps", [("FFBB", "FFFBBB", "FFBFBB"), ("FXB", "FFXBB")], ids=["all end", "one raises"])
def test_the_backward_of_each_forward_keeps_parameters_until_its_inputs_have_gradients(steps: Sequence[str]) -> None:
    run_ranks(partial(compare_all, steps), 2, environment=SOCKETS)
