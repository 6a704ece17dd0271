"""Which part of a sharded tensor this rank holds, and whole tensors out of the parts of all.

A parameter that ``fully_shard`` cut is described by its :class:`ParameterSharding`, since
placements cannot describe every uneven cut within a tensor-parallel one. Other DTensors are what placements say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from composable_fsdp._comm.communicator import Transfer
from composable_fsdp._layout.block import Cut, Extent
from composable_fsdp._layout.shard import TensorShards
from composable_fsdp._runtime.groups.state import FSDPState, find_state
from composable_fsdp._sharding.param_sharding import ParameterSharding

__all__ = ["extent_of", "gather", "has_own_memory", "like", "shardings_of", "states_below"]


def states_below(module: nn.Module) -> list[FSDPState]:
    """Of ``module`` and all modules below it, each once."""
    return list(dict.fromkeys(state for m in module.modules() if (state := find_state(m)) is not None))


def shardings_of(states: Iterable[FSDPState]) -> dict[int, ParameterSharding]:
    """How the sharded parameters of ``states`` are cut, by their ids."""
    return {id(p.sharded): p.sharding for state in states for p in state.group.parameters}


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Whether the values of ``tensor`` are in its memory, so that a plain view of it has them: true of classes without
    ``__torch_dispatch__``.
    """
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def extent_of(tensor: torch.Tensor, sharding: ParameterSharding | None = None) -> Extent:
    """What this rank holds of ``tensor``: all of a plain one, and nothing of a DTensor on a mesh that it is not in.

    Args:
        tensor: a parameter, or something of its shape that is placed like it: a gradient, or state of an optimizer.
        sharding: that of the parameter, if ``fully_shard`` cut it.
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Extent.after(shape)
    if tensor.device_mesh.get_coordinate() is None:
        return Extent(shape, ((),) * len(shape))
    if sharding is None or not _is_placed_by(tensor, sharding):
        return Extent.after(shape, _cuts(tensor.device_mesh, tensor.placements))
    shard = sharding.axes.shard
    return Extent.after(shape, [*_inner_cuts(sharding), Cut(sharding.dim, shard.size, shard.rank)])


def gather(tensor: torch.Tensor, sharding: ParameterSharding | None = None) -> torch.Tensor:
    """The whole of ``tensor`` on the device of its mesh; arguments as for :func:`extent_of`. All ranks take part.

    A shard may rest elsewhere, in host memory. The result may be the memory of ``tensor`` itself, where this rank has
    all of it.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    sharded = cast(DTensor, tensor.detach())
    local, mesh = sharded.to_local(), sharded.device_mesh
    if local.device.type != mesh.device_type:
        sharded = like(sharded, local := local.to(mesh.device_type))
    if sharding is None or not _is_placed_by(sharded, sharding) or type(local) is not torch.Tensor:
        return sharded.full_tensor()
    whole = _joined(local, sharding)
    inner = sharding.inner
    return whole if inner is None else inner.wrap(whole).full_tensor()


def like(sharded: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor placed as ``sharded`` is, with ``local`` as this rank's part."""
    return DTensor.from_local(
        local,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )


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


def _joined(local: torch.Tensor, sharding: ParameterSharding) -> torch.Tensor:
    """What the shard axis cut, whole again, out of this rank's shard and those of the others. As bytes: not every
    backend sends every dtype.
    """
    axis = sharding.axes.shard
    shards = TensorShards(Extent.after(sharding.shape, _inner_cuts(sharding)).local_shape, sharding.dim, axis.size)
    if axis.size == 1:
        return local
    message = F.pad(local.reshape(-1).view(torch.uint8), (0, shards.padded_numel * local.itemsize - local.nbytes))
    received = message.new_empty(axis.size * message.numel())
    axis.all_gather([Transfer(received, message)]).wait()
    pieces = received.view(local.dtype).view(axis.size, shards.padded_numel)
    if shards.concatenates:
        return pieces.view(-1)[: shards.numel].view(shards.shape)
    shapes = [shards.shard_shape(rank) for rank in range(axis.size)]
    return torch.cat([row[: prod(s)].view(s) for row, s in zip(pieces, shapes, strict=True)], sharding.dim)
