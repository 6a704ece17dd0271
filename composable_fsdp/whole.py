"""From shards to whole plain tensors and back, by what DTensors say of themselves: mesh, placements, shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from composable_fsdp.errors import ParameterError

__all__ = ["agree_on_gradients", "keep", "keep_gradient", "own_part", "whole_parameter"]


def agree_on_gradients(parameters: Sequence[nn.Parameter]) -> list[bool]:
    """Which parameters have a gradient on any rank of their mesh: a gradient is gathered by all or none."""
    found = [parameter.grad is not None for parameter in parameters]
    for mesh in dict.fromkeys(cast(DTensor, p).device_mesh for p in parameters):
        here = [i for i, p in enumerate(parameters) if cast(DTensor, p).device_mesh == mesh]
        flags = torch.tensor([found[i] for i in here], dtype=torch.uint8, device=mesh.device_type)
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1:
                dist.all_reduce(flags, dist.ReduceOp.MAX, mesh.get_group(axis))
        for i, flag in zip(here, flags.tolist(), strict=True):
            found[i] = bool(flag)
    return found


def whole_parameter(
    sharded: nn.Parameter, has_gradient: bool, shows: bool, offload_to_cpu: bool
) -> nn.Parameter | None:
    """The whole parameter with its gradient, on ranks that show it. All ranks gather alike."""
    with torch.inference_mode(False), torch.no_grad():
        value, gradient = _whole(sharded, offload_to_cpu), None
        if has_gradient:
            gradient = _whole(torch.zeros_like(sharded) if sharded.grad is None else sharded.grad, offload_to_cpu)
        if not shows:
            return None
        whole = nn.Parameter(value, requires_grad=sharded.requires_grad)
        whole.grad = gradient
    for name, attribute in vars(sharded).items():
        setattr(whole, name, attribute)
    return whole


def _whole(tensor: torch.Tensor, offload_to_cpu: bool) -> torch.Tensor:
    """The full value, in memory of its own: also where this rank has all of it."""
    local, full = cast(DTensor, tensor).to_local(), _full(tensor)
    if offload_to_cpu:
        full = full.cpu()
    shared = full.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    return full.clone() if shared else full


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """``full_tensor``, also of shards that rest in host memory, which the mesh's backend may not be able to send."""
    sharded = cast(DTensor, tensor.detach())
    local, mesh = sharded.to_local(), sharded.device_mesh
    if local.device.type != mesh.device_type:
        sharded = _like(sharded, local.to(mesh.device_type))
    return sharded.full_tensor()


def _like(sharded: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor placed as ``sharded`` is, with ``local`` as this rank's part."""
    return DTensor.from_local(
        local,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )


@torch.no_grad()
def keep(parameter: nn.Parameter, whole: torch.Tensor, requires_grad: bool) -> None:
    """Writes this rank's part of ``whole`` to the sharded parameter."""
    sharded = cast(DTensor, parameter)
    sharded.to_local().copy_(_checked_part(whole.detach(), sharded))
    if parameter.requires_grad != requires_grad:
        parameter.requires_grad_(requires_grad)


@torch.no_grad()
def keep_gradient(parameter: nn.Parameter, whole: torch.Tensor | None) -> None:
    """Makes this rank's part of ``whole`` the sharded parameter's gradient, in the memory of the old one if it can."""
    sharded = cast(DTensor, parameter)
    gradient: Any = sharded.grad
    if whole is None:
        sharded.grad = None
    elif gradient is not None and gradient.placements == sharded.placements:
        gradient.to_local().copy_(_checked_part(whole, sharded))
    else:
        local = torch.empty_like(sharded.to_local())
        sharded.grad = _like(sharded, local.copy_(_checked_part(whole, sharded)))


def _checked_part(whole: torch.Tensor, sharded: DTensor) -> torch.Tensor:
    """This rank's part, unless the placements do not say which that is: a strided shard cannot, for some sizes."""
    part, local = own_part(whole, sharded), sharded.to_local()
    if part.shape != local.shape:
        raise ParameterError(
            f"a parameter of shape {tuple(sharded.shape)} is placed {sharded.placements} with {tuple(local.shape)} on "
            f"this rank, where these placements say {tuple(part.shape)}: its sizes do not divide evenly, so that "
            "nothing can be written back. Use unsharded_params(writeback=False)."
        )
    return part


def own_part(whole: torch.Tensor, sharded: DTensor) -> torch.Tensor:
    """What this rank holds of a tensor placed as ``sharded``. A view where that is one block."""
    mesh, coordinate = sharded.device_mesh, sharded.device_mesh.get_coordinate()
    assert coordinate is not None
    part = whole
    for axis, placement in enumerate(sharded.placements):
        if not placement.is_replicate():
            part = _cut(part, placement, mesh.size(axis), coordinate[axis])
    return part


def _cut(tensor: torch.Tensor, placement: Placement, num_ranks: int, rank: int) -> torch.Tensor:
    """The part of one rank on one axis; of a strided shard, its part of each of the ``split_factor`` blocks."""
    dim = cast(Shard, placement).dim
    factor = getattr(placement, "split_factor", 1)
    parts = [_chunk(_chunk(tensor, dim, factor, i), dim, num_ranks, rank) for i in range(factor)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _chunk(tensor: torch.Tensor, dim: int, count: int, index: int) -> torch.Tensor:
    """As ``torch.chunk`` cuts, the last ones getting less or nothing."""
    length = tensor.size(dim)
    size = -(-length // count)
    start = min(index * size, length)
    return tensor.narrow(dim, start, min(size, length - start))
