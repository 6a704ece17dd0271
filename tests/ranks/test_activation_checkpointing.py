"""Both kinds of activation checkpointing, around and inside sharded modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from composable_fsdp import fully_shard
from composable_fsdp.trace import Operation, Recorder
from tests.helpers.assert_trace import assert_trace
from tests.helpers.models import TASKS, Chain, seeded, shard_layers
from tests.helpers.run_ranks import on_ranks
from tests.helpers.transports import SOCKETS


class CheckpointedChain(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False))
        return x


@pytest.mark.behaviour("C-13")
@on_ranks(2, environment=SOCKETS)
def test_recomputation_and_backward_share_one_gather() -> None:
    task, rank = TASKS["chain"], dist.get_rank()
    model = shard_layers(CheckpointedChain(depth=3), fully_shard, fuses=False)
    for step in range(2):
        loss = task.loss(model, task.batch_of(step, rank))
        with Recorder() as backward:
            loss.backward()
        # Each group is gathered once for recomputation and backward together.
        operations = (Operation.UNSHARD, Operation.WAIT, Operation.RESHARD, Operation.REDUCE)
        assert_trace(
            (event for event in backward if event.group != "root"),
            "unshard layers.2; unshard layers.1; wait layers.2; reduce layers.2; reshard layers.2; wait layers.1",
            "unshard layers.0; reduce layers.1; reshard layers.1; wait layers.0; reshard layers.0; reduce layers.0",
            operations=operations,
        )


class UsedThrice(nn.Module):
    """Two layers, the second directly and in two reentrant checkpoints: it gets gradients in three autograd runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.run_second, self.first(x), use_reentrant=True)
        x = checkpoint(self.run_second, x, use_reentrant=True)
        return self.run_second(x)

    def run_second(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x.tanh())


def gradients_with(max_fused_bytes: int) -> dict[str, torch.Tensor]:
    model: Any = seeded(UsedThrice)()
    fully_shard(model.first)
    fully_shard(model.second)
    fully_shard(model)
    model.set_schedule(max_fused_bytes=max_fused_bytes)
    for step in range(2):  # the second knows the order, and fuses
        model.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(x).square().mean().backward()
    return {name: parameter.grad.to_local() for name, parameter in model.named_parameters()}


@pytest.mark.behaviour("C-13")
@on_ranks(2, environment=SOCKETS)
def test_gradients_of_nested_autograd_runs_do_not_depend_on_fusions() -> None:
    fused, alone = gradients_with(1 << 20), gradients_with(0)
    for name, gradient in fused.items():
        assert torch.equal(gradient, alone[name]), name
