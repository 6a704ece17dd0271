"""From sharded parameters and gradients to whole plain ones, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from composable_fsdp._runtime.params.sharded_param import find_parameter, local_part
from composable_fsdp._runtime.params.tensor_subclass import as_parameter
from composable_fsdp._runtime.shard_extent import extent_of, gather, like
from composable_fsdp._sharding.param_sharding import ParameterSharding

__all__ = ["agree_on_gradients", "blank_parameter", "keep", "keep_gradient", "whole_parameter", "whole_tensor"]


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
    sharded: nn.Parameter, sharding: ParameterSharding, has_gradient: bool, shows: bool, offload_to_cpu: bool
) -> nn.Parameter | None:
    """The whole parameter with its gradient, on ranks that show it. All ranks gather alike."""
    with torch.inference_mode(False), torch.no_grad():
        value, gradient = whole_tensor(sharded, sharding, offload_to_cpu), None
        if has_gradient:
            own = torch.zeros_like(sharded) if sharded.grad is None else sharded.grad
            gradient = whole_tensor(own, sharding, offload_to_cpu)
        if not shows:
            return None
        whole = _like_sharded(value, sharded)
        whole.grad = gradient
    return whole


def blank_parameter(sharded: nn.Parameter) -> nn.Parameter:
    """The whole parameter without values, where the mesh computes. Nothing is communicated."""
    device = cast(DTensor, sharded).device_mesh.device_type
    with torch.inference_mode(False):
        return _like_sharded(torch.empty(sharded.shape, dtype=sharded.dtype, device=device), sharded)


def _like_sharded(value: torch.Tensor, sharded: nn.Parameter) -> nn.Parameter:
    """``value`` as a parameter of the class, and with the attributes, that users gave to the sharded one."""
    owner = find_parameter(sharded)
    whole = as_parameter(value, nn.Parameter if owner is None else owner.kind, sharded.requires_grad)
    for name, attribute in vars(sharded).items():
        setattr(whole, name, attribute)
    return whole


def whole_tensor(tensor: torch.Tensor, sharding: ParameterSharding | None, offload_to_cpu: bool) -> torch.Tensor:
    """The full value, in memory of its own: also where this rank has all of it. Arguments as for ``placed.gather``."""
    local, full = local_part(tensor).detach(), gather(tensor.detach(), sharding)
    if offload_to_cpu:
        full = full.cpu()
    return full.clone() if _memory_of(full) & _memory_of(local) else full


def _memory_of(tensor: Any) -> set[int]:
    """Addresses of its storages: those of the inner tensors, where a class keeps its values in these."""
    if is_traceable_wrapper_subclass(tensor):
        return {at for name in tensor.__tensor_flatten__()[0] for at in _memory_of(getattr(tensor, name))}
    return {tensor.untyped_storage().data_ptr()}


@torch.no_grad()
def keep(parameter: nn.Parameter, sharding: ParameterSharding, whole: torch.Tensor, requires_grad: bool) -> None:
    """Writes this rank's part of ``whole`` to the sharded parameter."""
    local, part = cast(DTensor, parameter).to_local(), extent_of(parameter, sharding).take(whole.detach())
    if not torch.equal(local, part):  # who only read has changed nothing, also between a forward and its backward
        local.copy_(part)
    if parameter.requires_grad != requires_grad:
        parameter.requires_grad_(requires_grad)


@torch.no_grad()
def keep_gradient(parameter: nn.Parameter, sharding: ParameterSharding, whole: torch.Tensor | None) -> None:
    """Makes this rank's part of ``whole`` the sharded parameter's gradient, in the memory of the old one if it can."""
    sharded = cast(DTensor, parameter)
    gradient: Any = sharded.grad
    if whole is None:
        sharded.grad = None
        return
    part = extent_of(sharded, sharding).take(whole)
    if gradient is not None and gradient.placements == sharded.placements:
        gradient.to_local().copy_(part)
    else:
        sharded.grad = like(sharded, torch.empty_like(sharded.to_local()).copy_(part))
