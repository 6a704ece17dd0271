"""DTensor placements of a sharded parameter: on its data-parallel axes and on the axes that sharded it before."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

__all__ = ["cuts", "data_parallel_placements", "shard_within"]


def cuts(placement: Placement, dim: int) -> bool:
    """Return True if ``placement`` shards tensor dim ``dim``. In some torch releases a strided shard is not a
    ``Shard``.
    """
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim


def shard_within(dim: int, later: Sequence[Placement], later_sizes: Sequence[int]) -> Placement:
    """Return the placement of a mesh axis that shards ``dim`` of a tensor already sharded by the axes ``later`` to its
    right.

    DTensor reads a mesh from left to right, so a plain ``Shard`` means that the left axis sharded first. If an axis to
    the right was first, the shards interleave. A strided shard records into how many parts the dim was split by then.
    """
    split = prod(size for placement, size in zip(later, later_sizes, strict=True) if cuts(placement, dim))
    return Shard(dim) if split == 1 else _StridedShard(dim, split_factor=split)


def data_parallel_placements(
    mesh_ndim: int, dim: int, inner: Sequence[Placement] = (), inner_sizes: Sequence[int] = ()
) -> tuple[Placement, ...]:
    """Return the placements on a data-parallel mesh followed by the ``inner`` mesh of an already distributed parameter.

    Args:
        mesh_ndim: 1 for ``(shard,)``, 2 for ``(replicate, shard)``: the last data-parallel axis shards.
        dim: the tensor dim that the data-parallel axis shards.
        inner: placements on the other mesh, none for a plain tensor.
        inner_sizes: ranks along each axis of the other mesh.
    """
    replicated = (Replicate() for _ in range(mesh_ndim - 1))
    return (*replicated, shard_within(dim, inner, inner_sizes), *inner)
