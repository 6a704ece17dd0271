"""From a ``DeviceMesh`` to the two axes of data parallelism, each with its communicator."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.weak import WeakIdKeyDictionary

from composable_fsdp.comm.c10d import ProcessGroupCommunicator
from composable_fsdp.comm.loopback import LoopbackCommunicator
from composable_fsdp.comm.protocol import Communicator
from composable_fsdp.errors import MeshError

__all__ = ["DataParallelAxes", "data_parallel_axes", "default_mesh"]

HOW_TO_START = (
    "Start one process per device with `torchrun --nproc-per-node N script.py` and call "
    "`torch.distributed.init_process_group()` before fully_shard, or build a mesh with "
    "`torch.distributed.device_mesh.init_device_mesh` and pass it as mesh=."
)


@dataclass(frozen=True)
class DataParallelAxes:
    """The shard axis and the replicate axis of ``mesh``; an axis that the mesh lacks has one rank.

    Args:
        mesh: the mesh on which the sharded parameters live.
        device: where this rank computes.
        shard: the ranks among which parameters are cut.
        replicate: the ranks that hold the same shard.
    """

    mesh: DeviceMesh
    device: torch.device
    shard: Communicator
    replicate: Communicator = field(default_factory=LoopbackCommunicator)

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks: what a mean of gradients divides by."""
        return self.shard.size * self.replicate.size

    def smaller_shard_axis(self, size: int) -> Communicator:
        """The ``size`` neighbouring ranks of the shard axis that this rank is among. All of them must ask together."""
        known = _smaller_axes.setdefault(self.mesh, {})
        if size not in known:
            ranks = dist.get_process_group_ranks(self.mesh.get_group(self.mesh.ndim - 1))
            first = self.shard.rank - self.shard.rank % size
            group = dist.new_group(ranks[first : first + size], use_local_synchronization=True)
            known[size] = ProcessGroupCommunicator(group, self.mesh.device_type)
        return known[size]


_smaller_axes: MutableMapping[DeviceMesh, dict[int, Communicator]] = WeakIdKeyDictionary()
_default_meshes: WeakKeyDictionary[dist.ProcessGroup, DeviceMesh] = WeakKeyDictionary()


def default_mesh() -> DeviceMesh:
    """A 1-d mesh over all ranks of the default process group, on its accelerator if it serves one, else on CPU.

    The mesh has no dim names, as peft and others take any name but ``fsdp`` for tensor parallelism.
    """
    if not dist.is_initialized():
        raise MeshError(f"fully_shard was given no mesh and there is no default process group. {HOW_TO_START}")
    world = dist.group.WORLD
    assert world is not None
    if world not in _default_meshes:
        _default_meshes[world] = init_device_mesh(_default_device_type(), (dist.get_world_size(),))
    return _default_meshes[world]


def _default_device_type() -> str:
    """The accelerator, where the default process group has a backend made for it; gloo only stages through the host."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return "cpu"
    backends = dict(part.split(":") for part in str(dist.get_backend_config()).split(",") if ":" in part)
    return "cpu" if backends.get(accelerator.type, "gloo") == "gloo" else accelerator.type


def data_parallel_axes(mesh: DeviceMesh) -> DataParallelAxes:
    """The axes of a 1-d mesh (shard) or of a 2-d one (replicate, shard).

    Raises:
        MeshError: the mesh has another number of dims, or this rank is not in it.
    """
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"mesh must be a torch.distributed.DeviceMesh, not {type(mesh).__name__}. {HOW_TO_START}")
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
    replicate = _communicator(mesh, 0) if mesh.ndim == 2 else LoopbackCommunicator()
    return DataParallelAxes(mesh, _current_device(mesh.device_type), shard, replicate)


def _communicator(mesh: DeviceMesh, dim: int) -> Communicator:
    if mesh.size(dim) == 1:
        return LoopbackCommunicator()
    return ProcessGroupCommunicator(mesh.get_group(dim), mesh.device_type)


def _current_device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
