"""Conversion of sharded parameters and gradients to full plain tensors, and back."""

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

__all__ = ["agree_on_gradients", "assemble_full", "blank_parameter", "keep", "keep_gradient", "whole_parameter"]


def agree_on_gradients(parameters: Sequence[nn.Parameter]) -> list[bool]:
    """Return, for each parameter, whether any rank of its mesh has a gradient: all ranks must gather the same ones."""
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
    """Return the full parameter with its gradient, or ``None`` if ``shows`` is False. All ranks must call this."""
    with torch.inference_mode(False), torch.no_grad():
        value, gradient = assemble_full(sharded, sharding, offload_to_cpu), None
        if has_gradient:
            own = torch.zeros_like(sharded) if sharded.grad is None else sharded.grad
            gradient = assemble_full(own, sharding, offload_to_cpu)
        if not shows:
            return None
        whole = _like_sharded(value, sharded)
        whole.grad = gradient
    return whole


def blank_parameter(sharded: nn.Parameter) -> nn.Parameter:
    """Return an uninitialized full parameter on the device of the mesh, without communication."""
    device = cast(DTensor, sharded).device_mesh.device_type
    with torch.inference_mode(False):
        return _like_sharded(torch.empty(sharded.shape, dtype=sharded.dtype, device=device), sharded)


def _like_sharded(value: torch.Tensor, sharded: nn.Parameter) -> nn.Parameter:
    """Return ``value`` as a parameter with the class and the attributes of ``sharded``."""
    owner = find_parameter(sharded)
    whole = as_parameter(value, nn.Parameter if owner is None else owner.kind, sharded.requires_grad)
    for name, attribute in vars(sharded).items():
        setattr(whole, name, attribute)
    return whole


def assemble_full(tensor: torch.Tensor, sharding: ParameterSharding | None, offload_to_cpu: bool) -> torch.Tensor:
    """Return the full value in its own memory, even if this rank has all of it. For arguments see :func:`gather`."""
    local, full = local_part(tensor).detach(), gather(tensor.detach(), sharding)
    if offload_to_cpu:
        full = full.cpu()
    return full.clone() if _storage_addresses(full) & _storage_addresses(local) else full


def _storage_addresses(tensor: Any) -> set[int]:
    """Return the addresses of the tensor's storages, or of those of its inner tensors."""
    if is_traceable_wrapper_subclass(tensor):
        return {at for name in tensor.__tensor_flatten__()[0] for at in _storage_addresses(getattr(tensor, name))}
    return {tensor.untyped_storage().data_ptr()}


@torch.no_grad()
def keep(parameter: nn.Parameter, sharding: ParameterSharding, whole: torch.Tensor, requires_grad: bool) -> None:
    """Write this rank's shard of the full parameter ``whole`` to the sharded parameter."""
    local, part = cast(DTensor, parameter).to_local(), extent_of(parameter, sharding).take(whole.detach())
    if not torch.equal(local, part):  # unchanged values do not bump the version
        local.copy_(part)
    if parameter.requires_grad != requires_grad:
        parameter.requires_grad_(requires_grad)


@torch.no_grad()
def keep_gradient(parameter: nn.Parameter, sharding: ParameterSharding, whole: torch.Tensor | None) -> None:
    """Set this rank's shard of the full gradient ``whole``, in the memory of the old gradient if possible."""
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
