"""The forms of a state dict: full, sharded and local; and the conversion of one tensor to a form, and from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from composable_fsdp._api.extents import assemble_full, extent_of, gather, has_own_memory
from composable_fsdp._consistency.broadcast import fill_
from composable_fsdp._core.mesh import ParameterSharding
from composable_fsdp._core.params import alias_of, local_part
from composable_fsdp.checkpoint._coordination.mismatch import Mismatch, differ, dtype_name, said
from composable_fsdp.errors import ArgumentTypeError, CheckpointError, ConfigurationError

__all__ = ["Form", "Full", "Local", "Sharded", "check_form", "compare", "fill", "shard_for", "to_form"]


class _Options:
    """Base that rejects unknown options, and names the form that has them."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        known = set(cls.__dataclass_fields__)  # type: ignore[attr-defined]
        for option in options:
            owners = [form.__name__ for form in (Full, Sharded, Local) if option in form.__dataclass_fields__]
            if option not in known:
                whose = f"an option of {' and '.join(owners)}" if owners else "no option of any form"
                raise ConfigurationError(f"{option} is {whose}, not of {cls.__name__}, which has {sorted(known)}.")
        return super().__new__(cls)


@dataclass(frozen=True)
class Full(_Options):
    """Full plain tensors, with the names and shapes of the unsharded model.

    Args:
        rank0_only: only rank 0 gets values, or provides them when loading. Other ranks get, and pass, an empty dict.
        offload_to_cpu: return tensors in CPU memory. The accelerator then holds one full tensor at a time.
    """

    rank0_only: bool = False
    offload_to_cpu: bool = False


@dataclass(frozen=True)
class Sharded(_Options):
    """``DTensor``s of which each rank has its shard, as ``torch.distributed.checkpoint`` takes them.

    Args:
        offload_to_cpu: return local tensors in CPU memory, as copies unless they are there already.
    """

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class Local(_Options):
    """This rank's shards as plain tensors, empty ones included. They can be loaded with the same sharding only.

    Args:
        offload_to_cpu: return tensors in CPU memory, as copies unless they are there already.
    """

    offload_to_cpu: bool = False


Form = Full | Sharded | Local


def check_form(form: object) -> None:
    """Raise ``ArgumentTypeError`` if ``form`` is none, such as its name or its class."""
    if not isinstance(form, _Options):
        raise ArgumentTypeError(f"the form of a state dict is Full(), Sharded() or Local(), not {form!r}.")


# -- one tensor


def to_form(name: str, tensor: torch.Tensor, sharding: ParameterSharding | None, form: Form) -> torch.Tensor:
    """Return ``tensor`` in ``form``. For :class:`Full` this is a copy, and collective over the tensor's mesh."""
    if isinstance(form, Full):
        try:
            return assemble_full(tensor, sharding, form.offload_to_cpu)
        except Exception as error:  # the subclass's own code, which fails on all ranks
            local = local_part(tensor)
            if has_own_memory(local):
                raise
            raise CheckpointError(
                f"{name} cannot be gathered: its class {type(local).__name__} does not support it ({said(error)}). "
                "Use the form Sharded() or Local(), or composable_fsdp.checkpoint.save, which saves its inner tensors."
            ) from error
    value = tensor.detach()
    if isinstance(form, Local) or not isinstance(value, DTensor):
        value = local_part(value).detach()
        return value.cpu() if form.offload_to_cpu else value
    local = local_part(value)
    return alias_of(value, local.cpu() if form.offload_to_cpu else local)


def compare(name: str, target: torch.Tensor, value: object, form: Form | None, mismatch: Mismatch) -> None:
    """Add to ``mismatch`` why ``value`` cannot be loaded into ``target``. ``form`` is what the user passed."""
    is_local = isinstance(form, Local)
    shape = tuple((local_part(target) if is_local else target).shape)
    if not isinstance(value, torch.Tensor):
        mismatch.others.append(f"{name!r} is no tensor but of type {type(value).__name__}")
    elif isinstance(value, DTensor) and isinstance(form, (Full, Local)):
        mismatch.others.append(f"{name!r} is a DTensor: pass form=Sharded() instead of {type(form).__name__}()")
    elif isinstance(target, DTensor) and not isinstance(value, DTensor) and isinstance(form, Sharded):
        mismatch.others.append(f"{name!r} is a plain tensor: pass form=Full() or Local() instead of Sharded()")
    elif value.is_meta:
        mismatch.others.append(f"{name!r} is on the meta device and has no values")
    elif tuple(value.shape) != shape:
        where = " as this rank's part" if is_local and isinstance(target, DTensor) else ""
        mismatch.shapes[name] = differ(tuple(value.shape), f"{shape}{where}")
    elif _kind(value.dtype) != _kind(target.dtype):
        mismatch.dtypes[name] = differ(dtype_name(value.dtype), dtype_name(target.dtype))
    elif isinstance(value, DTensor) and not any(placement.is_partial() for placement in value.placements):
        found, wanted = tuple(local_part(value).shape), _local_shape(target, value)
        if found != wanted:
            mismatch.shapes[name] = differ(f"a local part of {found}", wanted)


def _local_shape(target: torch.Tensor, value: DTensor) -> tuple[int, ...]:
    """Return the shape that the local tensor of ``value`` must have, so that it can be redistributed.

    Placements cannot describe every uneven tensor-parallel shard that was sharded again. If ``target`` has the same
    placements, its own local shape is used.
    """
    return tuple(local_part(target).shape) if _has_same_placements(target, value) else extent_of(value).local_shape


def shard_for(
    target: torch.Tensor, sharding: ParameterSharding | None, value: torch.Tensor, form: Form | None
) -> torch.Tensor:
    """Return the values that this rank's shard of ``target`` takes from ``value``: a view of it where possible.

    Collective if ``value`` is a DTensor with other placements than ``target``: it is gathered temporarily.
    """
    if isinstance(value, DTensor):
        if _has_same_placements(target, value):
            return local_part(value)
        value = gather(value)
    elif isinstance(form, Local):
        return value
    return extent_of(target, sharding).take(value)


@torch.no_grad()
def fill(target: torch.Tensor, sharding: ParameterSharding | None, value: torch.Tensor, form: Form | None) -> None:
    """Copy this rank's shard of ``value`` into ``target``. Collective as :func:`shard_for` is."""
    fill_(local_part(target), shard_for(target, sharding, value.detach(), form))


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    return "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "integer"


def _has_same_placements(target: Any, value: DTensor) -> bool:
    """Return whether both have the same placements on the same ranks, on any device. All ranks get the same answer."""
    if not isinstance(target, DTensor) or target.placements != value.placements:
        return False
    here, there = target.device_mesh, value.device_mesh
    return here == there or torch.equal(here.mesh, there.mesh)
