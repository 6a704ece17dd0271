"""One tensor of a state dict: how it shows in a form, whether a value fits it, and which part of that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from composable_fsdp.checkpoint.options import Form, Full, Local, Sharded
from composable_fsdp.placed import extent_of, gather, like
from composable_fsdp.runtime.parameter import local_part
from composable_fsdp.sharding import ParameterSharding
from composable_fsdp.whole import whole_tensor

__all__ = ["described", "fill", "misfit", "part_for", "shown"]


def shown(tensor: torch.Tensor, sharding: ParameterSharding | None, form: Form) -> torch.Tensor:
    """``tensor`` in ``form``. Collective over its mesh for :class:`Full`, whose result has memory of its own."""
    if isinstance(form, Full):
        return whole_tensor(tensor, sharding, form.offload_to_cpu)
    value = tensor.detach()
    if isinstance(form, Local) or not isinstance(value, DTensor):
        value = local_part(value).detach()
        return value.cpu() if form.offload_to_cpu else value
    local = local_part(value)
    return _aliasing(value, local.cpu() if form.offload_to_cpu else local)


def described(value: object) -> str:
    """Shape and dtype of a tensor, the type of anything else."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def misfit(target: torch.Tensor, value: object, form: Form | None) -> str | None:
    """Why ``value`` cannot be loaded into ``target``; ``None`` if it can. ``form`` is what the user said it has."""
    if not isinstance(value, torch.Tensor):
        return f"is no tensor but of type {type(value).__name__}"
    if isinstance(value, DTensor) and isinstance(form, (Full, Local)):
        return f"is a DTensor: pass form=Sharded() instead of {type(form).__name__}()"
    if isinstance(target, DTensor) and not isinstance(value, DTensor) and isinstance(form, Sharded):
        return "is a plain tensor: pass form=Full() or Local() instead of Sharded()"
    if value.is_meta:
        return "is on the meta device and has no values"
    is_part = isinstance(form, Local)
    shape: Sequence[int] = local_part(target).shape if is_part else target.shape
    if tuple(value.shape) != tuple(shape):
        where = " as this rank's part" if is_part and isinstance(target, DTensor) else ""
        return f"is {described(value)}; expected {tuple(shape)}{where}"
    if _kind(value.dtype) != _kind(target.dtype):
        return f"is {described(value)}; expected {str(target.dtype).removeprefix('torch.')}"
    return _misplaced(target, value) if isinstance(value, DTensor) else None


def _misplaced(target: torch.Tensor, value: DTensor) -> str | None:
    """Whether ``value`` is not where its placements say, so that it could not be found when it is redistributed.

    They cannot say how every uneven tensor-parallel shard was cut again. Where that is how ``target`` is cut, it knows.
    """
    if any(placement.is_partial() for placement in value.placements):
        return None
    found = tuple(local_part(value).shape)
    wanted = tuple(local_part(target).shape) if _lies_alike(target, value) else extent_of(value).local_shape
    return None if found == wanted else f"has a local part of {found}; expected {wanted}"


def part_for(
    target: torch.Tensor, sharding: ParameterSharding | None, value: torch.Tensor, form: Form | None
) -> torch.Tensor:
    """What of ``value``, which fits, this rank's part of ``target`` takes: a view of it where there is one.

    Collective where ``value`` is a DTensor that is placed otherwise than ``target``: it is whole for a moment.
    """
    if isinstance(value, DTensor):
        if _lies_alike(target, value):
            return local_part(value)
        value = gather(value)
    elif isinstance(form, Local):
        return value
    return extent_of(target, sharding).take(value)


@torch.no_grad()
def fill(target: torch.Tensor, sharding: ParameterSharding | None, value: torch.Tensor, form: Form | None) -> None:
    """Copies to this rank's part of ``target`` what of ``value`` belongs there. Collective as :func:`part_for`."""
    local_part(target).copy_(part_for(target, sharding, value.detach(), form))


def _aliasing(sharded: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor like ``sharded`` in the memory of ``local``.

    ``detach`` gives one that ``copy.deepcopy`` refuses where ``local`` is a view that begins later than its storage:
    the DTensor then says that it begins there too, but has no storage.
    """
    if type(local) is not torch.Tensor:
        return like(sharded, local)
    alias = like(sharded, local.new_empty(0))
    cast(Any, alias)._local_tensor = local
    return alias


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    return "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "integer"


def _lies_alike(target: Any, value: DTensor) -> bool:
    """Whether each rank has the same part of both, be it on another device. The same answer on every rank."""
    if not isinstance(target, DTensor) or target.placements != value.placements:
        return False
    here, there = target.device_mesh, value.device_mesh
    return here == there or torch.equal(here.mesh, there.mesh)
