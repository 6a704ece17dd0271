"""DTensor placements of a sharded parameter on its data-parallel mesh."""

from __future__ import annotations

from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

__all__ = ["data_parallel_placements"]


def data_parallel_placements(mesh_ndim: int, dim: int) -> tuple[Placement, ...]:
    """``(Shard(dim),)`` on a 1-D mesh, ``(Replicate(), Shard(dim))`` on a 2-D one: the last mesh axis shards."""
    return (*(Replicate() for _ in range(mesh_ndim - 1)), Shard(dim))
