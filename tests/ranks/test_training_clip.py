"""What happens to gradients between backward and the optimizer: clipping, and scaling that skips steps."""

from __future__ import annotations

from math import inf

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp import fully_shard
from composable_fsdp.testing import run_ranks
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.training import Run, assert_equal_runs, check_parity, kept, play_task


def clip_and_compare_norms(task: str, norm_type: float, foreach: bool) -> None:
    norms: list[torch.Tensor] = []

    def clip(model: nn.Module, step: int) -> None:
        # Half of the steps are clipped.
        limit = 0.05 if step % 2 else 1e6
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type=norm_type, foreach=foreach)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients, norm_type=norm_type, foreach=foreach)
        norms.extend(value.full_tensor() if isinstance(value, DTensor) else value for value in (norm, total))

    check_parity(TASKS[task].build, play_task(task), between=clip, what=f"{task}, norm {norm_type}")
    ours, reference = norms[: len(norms) // 2], norms[len(norms) // 2 :]
    torch.testing.assert_close(ours, reference)
    everyone = [torch.empty(len(ours)) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, torch.stack(ours))
    assert all(torch.equal(norm, everyone[0]) for norm in everyone)


def clip_in_many_ways() -> None:
    # With a largest-element norm, torch itself fails on the empty shards that four ranks have of the mlp.
    for norm_type in (2.0, 1.0, inf) if dist.get_world_size() == 2 else (2.0, 1.0):
        for foreach in (True, False):
            clip_and_compare_norms("mlp", norm_type, foreach)
    clip_and_compare_norms("tied", 2.0, True)


@pytest.mark.behaviour("C-11")
@pytest.mark.parametrize("world_size", [2, 4])
def test_clipping_and_total_norm_equal_the_reference(world_size: int) -> None:
    run_ranks(clip_in_many_ways, world_size)


def train_with_a_scaler() -> None:
    """At step 2 one rank's loss is infinite, for one layer's gradient only: every rank must skip that step."""
    task, rank, world_size = TASKS["mlp"], dist.get_rank(), dist.get_world_size()

    def run(model: nn.Module, ranks: list[int]) -> tuple[Run, list[float]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        result, scales = Run(), []
        for step in range(6):
            optimizer.zero_grad()
            for r in ranks:
                loss = task.loss(model, task.batch_of(step, r))
                if rank in ranks and r == rank:
                    result.losses.append(loss.detach())
                if step == 2 and r == 1:
                    # Rows of the root's own parameter that only the last rank holds.
                    loss = loss + model.get_parameter("scale")[-1] * inf
                scaler.scale(loss / len(ranks)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        result.parameters = {name: kept(p) for name, p in model.named_parameters()}
        return result, scales

    expected, expected_scales = run(task.build(), list(range(world_size)))
    ours, scales = run(shard_layers(task.build(), fully_shard), [rank])
    assert expected_scales == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0, 2048.0]
    assert scales == expected_scales
    assert_equal_runs(ours, expected)


@pytest.mark.behaviour("C-11")
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_skips_the_step_in_which_one_had_an_infinite_gradient(world_size: int) -> None:
    run_ranks(train_with_a_scaler, world_size)
