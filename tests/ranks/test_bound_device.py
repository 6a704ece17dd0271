"""Jobs with a device that is bound to the default group: ``new_group`` is a collective of all ranks there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp import fully_shard
from tests.helpers.run_ranks import on_ranks

DEVICE = torch.device("cpu", 0)
c10d: Any = dist.distributed_c10d
no_copies = SimpleNamespace(deepcopy=lambda options: options)
"""Options of gloo cannot be copied."""


@contextmanager
def bound_to_device(is_torchcomms: bool) -> Iterator[list[str]]:
    """Bind a device to the default group, over gloo. Yield the collectives of the whole job that this rank calls."""
    world: Any = dist.group.WORLD
    calls: list[str] = []
    new_group, split_group = dist.new_group, c10d.split_group

    def noting_new_group(*args: Any, **kwargs: Any) -> Any:
        if is_torchcomms and kwargs.get("use_local_synchronization"):
            raise NotImplementedError("new_group under torchcomms does not support use_local_synchronization=True")
        calls.append("new_group")
        with bound_to(world, None):  # gloo would wait for the members only
            return new_group(*args, **kwargs)

    def noting_split_group(parent_pg: Any, *args: Any, **kwargs: Any) -> Any:
        if parent_pg is None or parent_pg is world:
            calls.append("split_group")
        with bound_to(world, DEVICE):  # as torch demands without torchcomms
            return split_group(parent_pg, *args, backend="cpu:gloo", **kwargs)  # gloo splits one backend at a time

    with ExitStack() as stack:
        for owner, name, value in (
            (torch.accelerator, "is_available", lambda: True),
            (torch.accelerator, "current_accelerator", lambda *_: torch.device("cpu")),
            *([(c10d, "copy", no_copies)] if hasattr(c10d, "copy") else []),  # torch 2.14 makes none
            (dist, "new_group", noting_new_group),
            (dist, "split_group", noting_split_group),
            (dist.config, "use_torchcomms", is_torchcomms),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(bound_to(world, None if is_torchcomms else DEVICE))
        yield calls


@contextmanager
def bound_to(group: Any, device: torch.device | None) -> Iterator[None]:
    before, group.bound_device_id = group.bound_device_id, device
    try:
        yield
    finally:
        group.bound_device_id = before


def train_on_some_ranks(is_torchcomms: bool) -> list[str]:
    """Train on all ranks but the last, which only makes the process group of their mesh too."""
    ranks = list(range(dist.get_world_size() - 1))
    with bound_to_device(is_torchcomms) as calls:
        group = cast(Any, dist).split_group(None, [ranks])
        if dist.get_rank() in ranks:
            torch.manual_seed(0)
            model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            full = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            full.load_state_dict(model.state_dict())
            mesh = DeviceMesh.from_group(group, "cpu")
            fully_shard(model[0], mesh=mesh, reshard_after_forward=2)
            fully_shard(model, mesh=mesh)
            model.set_separate_reduce_scatter_group()
            for each in (model, full):
                each(torch.ones(2, 8)).square().mean().backward()
            for parameter, expected in zip(model.parameters(), full.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)
    return calls


@on_ranks(5)
def test_ranks_without_the_model_take_part_in_none_of_its_process_groups() -> None:
    calls = [train_on_some_ranks(is_torchcomms=False), train_on_some_ranks(is_torchcomms=True)]
    assert calls == [["split_group"]] * 2, "a rank that calls more than the last one waits for it"
