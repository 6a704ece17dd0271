"""The two data-parallel axes of a ``DeviceMesh``, each with its communicator."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_fsdp._comm.communicator import Communicator
from composable_fsdp._comm.factory import communicator_over, loopback, part_of
from composable_fsdp._memory.device_capabilities import (
    backend_capabilities,
    current_accelerator,
    current_device,
    is_accelerator,
)
from composable_fsdp.errors import ArgumentTypeError, MeshError
from composable_fsdp.policies import DataParallelMeshDims

__all__ = [
    "DataParallelAxes",
    "OffloadBackendWarning",
    "axis_names",
    "data_parallel_axes",
    "default_mesh",
    "join_meshes",
    "named_data_parallel_axes",
    "warn_without_cpu_backend",
]

HOW_TO_START = (
    "Start one process per device with `torchrun --nproc-per-node N script.py`, or call "
    "`torch.distributed.init_process_group()` before fully_shard, or build a mesh with "
    "`torch.distributed.device_mesh.init_device_mesh` and pass it as mesh=."
)

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The environment variables from which torch starts a process group."""


@dataclass(frozen=True)
class DataParallelAxes:
    """The shard axis and the replicate axis of ``mesh``. An axis that the mesh lacks has one rank.

    Args:
        mesh: the data-parallel mesh. Its last axis is the shard axis, if that has more than one rank.
        device: the device on which this rank computes.
        shard: communicator of the ranks that parameters are sharded over.
        replicate: communicator of the ranks that hold the same shard.
        divide: the divisor of sums of gradients. ``None`` is the number of ranks, or the factor of the group.
    """

    mesh: DeviceMesh
    device: torch.device
    shard: Communicator
    replicate: Communicator = field(default_factory=loopback)
    divide: float | None = None

    @cached_property
    def num_ranks(self) -> int:
        """The number of data-parallel ranks, by which the mean of gradients divides."""
        return self.shard.size * self.replicate.size

    @property
    def names(self) -> tuple[str, str]:
        """The names of the shard axis and of the replicate axis in the mesh. See also :func:`axis_names`."""
        known = self.mesh.mesh_dim_names or ()
        return known[-1] if known else "shard", known[0] if len(known) > 1 else "replicate"

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The shard axis as a 1-d mesh."""
        if self.mesh.ndim == 1:
            return self.mesh
        names = self.mesh.mesh_dim_names
        if names is not None:
            return self.mesh[names[-1]]
        group = self.mesh.get_group(self.mesh.ndim - 1)
        known, kind = _shard_meshes.setdefault(group, {}), self.mesh.device_type
        if kind not in known:
            known[kind] = DeviceMesh.from_group(group, kind)
        return known[kind]

    def on(self, device: torch.device | str | int) -> DataParallelAxes:
        """Return these axes for a rank that computes on ``device``; an int is a device index of the mesh's device type.

        Raises:
            MeshError: ``device`` has another type than the mesh.
        """
        kind = self.mesh.device_type
        chosen = torch.device(kind, device) if isinstance(device, int) else torch.device(device)
        if chosen.type != kind:
            raise MeshError(
                f"device={str(chosen)!r} contradicts the mesh, whose ranks compute on {kind}. Leave device out, or "
                f"build the mesh with init_device_mesh({chosen.type!r}, ...)."
            )
        return self if chosen == torch.device(kind) else replace(self, device=chosen)

    def smaller_shard_axis(self, size: int) -> Communicator:
        """Return the communicator of the ``size`` neighbouring shard ranks around this one, or of the shard axis.

        The shard axis is returned if it has no more than ``size`` ranks. All shard ranks must call it together.

        Raises:
            MeshError: ``size`` does not divide the shard axis.
        """
        if size >= self.shard.size:
            return self.shard
        if self.shard.size % size:
            raise MeshError(
                f"reshard_after_forward={size} does not divide the {self.shard.size} shard ranks of {self.mesh}, over "
                "which some parameters of the group are sharded."
            )
        shard_group = self.mesh.get_group(self.mesh.ndim - 1)
        known = _smaller_axes.setdefault(shard_group, {})
        key = self.mesh.device_type, size
        if key not in known:
            known[key] = part_of(shard_group, size)
        return communicator_over(known[key], self.mesh.device_type)


# Keyed by process group, because every slice of a mesh is a new object; then by type of device, because a process group
# can have a backend for each.
_shard_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[str, DeviceMesh]] = WeakKeyDictionary()
_smaller_axes: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, int], dist.ProcessGroup]] = WeakKeyDictionary()
_default_meshes: WeakKeyDictionary[dist.ProcessGroup, DeviceMesh] = WeakKeyDictionary()


class OffloadBackendWarning(UserWarning):
    """Shards are on CPU, and a process group of their mesh has no backend for CPU tensors."""


def axis_names(meshes: Iterable[DataParallelAxes]) -> dict[DataParallelAxes, tuple[str, str]]:
    """Return the names of the shard axis and of the replicate axis of each mesh, for tables of costs.

    Axes with one name and different process groups are numbered in the order of ``meshes``: "shard", "shard 2".
    """
    known: dict[str, list[Communicator]] = {}
    found = {}
    for mesh in meshes:
        names = []
        for name, communicator in zip(mesh.names, (mesh.shard, mesh.replicate), strict=True):
            same = known.setdefault(name, [])
            if communicator.size > 1 and communicator not in same:
                same.append(communicator)
            number = same.index(communicator) if communicator.size > 1 else 0
            names.append(f"{name} {number + 1}" if number else name)
        found[mesh] = names[0], names[1]
    return found


def warn_without_cpu_backend(axes: DataParallelAxes) -> None:
    """Warn which operations fail on CPU-offloaded shards if a process group has no backend for CPU tensors.

    Training needs none: parameters and gradients are communicated on the device where modules compute.

    Warns:
        OffloadBackendWarning: a process group of the mesh has none.
    """
    device = axes.device.type
    for dim in range(axes.mesh.ndim):
        group = axes.mesh.get_group(dim)
        if is_accelerator(axes.device) and torch.device("cpu") not in cast(Any, group)._device_types:
            warnings.warn(
                f"CPUOffloadPolicy keeps shards on CPU, but the process group of dim {dim} of {axes.mesh} has no "
                f"backend for CPU tensors ({dist.get_backend_config(group)}). Training works. Operations that "
                "communicate the shards themselves fail: full_tensor(), GradScaler, and torch's clip_grad_norm_, "
                "instead of which composable_fsdp.clip_grad_norm_ works. For these call init_process_group with both "
                f'backends, such as "cpu:gloo,{device}:nccl". Else filter this composable_fsdp.OffloadBackendWarning.',
                OffloadBackendWarning,
                stacklevel=3,
            )
            return


def default_mesh() -> DeviceMesh:
    """Return a 1-d mesh over the default process group, on its accelerator if it serves one, else on CPU.

    The group is started from the environment, such as that of torchrun, if there is none. The mesh has no dim names,
    because peft and others take any name but ``fsdp`` for tensor parallelism.

    Raises:
        MeshError: there is no process group, and the environment lacks a variable to start one.
    """
    if not dist.is_initialized():
        missing = [name for name in _RENDEZVOUS if name not in os.environ]
        if missing:
            raise MeshError(
                "fully_shard was given no mesh and there is no default process group, nor can one be started from the "
                f"environment, which lacks {', '.join(missing)}. {HOW_TO_START}"
            )
        dist.init_process_group()
    world = dist.group.WORLD
    assert world is not None
    if world not in _default_meshes:
        _default_meshes[world] = init_device_mesh(_default_device_type(), (dist.get_world_size(),))
    return _default_meshes[world]


def _default_device_type() -> str:
    """Return the accelerator's type if the default process group has a native backend for it, else ``"cpu"``.

    gloo is not native: it stages through the host.
    """
    accelerator, world = current_accelerator(), dist.group.WORLD
    assert world is not None
    is_served = accelerator is not None and backend_capabilities(world, accelerator.type).is_native
    return accelerator.type if accelerator is not None and is_served else "cpu"


def data_parallel_axes(mesh: DeviceMesh) -> DataParallelAxes:
    """Return the axes of a 1-d mesh (shard) or of a 2-d mesh (replicate, shard).

    Raises:
        ArgumentTypeError: ``mesh`` is not a ``DeviceMesh``.
        MeshError: the mesh has another number of dims, or this rank is not in it.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentTypeError(
            f"mesh must be a torch.distributed.DeviceMesh, not {type(mesh).__name__}. {HOW_TO_START}"
        )
    if mesh.ndim not in (1, 2):
        raise MeshError(
            f"mesh must be 1-d (shard) or 2-d (replicate, shard), not {mesh.ndim}-d {tuple(mesh.shape)}. "
            "Slice the data-parallel dims out of it, for example mesh['dp'] or mesh['replicate', 'shard']."
        )
    if mesh.get_coordinate() is None:
        raise MeshError(
            f"rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}: only ranks of the mesh may call "
            "fully_shard with it."
        )
    shard = _communicator(mesh, mesh.ndim - 1)
    replicate = _communicator(mesh, 0) if mesh.ndim == 2 else loopback()
    return DataParallelAxes(mesh, current_device(mesh.device_type), shard, replicate)


def named_data_parallel_axes(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataParallelAxes:
    """Return the axes of the dims of ``mesh`` that ``dims`` names. Several names become one axis.

    Raises:
        ArgumentTypeError: ``mesh`` is not a ``DeviceMesh``.
        MeshError: ``mesh`` has no dim names, or not these.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentTypeError(f"dp_mesh_dims needs mesh= to be a DeviceMesh, not {type(mesh).__name__}.")
    names = mesh.mesh_dim_names
    if names is None:
        raise MeshError("dp_mesh_dims names dims of the mesh, but the mesh has none: give it mesh_dim_names.")
    unknown = [name for name in (*dims.replicate_names, *dims.shard_names) if name not in names]
    if unknown:
        raise MeshError(f"dp_mesh_dims names {unknown}, but the dims of the mesh are {list(names)}.")
    parts = [_one_axis(mesh, part) for part in (dims.replicate_names, dims.shard_names) if part]
    axes_mesh = parts[0] if len(parts) == 1 else join_meshes(*parts)
    if dims.shard_names:
        return data_parallel_axes(axes_mesh)
    device = current_device(mesh.device_type)
    return DataParallelAxes(axes_mesh, device, loopback(), _communicator(axes_mesh, 0))


def _one_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def join_meshes(*meshes: DeviceMesh) -> DeviceMesh:
    """Return one mesh with the axes of all ``meshes``, which must be slices of one mesh.

    Raises:
        MeshError: they are not.
    """
    advice = (
        "the data-parallel mesh and the mesh on which parameters are placed already must be slices of one mesh, for "
        "example mesh['dp'] and mesh['tp'] of init_device_mesh(..., mesh_dim_names=('dp', 'tp')). "
        f"Got {' and '.join(map(str, meshes))}."
    )
    if any(mesh.mesh_dim_names is None for mesh in meshes):
        raise MeshError(advice)
    try:
        return DeviceMesh._concatenate(list(meshes))
    except (RuntimeError, ValueError) as error:
        raise MeshError(advice) from error


def _communicator(mesh: DeviceMesh, dim: int) -> Communicator:
    if mesh.size(dim) == 1:
        return loopback()
    return communicator_over(mesh.get_group(dim), mesh.device_type)
