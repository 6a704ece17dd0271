"""CPU offload on a CPU mesh changes nothing. ``tests/gpu`` tests it on accelerators."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed import fsdp as peer

from composable_fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from composable_fsdp.testing import run_ranks
from composable_fsdp.trace import Recorder
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.training import OPTIMIZERS, assert_equal_runs, play_task, train


def compare_offload_policies() -> None:
    rank = dist.get_rank()
    policies = (OffloadPolicy(), CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False), peer.CPUOffloadPolicy())
    runs, traces = [], []
    for policy in policies:
        model = shard_layers(TASKS["tied"].build(), fully_shard, offload_policy=policy)
        with Recorder() as recorder:
            runs.append(train(model, play_task("tied"), OPTIMIZERS["adamw-foreach"], ranks=[rank], watched=rank))
        traces.append([(str(event), event.bytes) for event in recorder])
        for parameter in model.parameters():
            assert parameter.device.type == "cpu"
            assert parameter.grad is not None
            assert not parameter.grad.to_local().is_pinned()  # type: ignore[attr-defined]
    for run, trace in zip(runs[1:], traces[1:], strict=True):
        assert_equal_runs(run, runs[0], exact=True)
        assert trace == traces[0]


@pytest.mark.behaviour("D-02")
def test_cpu_offload_on_a_cpu_mesh_changes_nothing() -> None:
    run_ranks(compare_offload_policies, 2)
