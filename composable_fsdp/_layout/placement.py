"""DTensor placements of a sharded parameter: its data-parallel axes, and those that cut it before."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

__all__ = ["cuts", "data_parallel_placements", "shard_within"]


def cuts(placement: Placement, dim: int) -> bool:
    """Whether ``placement`` cuts tensor dim ``dim``. A strided shard is no ``Shard`` in some releases of torch."""
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim


def shard_within(dim: int, later: Sequence[Placement], later_sizes: Sequence[int]) -> Placement:
    """How a mesh axis cuts ``dim`` of a tensor that the mesh axes ``later``, to its right, have cut already.

    DTensor reads a mesh from left to right, so a plain ``Shard`` there would mean that the left axis cut first. Where
    an axis to the right came first, the pieces interleave: a strided shard says in how many parts the dim was by then.
    """
    split = prod(size for placement, size in zip(later, later_sizes, strict=True) if cuts(placement, dim))
    return Shard(dim) if split == 1 else _StridedShard(dim, split_factor=split)


def data_parallel_placements(
    mesh_ndim: int, dim: int, inner: Sequence[Placement] = (), inner_sizes: Sequence[int] = ()
) -> tuple[Placement, ...]:
    """Placements on a data-parallel mesh joined with the ``inner`` mesh on which the parameter was placed before.

    Args:
        mesh_ndim: 1 for ``(shard,)``, 2 for ``(replicate, shard)``: the last data-parallel axis shards.
        dim: the tensor dim that it cuts.
        inner: placements on the other mesh, none for a plain tensor.
        inner_sizes: ranks along each of its axes.
    """
    replicated = (Replicate() for _ in range(mesh_ndim - 1))
    return (*replicated, shard_within(dim, inner, inner_sizes), *inner)
