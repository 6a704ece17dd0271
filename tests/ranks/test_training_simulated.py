"""A thousand ranks in one process: the groups of all of them gather and reduce over a simulated world."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from composable_fsdp import MixedPrecisionPolicy, OffloadPolicy
from composable_fsdp.lifecycle import ParameterState
from composable_fsdp.memory.lanes import Lanes
from composable_fsdp.mesh import DataParallelAxes
from composable_fsdp.runtime.group import ParameterGroup
from composable_fsdp.runtime.parameter import ParameterSource
from composable_fsdp.testing import FakeWorld

# name: shape, dim that is cut. Even and uneven, with empty shards on either dim, and nothing at all.
SHAPES = {
    "even": ((8, 6), 0),
    "long": ((1003, 2), 0),
    "short": ((3, 5), 0),
    "columns": ((2, 1005), 1),
    "few columns": ((4, 3), 1),
    "none": ((0, 4), 0),
}


@contextmanager
def simulated_mesh(size: int) -> Iterator[DeviceMesh]:
    """A mesh of ``size`` ranks as the first of them sees it; nothing can be sent over it."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,))
    finally:
        dist.destroy_process_group()


def originals() -> dict[str, torch.Tensor]:
    """Small integers, so that sums are exact however they are formed."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(-9, 10, shape, generator=generator).float() for name, (shape, _) in SHAPES.items()}


def groups_of_all_ranks(mesh: DeviceMesh, world: FakeWorld, precision: MixedPrecisionPolicy) -> list[ParameterGroup]:
    groups = []
    for rank in range(world.size):
        owner, sources = nn.Module(), []
        for name, value in originals().items():
            parameter = nn.Parameter(value)
            owner.register_parameter(name, parameter)
            sources.append(ParameterSource(name, parameter, ((owner, name),), SHAPES[name][1]))
        axes = DataParallelAxes(mesh, torch.device("cpu"), world.communicator(rank))
        groups.append(ParameterGroup("group", sources, axes, precision, OffloadPolicy()))
    return groups


@pytest.mark.behaviour("C-01", "A-04")
@pytest.mark.parametrize("precision", [MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)])
@pytest.mark.parametrize(("size", "direct_bytes"), [(8, 0), (8, 100), (8, 1 << 30), (1000, 100)])
def test_all_ranks_gather_what_was_sharded_and_reduce_to_the_mean(
    size: int, direct_bytes: int, precision: MixedPrecisionPolicy
) -> None:
    world, lanes = FakeWorld(size, direct_bytes=direct_bytes), Lanes(torch.device("cpu"))
    values = originals()
    with simulated_mesh(size) as mesh:
        groups = groups_of_all_ranks(mesh, world, precision)
        for _ in range(2):
            for group in groups:
                group.unshard(lanes)
            for group in groups:
                group.wait()
                for parameter in group.parameters:
                    assert torch.equal(parameter.unsharded.float(), values[parameter.name])
            # Rank r has r + 1 times the values as gradients; in the second round they come on top of those of the first.
            for rank, group in enumerate(groups):
                scale = (rank + 1) * 2.0 / (size + 1)
                sum((p.unsharded.float() * values[p.name] * scale).sum() for p in group.parameters).backward()
                group.reshard()
                assert group.parameter_state is ParameterState.SHARDED
            pending = [reduction for group in groups if (reduction := group.reduce(lanes)) is not None]
            assert len(pending) == size
            for reduction in pending:
                reduction.complete()
        for name, value in values.items():
            dim = SHAPES[name][1]
            position = list(values).index(name)
            shards = [group.parameters[position].sharded.grad.to_local() for group in groups]
            longest = -(-value.shape[dim] // size)
            assert max(shard.shape[dim] for shard in shards) == longest
            loose = 1e-5 if precision.param_dtype is None else 2e-2
            torch.testing.assert_close(torch.cat(shards, dim), 2 * value, rtol=loose, atol=loose)
    # One message carries all that is packed, and each large parameter that is cut on dim 0 goes by itself.
    assert world.launches["all_gather"] == world.launches["reduce_scatter"] == 2
