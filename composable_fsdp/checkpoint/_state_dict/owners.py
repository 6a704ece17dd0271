"""The ranks that own shards of the same tensors, and the exchange between them before any of them writes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable_fsdp._comm.broadcast import broadcast_
from composable_fsdp._sharding.mesh import default_mesh
from composable_fsdp._sharding.param_sharding import ParameterSharding

__all__ = ["OwnerRanks", "digest"]

T = TypeVar("T")


def digest(value: object) -> str:
    """Return a short digest of the ``repr`` of ``value``, to compare it between ranks."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


@dataclass(frozen=True)
class OwnerRanks:
    """All ranks of ``mesh``, the largest mesh with a tensor of the model. ``None``: this rank only.

    The *source* of a tensor is the rank that provides its values if only one rank has them: the first rank of ``mesh``,
    which is rank 0 in most jobs. Parameters on ``smaller_meshes`` have fewer data-parallel ranks than others, such as
    experts, and are different on other ranks. Their source is the first rank of their own mesh.

    With ``only_sources`` a tensor's source has its values in a state dict and other ranks have not. Otherwise each rank
    has its own.
    """

    mesh: DeviceMesh | None
    smaller_meshes: frozenset[DeviceMesh] = frozenset()
    only_sources: bool = False

    @staticmethod
    def of(tensors: Iterable[tuple[object, ParameterSharding | None]], *, only_sources: bool = False) -> OwnerRanks:
        """Find the owner ranks of ``tensors``, given with their sharding by ``fully_shard``.

        With ``only_sources``, if no tensor is a DTensor, they are the ranks of the default process group, if any.
        """
        placed = [(v.device_mesh, sharding) for v, sharding in tensors if isinstance(v, DTensor)]
        meshes = dict.fromkeys(mesh for mesh, _ in placed)
        if not meshes and only_sources and dist.is_initialized():
            return OwnerRanks(default_mesh(), only_sources=True)
        num_ranks = {mesh: sharding.axes.num_ranks for mesh, sharding in placed if sharding is not None}
        smaller_meshes = frozenset(mesh for mesh, ranks in num_ranks.items() if ranks < max(num_ranks.values()))
        return OwnerRanks(max(meshes, key=lambda mesh: mesh.size(), default=None), smaller_meshes, only_sources)

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return 0 if self.mesh is None else dist.get_rank()

    def is_source_of(self, value: object = None) -> bool:
        """Return whether this rank is the source of ``value``."""
        return self._source_of(value) == self.rank

    def provider_of(self, value: object = None) -> int:
        """Return the global rank whose state dict has ``value`` for this one, by default all other values."""
        return self._source_of(value) if self.only_sources else self.rank

    def provides(self, value: object = None) -> bool:
        """Return whether this rank has ``value`` in its state dict."""
        return self.provider_of(value) == self.rank

    def _source_of(self, value: object) -> int:
        mesh = self._mesh_of(value)
        return self.rank if mesh is None else int(mesh.mesh.flatten()[0])

    def exchange(self, value: T) -> dict[int, T]:
        """Gather the values of all ranks, by global rank. Collective; for small values, which are pickled."""
        found = {self.rank: value}
        for axis in range(self.mesh.ndim if self.mesh is not None else 0):
            assert self.mesh is not None
            received: list[Any] = [None] * self.mesh.size(axis)
            dist.all_gather_object(received, found, self.mesh.get_group(axis))
            found = {rank: each for part in received for rank, each in part.items()}
        return dict(sorted(found.items()))

    def send(self, like: torch.Tensor, value: torch.Tensor | None, dtype: torch.dtype, shape: Sequence[int]) -> Any:
        """Broadcast the source's full ``value`` for ``like``, with ``dtype`` and ``shape``. Collective on the mesh."""
        mesh = self._mesh_of(like)
        if mesh is None:
            return value
        if self.is_source_of(like):
            assert value is not None
            full = value.detach().to(mesh.device_type, dtype)
        else:
            full = torch.empty(tuple(shape), dtype=dtype, device=mesh.device_type)
        broadcast_([full], mesh)
        return full

    def _mesh_of(self, value: object) -> DeviceMesh | None:
        is_smaller = isinstance(value, DTensor) and value.device_mesh in self.smaller_meshes
        return cast(DTensor, value).device_mesh if is_smaller else self.mesh
