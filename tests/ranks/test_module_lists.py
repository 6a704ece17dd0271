"""Test that several modules in one ``fully_shard`` call are one group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp import FSDPModule, fully_shard
from composable_fsdp.errors import ConfigurationError
from composable_fsdp.trace import Operation, Recorder
from tests._internals import find_state, state_of
from tests.helpers.assert_trace import assert_trace
from tests.helpers.models import TASKS, Chain, seeded
from tests.helpers.run_ranks import on_ranks
from tests.helpers.transports import SOCKETS

SHOWN = (Operation.UNSHARD, Operation.WAIT, Operation.RESHARD, Operation.REDUCE)


def shard_ends_together(model: nn.Module, **options: Any) -> nn.Module:
    """Shard the first and the last layer as one group, and each other layer and the model as its own group."""
    layers = list(model.get_submodule("layers").children())
    fully_shard([layers[0], layers[-1]], **options)
    for layer in layers[1:-1]:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


class Towers(nn.Module):
    """Has chains that are in one list. One inner layer is also called separately."""

    def __init__(self) -> None:
        super().__init__()
        self.left = Chain(8, 2)
        self.right = Chain(8, 2)
        self.middle = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.left(x) + self.left.layers[1](x)
        x = torch.tanh(self.middle(x))
        x = self.right(x)
        return x + self.left.layers[1](x)


def shard_nested_modules_together(model: Any, **options: Any) -> nn.Module:
    """Shard as one list a module, a module inside it, and a module whose inner layer has its own group."""
    fully_shard(model.right.layers[1], **options)
    fully_shard([model.left, model.left.layers[1], model.right], **options)
    return fully_shard(model, **options)


@pytest.mark.behaviour("A-09")
@on_ranks(2, environment=SOCKETS)
def test_a_list_is_gathered_once_each_way_and_reduced_once() -> None:
    task, rank = TASKS["chain"], dist.get_rank()
    model = shard_ends_together(task.build())
    model.set_schedule(max_fused_bytes=0)  # type: ignore[operator]
    x, target = task.batch_of(0, rank)
    for needs_gradient in (True, False):
        forward, backward = Recorder(), Recorder()
        for step in range(2):
            with forward if step else Recorder():
                loss = task.loss(model, (x.clone().requires_grad_(needs_gradient), target))
            with backward if step else Recorder():
                loss.backward()
        ends = "layers.0, layers.3"
        of_ends = [e for e in forward if e.group == ends]
        assert_trace(of_ends, f"unshard {ends}", f"wait {ends}", f"reshard {ends}", operations=SHOWN)
        ended = [str(e) for e in forward if e.operation is Operation.RESHARD and e.group != "root"]
        assert ended == ["reshard layers.1", "reshard layers.2", f"reshard {ends}"]
        assert_trace(
            (e for e in backward if e.group == ends),
            f"unshard {ends}",
            f"wait {ends}",
            *((f"reduce {ends}", f"reshard {ends}") if needs_gradient else (f"reshard {ends}", f"reduce {ends}")),
            operations=SHOWN,
        )
        reduced = [str(e) for e in backward if e.operation is Operation.REDUCE]
        assert reduced == ["reduce layers.2", "reduce layers.1", f"reduce {ends}"]


@pytest.mark.behaviour("A-09", "A-01")
@on_ranks(2)
def test_the_modules_of_a_list_share_one_state_and_invalid_lists_are_refused() -> None:
    model: Any = shard_nested_modules_together(seeded(Towers)())
    listed = [model.left, model.left.layers[1], model.right]
    assert len({state_of(each) for each in listed}) == 1
    assert all(isinstance(each, FSDPModule) for each in listed)
    assert state_of(model.left).modules == (model.left, model.right)
    assert find_state(model.left.layers[0]) is None
    assert len(state_of(model.left).group.parameters) == 6
    linears = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert fully_shard(linears) is linears
    with pytest.raises(ConfigurationError, match="empty list"):
        fully_shard([])
    fresh = nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match="same module twice"):
        fully_shard([fresh, fresh])
    with pytest.raises(ConfigurationError, match="applied to this Linear already"):
        fully_shard([fresh, linears[0]])
    with pytest.raises(ConfigurationError, match="or a list of them, not str"):
        fully_shard([fresh, "model"])  # type: ignore[type-var]
    assert type(fresh) is nn.Linear  # unchanged by the failed calls
    assert not isinstance(fresh.weight, DTensor)
