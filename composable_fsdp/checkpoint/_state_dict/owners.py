"""The ranks that hold parts of the same tensors, and what they tell each other before any of them writes."""

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
    """The same on two ranks if ``value`` reads the same, in few bytes."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


@dataclass(frozen=True)
class OwnerRanks:
    """All ranks of ``mesh``: the largest on which a tensor of the model lies. ``None``: this rank alone.

    A tensor's *source* is the rank that speaks for it where one rank has the values: the first of ``mesh``, which is
    rank 0 in most jobs. Only tensors on a mesh in ``apart`` are other ones on other ranks, and so have a source there:
    the first of that mesh.
    """

    mesh: DeviceMesh | None
    apart: frozenset[DeviceMesh] = frozenset()

    @staticmethod
    def of(tensors: Iterable[tuple[object, ParameterSharding | None]], *, all_ranks: bool = False) -> OwnerRanks:
        """Those of ``tensors``, which come with how ``fully_shard`` cut them.

        Parameters with fewer data-parallel ranks than others, such as experts, are apart.

        Args:
            all_ranks: where all are plain, the default process group, if there is one.
        """
        placed = [(v.device_mesh, sharding) for v, sharding in tensors if isinstance(v, DTensor)]
        meshes = dict.fromkeys(mesh for mesh, _ in placed)
        if not meshes and all_ranks and dist.is_initialized():
            return OwnerRanks(default_mesh())
        num_ranks = {mesh: sharding.axes.num_ranks for mesh, sharding in placed if sharding is not None}
        apart = frozenset(mesh for mesh, ranks in num_ranks.items() if ranks < max(num_ranks.values()))
        return OwnerRanks(max(meshes, key=lambda mesh: mesh.size(), default=None), apart)

    @property
    def rank(self) -> int:
        return 0 if self.mesh is None else dist.get_rank()

    def source_of(self, value: object = None) -> int:
        """The global rank that speaks for ``value``."""
        mesh = self._mesh_of(value)
        return self.rank if mesh is None else int(mesh.mesh.flatten()[0])

    def is_source_of(self, value: object = None) -> bool:
        """Whether this rank speaks for ``value``."""
        return self.source_of(value) == self.rank

    def exchange(self, value: T) -> dict[int, T]:
        """What all ranks passed, by global rank. Collective; for small values, which are pickled."""
        found = {self.rank: value}
        for axis in range(self.mesh.ndim if self.mesh is not None else 0):
            assert self.mesh is not None
            received: list[Any] = [None] * self.mesh.size(axis)
            dist.all_gather_object(received, found, self.mesh.get_group(axis))
            found = {rank: each for part in received for rank, each in part.items()}
        return dict(sorted(found.items()))

    def send(self, like: torch.Tensor, value: torch.Tensor | None, dtype: torch.dtype, shape: Sequence[int]) -> Any:
        """``value`` of the source of ``like``, whole, of ``dtype`` and ``shape``, on all that hold it. Collective."""
        mesh = self._mesh_of(like)
        if mesh is None:
            return value
        if self.is_source_of(like):
            assert value is not None
            whole = value.detach().to(mesh.device_type, dtype)
        else:
            whole = torch.empty(tuple(shape), dtype=dtype, device=mesh.device_type)
        broadcast_([whole], mesh)
        return whole

    def _mesh_of(self, value: object) -> DeviceMesh | None:
        is_apart = isinstance(value, DTensor) and value.device_mesh in self.apart
        return cast(DTensor, value).device_mesh if is_apart else self.mesh
