"""Test a thousand simulated ranks in one process that all-gather and reduce."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from composable_fsdp import MixedPrecisionPolicy
from tests._internals import (
    CommStreams,
    DataParallelAxes,
    ParameterSource,
    ParameterState,
    ParamGroup,
    StreamLauncher,
    reduce_together,
    shard_over_axes,
)
from tests.helpers.counted_collectives import counted_collectives
from tests.helpers.fake_world import FakeWorld

# name: (shape, sharded dim). Even and uneven sizes, empty shards on either dim, and an empty tensor.
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
    """Provide a mesh of ``size`` ranks as rank 0 sees it. Its process group sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,))
    finally:
        dist.destroy_process_group()


def make_originals() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(-9, 10, shape, generator=generator).float() for name, (shape, _) in SHAPES.items()}


def build_groups_of_all_ranks(mesh: DeviceMesh, world: FakeWorld, precision: MixedPrecisionPolicy) -> list[ParamGroup]:
    groups = []
    for rank in range(world.size):
        owner, sources = nn.Module(), []
        axes = DataParallelAxes(mesh, torch.device("cpu"), world.communicator(rank))
        for name, value in make_originals().items():
            parameter = nn.Parameter(value)
            owner.register_parameter(name, parameter)
            sharding = shard_over_axes(parameter, axes, SHAPES[name][1])
            sources.append(ParameterSource(name, parameter, ((owner, name),), sharding, precision=precision))
        groups.append(ParamGroup("group", sources, axes))
    return groups


@pytest.mark.behaviour("C-01", "A-04")
@pytest.mark.parametrize(
    ("size", "zero_copy_min_bytes", "dtype"),
    [(8, 0, None), (8, 100, None), (8, 1 << 30, None), (8, 100, torch.bfloat16), (1000, 100, None)],
)
def test_all_ranks_gather_what_was_sharded_and_reduce_to_the_mean(
    size: int, zero_copy_min_bytes: int, dtype: torch.dtype | None
) -> None:
    precision = MixedPrecisionPolicy(param_dtype=dtype)
    world = FakeWorld(size, zero_copy_min_bytes=zero_copy_min_bytes)
    streams = CommStreams(torch.device("cpu"))
    values = make_originals()
    with simulated_mesh(size) as mesh, counted_collectives() as counts:
        groups = build_groups_of_all_ranks(mesh, world, precision)
        for _ in range(2):
            for group in groups:
                StreamLauncher(streams).gather((group,), "")
            for group in groups:
                group.wait()
                for parameter in group.parameters:
                    assert torch.equal(parameter.unsharded.float(), values[parameter.name])
            # Rank r has gradients of (r + 1) times the values. The second round adds to those of the first round.
            for rank, group in enumerate(groups):
                products = [(p.unsharded.float() * values[p.name]).sum() for p in group.parameters]
                torch.stack(products).sum().mul(rank + 1).backward()
                group.reshard()
                assert group.parameter_state is ParameterState.SHARDED
            launches = [reduce_together((group,), streams) for group in groups]
            reductions = [launch for launch in launches if launch is not None]
            assert len(reductions) == size
            for reduction in reductions:
                reduction.run()
            for reduction in reductions:
                reduction.complete()
        for name, value in values.items():
            dim = SHAPES[name][1]
            position = list(values).index(name)
            gradients = [group.parameters[position].sharded.grad for group in groups]
            shards = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
            assert len(shards) == size
            longest = -(-value.shape[dim] // size)
            assert max(shard.shape[dim] for shard in shards) == longest
            rtol = 0.0 if precision.param_dtype is None else 0.02  # the precision of bf16
            torch.testing.assert_close(torch.cat(shards, dim), value * (size + 1), rtol=rtol, atol=0.0)
    # One launch per round and rank, for any number of zero-copy parameters.
    assert counts["all_gather"] == counts["reduce_scatter"] == 2 * size
