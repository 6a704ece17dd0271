"""Local extent of sharded tensors, and the gathering of full tensors.

Parameters sharded by ``fully_shard`` are described by their :class:`ParameterSharding`, since placements cannot express
every uneven shard of a tensor-parallel one. Other DTensors are described by their placements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from composable_fsdp._comm.communicator import Collective, Transfer
from composable_fsdp._layout.block import Cut, ShardExtent
from composable_fsdp._layout.shard import TensorShards
from composable_fsdp._runtime.groups.state import FSDPState, find_state
from composable_fsdp._runtime.params.sharded_param import local_part
from composable_fsdp._runtime.params.tensor_subclass import plain_tensors
from composable_fsdp._sharding.param_sharding import ParameterSharding

__all__ = [
    "assemble_full",
    "extent_of",
    "gather",
    "has_own_memory",
    "like",
    "parameters_at_rest",
    "shardings_of",
    "states_below",
]


def states_below(module: nn.Module) -> list[FSDPState]:
    """Return the FSDP states of ``module`` and its submodules, each once."""
    return list(dict.fromkeys(state for m in module.modules() if (state := find_state(m)) is not None))


def parameters_at_rest(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of ``module`` by name. Sharded ones are in their sharded form, which has the gradient."""
    at_rest = {id(p.unsharded): p.sharded for state in states_below(module) for p in state.group.parameters}
    return {name: at_rest.get(id(p), p) for name, p in module.named_parameters()}


def shardings_of(states: Iterable[FSDPState]) -> dict[int, ParameterSharding]:
    """Return the shardings of the sharded parameters of ``states``, by the ``id`` of the parameter."""
    return {id(p.sharded): p.sharding for state in states for p in state.group.parameters}


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Return True if ``tensor`` stores its own values, i.e. its class has no ``__torch_dispatch__``."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def extent_of(tensor: torch.Tensor, sharding: ParameterSharding | None = None) -> ShardExtent:
    """Return the extent of ``tensor`` on this rank: all of a plain tensor, none of a DTensor on another mesh.

    Args:
        tensor: a parameter, or a tensor with its shape and placements, such as a gradient or an optimizer state.
        sharding: the sharding of the parameter, if ``fully_shard`` made it.
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return ShardExtent.after(shape)
    if tensor.device_mesh.get_coordinate() is None:
        return ShardExtent(shape, ((),) * len(shape))
    if sharding is None or not _is_placed_by(tensor, sharding):
        return ShardExtent.after(shape, _cuts(tensor.device_mesh, tensor.placements))
    shard = sharding.axes.shard
    return ShardExtent.after(shape, [*_inner_cuts(sharding), Cut(sharding.dim, shard.size, shard.rank)])


def gather(tensor: torch.Tensor, sharding: ParameterSharding | None = None) -> torch.Tensor:
    """Return the full ``tensor`` on the device of its mesh. All ranks must call this.

    Args:
        tensor: as for :func:`extent_of`; it may be on another device, e.g. in host memory.
        sharding: as for :func:`extent_of`.

    The result may share memory with ``tensor`` if this rank has all of it.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    sharded = cast(DTensor, tensor.detach())
    local, mesh = sharded.to_local(), sharded.device_mesh
    if local.device.type != mesh.device_type:
        sharded = cast(DTensor, like(sharded, local := local.to(mesh.device_type)))
    if sharding is None or not _is_placed_by(sharded, sharding) or type(local) is not torch.Tensor:
        return sharded.full_tensor()
    full = _all_gather_shards(local, sharding)
    inner = sharding.inner
    return full if inner is None else inner.wrap(full).full_tensor()


def assemble_full(tensor: torch.Tensor, sharding: ParameterSharding | None, offload_to_cpu: bool) -> torch.Tensor:
    """Return the full value in its own memory, even if this rank has all of it. For arguments see :func:`gather`."""
    local, full = local_part(tensor).detach(), gather(tensor.detach(), sharding)
    if offload_to_cpu:
        full = full.cpu()
    return full.clone() if _storage_addresses(full) & _storage_addresses(local) else full


def _storage_addresses(tensor: torch.Tensor) -> set[int]:
    return {plain.untyped_storage().data_ptr() for plain in plain_tensors(tensor)}


def like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return ``local`` as the local tensor of a DTensor with the placements of ``tensor``, or itself if that is plain.

    ``DTensor.from_local`` would move it to the device of the mesh, which offloaded shards are not on.
    """
    if not isinstance(tensor, DTensor):
        return local
    spec = cast(Any, tensor)._spec
    return DTensor(local, replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype)), requires_grad=False)


def _is_placed_by(tensor: DTensor, sharding: ParameterSharding) -> bool:
    return (
        tuple(tensor.shape) == sharding.shape
        and tensor.placements == sharding.placements
        and tensor.device_mesh == sharding.mesh
    )


def _inner_cuts(sharding: ParameterSharding) -> Iterator[Cut]:
    if sharding.inner is not None:
        yield from _cuts(sharding.inner.mesh, sharding.inner.placements)


def _cuts(mesh: DeviceMesh, placements: Sequence[Placement]) -> Iterator[Cut]:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(placements):
        if not placement.is_replicate():
            dim = cast(Shard, placement).dim
            yield Cut(dim, mesh.size(axis), coordinate[axis], getattr(placement, "split_factor", 1))


def _all_gather_shards(local: torch.Tensor, sharding: ParameterSharding) -> torch.Tensor:
    """All-gather the shards of the shard axis. They are sent as bytes, since not every backend supports every dtype."""
    axis = sharding.axes.shard
    shards = TensorShards(ShardExtent.after(sharding.shape, _inner_cuts(sharding)).local_shape, sharding.dim, axis.size)
    if axis.size == 1:
        return local
    message = F.pad(local.reshape(-1).view(torch.uint8), (0, shards.padded_numel * local.itemsize - local.nbytes))
    received = message.new_empty(axis.size * message.numel())
    axis.launch(Collective.ALL_GATHER, [Transfer(received, message)]).wait()
    pieces = received.view(local.dtype).view(axis.size, shards.padded_numel)
    if shards.concatenates:
        return pieces.view(-1)[: shards.numel].view(shards.shape)
    shapes = [shards.shard_shape(rank) for rank in range(axis.size)]
    return torch.cat([row[: prod(s)].view(s) for row, s in zip(pieces, shapes, strict=True)], sharding.dim)
