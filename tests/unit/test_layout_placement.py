"""Placements, and that the cut of ``ShardLayout`` is DTensor's own. No rank talks to another one here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from composable_fsdp.layout.pack import take_shard
from composable_fsdp.layout.placement import data_parallel_placements
from composable_fsdp.layout.shard import TensorShards

SHAPES = [
    ((8,), 0),
    ((7,), 0),
    ((2,), 0),
    ((0, 3), 0),
    ((5, 3), 0),
    ((3, 5), 1),
    ((2, 9, 3), 1),
    ((2, 3, 4), 2),
    ((1, 1), 1),
]
MESHES = [(1,), (2,), (4,), (6,), (1, 4), (2, 3), (3, 2)]


@contextmanager
def process_group(backend: str, rank: int, world_size: int) -> Iterator[None]:
    """A default process group of this process alone: the ``fake`` backend only pretends that there are others."""
    store = FakeStore() if backend == "fake" else dist.HashStore()
    dist.init_process_group(backend, rank=rank, world_size=world_size, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_the_last_mesh_axis_shards_and_the_others_replicate() -> None:
    assert data_parallel_placements(1, 0) == (Shard(0),)
    assert data_parallel_placements(1, 2) == (Shard(2),)
    assert data_parallel_placements(2, 1) == (Replicate(), Shard(1))


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_every_rank_owns_what_dtensor_gives_it(mesh_shape: tuple[int, ...]) -> None:
    world_size, num_shards = torch.Size(mesh_shape).numel(), mesh_shape[-1]
    for rank in range(world_size):
        with process_group("fake", rank, world_size):
            mesh = init_device_mesh("cpu", mesh_shape)
            shard_rank = mesh.get_local_rank(mesh.ndim - 1)
            for shape, dim in SHAPES:
                shards, placements = TensorShards(shape, dim, num_shards), data_parallel_placements(mesh.ndim, dim)
                local_shape, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
                owned = shards.layout.owned_by(shard_rank)
                assert local_shape == shards.shard_shape(shard_rank)
                assert offset[dim] == owned.start
                assert not any(offset[:dim])
                assert not any(offset[dim + 1 :])

                full = torch.arange(shards.numel, dtype=torch.float32).view(shape)
                expected = distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()
                piece = torch.empty(shards.padded_numel)
                take_shard(shards, full, shard_rank, piece)
                assert torch.equal(piece[: expected.numel()].view(local_shape), expected)


def test_a_dtensor_of_the_only_shard_is_the_full_tensor() -> None:
    with process_group("gloo", 0, 1):
        for mesh_shape in [(1,), (1, 1)]:
            mesh = init_device_mesh("cpu", mesh_shape)
            for shape, dim in SHAPES:
                full = torch.randn(shape)
                piece = torch.empty(full.numel())
                take_shard(TensorShards(shape, dim, 1), full, 0, piece)
                placements = data_parallel_placements(mesh.ndim, dim)
                assert torch.equal(DTensor.from_local(piece.view(shape), mesh, placements).full_tensor(), full)
