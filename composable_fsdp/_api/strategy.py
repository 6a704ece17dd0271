"""The sharding strategies of torch's FSDP1, as a mesh and a value of ``reshard_after_forward``."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_fsdp._core.full_mesh import default_mesh
from composable_fsdp._core.mesh import known_meshes
from composable_fsdp.errors import ConfigurationError, MeshError
from composable_fsdp.policies import DataParallelMeshDims

__all__ = ["ShardingStrategy", "StrategyName", "resolve_strategy"]

StrategyName = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]


class ShardingStrategy(Enum):
    """A sharding strategy of torch's FSDP1: the sharded tensors, the ranks, and the time when parameters are freed."""

    FULL_SHARD = "FULL_SHARD"
    """Shards parameters, gradients and optimizer state over all ranks; frees parameters after forward."""
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    """Like ``FULL_SHARD``, but keeps parameters unsharded from forward until after backward."""
    NO_SHARD = "NO_SHARD"
    """Shards nothing: replicates over all ranks and averages gradients."""
    HYBRID_SHARD = "HYBRID_SHARD"
    """``FULL_SHARD`` within a host, replicated over hosts."""
    HYBRID_SHARD_ZERO2 = "HYBRID_SHARD_ZERO2"
    """``SHARD_GRAD_OP`` within a host, replicated over hosts."""


@dataclass(frozen=True)
class _MeshKind:
    """The mesh that a strategy needs.

    Args:
        needs: description, to follow the strategy's name.
        shape: source code of the shape for ``n`` ranks.
        names: source code of the dim names.
        serves: predicate on the numbers of replicas and shards; ``None`` if the mesh has no such axis.
    """

    needs: str
    shape: str
    names: str
    serves: Callable[[int | None, int | None], bool]


_SHARDED = _MeshKind("shards over all ranks,", "({n},)", "('shard',)", lambda replicas, _: replicas in (None, 1))
_REPLICATED = _MeshKind(
    "replicates over all ranks,", "({n}, 1)", "('replicate', 'shard')", lambda _, shards: shards in (None, 1)
)
_HYBRID = _MeshKind(
    "needs a 2-d mesh, (replicate, shard),",
    "(hosts, {n} // hosts)",
    "('replicate', 'shard')",
    lambda replicas, shards: None not in (replicas, shards) or (replicas or 1) * (shards or 1) == 1,
)

_MEANING = {
    ShardingStrategy.FULL_SHARD: (_SHARDED, True),
    ShardingStrategy.SHARD_GRAD_OP: (_SHARDED, False),
    ShardingStrategy.NO_SHARD: (_REPLICATED, False),
    ShardingStrategy.HYBRID_SHARD: (_HYBRID, True),
    ShardingStrategy.HYBRID_SHARD_ZERO2: (_HYBRID, False),
}
"""The mesh of each strategy, and whether it frees parameters after forward."""


def resolve_strategy(
    strategy: ShardingStrategy,
    mesh: DeviceMesh | None,
    dims: DataParallelMeshDims | None,
    reshard_after_forward: bool | int | None,
) -> tuple[DeviceMesh, bool | int | None]:
    """Return the mesh of a strategy, given and checked or made, and its ``reshard_after_forward``.

    Every rank must call it.

    Raises:
        ConfigurationError: ``reshard_after_forward`` contradicts the strategy.
        MeshError: the mesh does not fit the strategy, or none can be made.
    """
    kind, frees = _MEANING[strategy]
    if reshard_after_forward is None:
        reshard_after_forward = None if frees else False
    # True frees, and so does an int that keeps a slice. 1 == True, but one rank per slice keeps all.
    elif (reshard_after_forward is True or reshard_after_forward not in (0, 1)) != frees:
        does, would = ("frees", "keeps") if frees else ("keeps", "frees")
        raise ConfigurationError(
            f"strategy={strategy.name} {does} parameters after forward, but reshard_after_forward="
            f"{reshard_after_forward} {would} them. Leave one of the two out."
        )
    given: object = mesh
    if mesh is None:
        mesh = _mesh_for(strategy, kind)
    elif isinstance(given, DeviceMesh) and (dims is not None or mesh.ndim in (1, 2)):  # fully_shard rejects the others
        replicas, shards = _axis_sizes(mesh, dims)
        if not kind.serves(replicas, shards):
            raise MeshError(
                f"strategy={strategy.name} {kind.needs} but the mesh given replicates over {replicas or 1} and shards "
                f"over {shards or 1} ranks. {_how_to_make(kind, mesh.device_type, (replicas or 1) * (shards or 1))}"
            )
    return mesh, reshard_after_forward


def _axis_sizes(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> tuple[int | None, int | None]:
    """Return the numbers of replicas and shards, each ``None`` if the mesh has no such axis."""
    if dims is None:
        return (None, mesh.size(0)) if mesh.ndim == 1 else (mesh.size(0), mesh.size(1))
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    replicas, shards = (
        prod(sizes.get(name, 1) for name in names) if names else None
        for names in (dims.replicate_names, dims.shard_names)
    )
    return replicas, shards


def _how_to_make(kind: _MeshKind, device_type: str, ranks: int) -> str:
    return (
        f"Make one with init_device_mesh({device_type!r}, {kind.shape.format(n=ranks)}, mesh_dim_names={kind.names})."
    )


def _mesh_for(strategy: ShardingStrategy, kind: _MeshKind) -> DeviceMesh:
    """Return the mesh for ``kind`` over the default process group. It is the same object for all callers."""
    flat = default_mesh()
    if kind is _SHARDED:
        return flat
    shards = _ranks_per_host(strategy, flat) if kind is _HYBRID else 1
    known = known_meshes()
    if shards not in known or not _has_groups(known[shards]):
        known[shards] = init_device_mesh(flat.device_type, (flat.size() // shards, shards))
    return known[shards]


def _has_groups(mesh: DeviceMesh) -> bool:
    """Return whether the process groups of the mesh still exist."""
    try:
        mesh.get_all_groups()
    except RuntimeError:
        return False
    return True


def _ranks_per_host(strategy: ShardingStrategy, flat: DeviceMesh) -> int:
    """Return the number of ranks per host from ``LOCAL_WORLD_SIZE``, which ``torchrun`` sets alike on every host."""
    ranks, per_host = flat.size(), os.environ.get("LOCAL_WORLD_SIZE")
    local = int(per_host) if per_host is not None and per_host.isdigit() else ranks
    if ranks > 1 and (local == ranks or not local or ranks % local):
        found = f"LOCAL_WORLD_SIZE={per_host}" if per_host is not None else "LOCAL_WORLD_SIZE is not set"
        raise MeshError(
            f"strategy={strategy.name} shards within a host and replicates over hosts, but {found} for {ranks} ranks: "
            f"there is one host only, or not as many ranks on each. Pass mesh=. "
            f"{_how_to_make(_HYBRID, flat.device_type, ranks)}"
        )
    return local
