"""Checks torch's unmodified pipelining: stages that this library or torch's FSDP2 shards train equally.

The tests use two pipeline ranks times two data-parallel ranks. Stages reduce no gradients until the last microbatch.
The pipeline schedule then starts the reductions through private attributes of torch's FSDP state.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as peer
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.testing import assert_close

import composable_fsdp as ours
from composable_fsdp import trace
from tests.helpers.models import seeded
from tests.helpers.run_ranks import run_ranks

pytestmark = pytest.mark.behaviour("I-01", "I-02")

WIDTH = 6
STEPS = 3
MICROBATCHES = 4
SCHEDULES: dict[str, type[PipelineScheduleSingle] | type[PipelineScheduleMulti]] = {
    "1F1B": Schedule1F1B,
    "GPipe": ScheduleGPipe,
    "interleaved 1F1B": ScheduleInterleaved1F1B,
    "interleaved zero bubble": ScheduleInterleavedZeroBubble,
}

Shard = Callable[..., Any]


class Block(nn.Module):
    """A block with odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


def chain() -> nn.Module:
    return nn.Sequential(*[Block() for _ in range(8)])


def batch_of(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    x, target = torch.randn(2, 2 * MICROBATCHES, WIDTH, generator=generator)
    return x, target


def stages_of(model: Any, shard: Shard, mesh: DeviceMesh, per_rank: int, reshard: bool | None) -> list[nn.Sequential]:
    """Return this rank's stages with sharded blocks. Rank 0 of 2 has the first and third of four stages."""
    count = 2 * per_rank
    size = len(model) // count
    stages = []
    for index in range(mesh["pp"].get_local_rank(), count, 2):
        stage = nn.Sequential(*model[index * size : (index + 1) * size])
        for block in stage:
            shard(block, mesh=mesh["dp"], reshard_after_forward=reshard)
        stages.append(shard(stage, mesh=mesh["dp"], reshard_after_forward=reshard))
    return stages


def train(
    shard: Shard, schedule: str, mesh: DeviceMesh, *, reshard: bool | None = False
) -> tuple[list[float], list[torch.Tensor]]:
    """Train and return the losses (on the rank of the last stage) and the parameters of this rank's stages."""
    kind = SCHEDULES[schedule]
    per_rank = 2 if issubclass(kind, PipelineScheduleMulti) else 1
    modules = stages_of(seeded(chain)(), shard, mesh, per_rank, reshard)
    pp = mesh["pp"]
    stages = [
        PipelineStage(module, pp.get_local_rank() + 2 * i, 2 * per_rank, torch.device("cpu"), group=pp.get_group())
        for i, module in enumerate(modules)
    ]
    run: Any = kind(stages if per_rank > 1 else stages[0], MICROBATCHES, loss_fn=nn.functional.mse_loss)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=1e-2, foreach=False)
    losses: list[float] = []
    for step in range(STEPS):
        x, target = batch_of(step, mesh["dp"].get_local_rank())
        of_step: list[torch.Tensor] = []
        run.step(*([x] if pp.get_local_rank() == 0 else []), target=target, losses=of_step)
        losses += [loss.item() for loss in of_step]
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.full_tensor() for module in modules for p in module.parameters()]  # type: ignore[attr-defined]


def compare_with_torch(schedule: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    with trace.Recorder() as recorder:
        losses, parameters = train(ours.fully_shard, schedule, mesh)
    expected_losses, expected = train(peer.fully_shard, schedule, mesh)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert len(losses) == (STEPS * MICROBATCHES if mesh["pp"].get_local_rank() == 1 else 0)
    assert_close(parameters, expected)
    reductions = [str(event) for event in recorder if event.operation is trace.Operation.REDUCE]
    assert len(reductions) == STEPS * 4, "each of 4 blocks reduces once per step, not once per microbatch"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_of_sharded_stages_trains_as_with_torch(schedule: str) -> None:
    run_ranks(compare_with_torch, 4, schedule)


def check_lost_gradient_warning() -> None:
    """Check that groups that lost the gradients of all microbatches warn, here the groups of the last stage."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(ours.fully_shard, "interleaved zero bubble", mesh, reshard=None)
    if mesh["pp"].get_local_rank() == 1:
        texts = [str(each.message) for each in caught if "left no gradient" in str(each.message)]
        assert texts
        assert texts[0].startswith(("backward went through '0', but left", "backward went through '1', but left")), (
            texts
        )
        assert texts[0].endswith("shard their stages with reshard_after_forward=False.")


def test_weights_that_a_schedule_does_not_find_are_reported() -> None:
    run_ranks(check_lost_gradient_warning, 4)


def check_kept_and_freed(schedule: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    kept, freed = (train(ours.fully_shard, schedule, mesh, reshard=reshard) for reshard in (False, True))
    assert kept[0] == freed[0]
    assert_close(kept[1], freed[1], rtol=0, atol=0)


@pytest.mark.parametrize("schedule", ["1F1B", "interleaved 1F1B"])
def test_stages_may_be_freed_after_forward(schedule: str) -> None:
    run_ranks(check_kept_and_freed, 4, schedule)
