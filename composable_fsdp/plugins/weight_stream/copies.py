"""Copies of parameters between models of one job."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdRef

from composable_fsdp._core.params import ShardedParameter, local_part
from composable_fsdp._extents import ShardExtent, extent_of, plain_name
from composable_fsdp.errors import ParameterError
from composable_fsdp.plugins.weight_stream.changed_params import SentParams, stream_changed_params
from composable_fsdp.plugins.weight_stream.flush import INTEGERS
from composable_fsdp.plugins.weight_stream.model_sources import prepare
from composable_fsdp.plugins.weight_stream.stream import BUCKET_BYTES, stream_full_params

__all__ = ["copy_params"]


_Versions = list[tuple[WeakIdRef, int]]
"""Parameters and their version counters."""
_LAST_COPIES: WeakKeyDictionary[nn.Module, tuple[ref[nn.Module], SentParams, _Versions]] = WeakKeyDictionary()
"""By target: the source of the last copy of changes, what was sent, and the streamed parameters as it left them."""


class _Names(frozenset[str]):
    """A ``key_map`` of the parameters of these names, equal to another one of the same names."""

    def __call__(self, name: str) -> str | None:
        return name if name in self else None


@torch.no_grad()
def copy_params(
    source: nn.Module, target: nn.Module, *, bucket_bytes: int = BUCKET_BYTES, changed: bool = False
) -> None:
    """Copy the values of all parameters of ``source`` to those of the same names in ``target``, in place.

    The models may be sharded over different meshes, on different dims, or not at all, and have other dtypes and
    devices; each rank must have a part of both. Parameters that are placed alike are copied without communication. All
    others are streamed bucket by bucket, which takes the memory of two buckets. All ranks must call it together.
    Buffers are not copied.

    Args:
        source: the module with the values.
        target: the module to write to.
        bucket_bytes: as for :func:`stream_full_params`.
        changed: stream only the values that differ from those of the last such copy between these models, as
            :func:`stream_changed_params` does. It keeps a copy of each shard of the source that is streamed, in host
            memory, while the target lives. Everything is streamed after another source, and after a change of the
            target that its version counters show: writes through ``.data`` do not.

    Raises:
        ParameterError: the models do not have the same names and shapes: nothing is copied then. With ``changed``, also
            if parameters that are streamed are of a dtype that safetensors lacks.
        LifecycleError: during a forward or backward of one of them.
    """
    own, others = (prepare(model, "copy_params") for model in (source, target))
    values, places = (
        {plain_name(name): tensor for name, tensor in model.named_parameters(remove_duplicate=False)}
        for model in (source, target)
    )
    problems = [f"{name} is only in the {'source' if name in values else 'target'}" for name in values.keys() ^ places]
    first: dict[int, str] = {}
    for name, place in places.items():
        value, known = values.get(name, place), first.setdefault(id(place), name)
        if value.shape != place.shape:
            problems.append(
                f"{name} is of shape {tuple(value.shape)} in the source and {tuple(place.shape)} in the target"
            )
        if values.get(known, value) is not value:
            problems.append(f"{known} and {name} are one parameter in the target and two in the source")
        problems += [
            f"{name} of the {where} is on the meta device"
            for where, tensor in (("source", value), ("target", place))
            if tensor.is_meta
        ]
    if problems:
        raise ParameterError(f"copy_params needs models with the same parameters: {'; '.join(sorted(problems))}.")
    wanted = {
        name: places[name] for name in first.values() if not _is_placed_alike(values[name], places[name], own, others)
    }
    of, sent, versions = _LAST_COPIES.pop(target, (None, SentParams(), []))  # it is back once this copy is complete
    if of is None or of() is not source or versions != _versions(wanted):
        sent.forget()
    for name in first.values():
        if name not in wanted:
            local_part(places[name]).copy_(local_part(values[name]).detach())

    def write(name: str, aliases: Mapping[str, str], new: torch.Tensor, indices: torch.Tensor | None = None) -> None:
        for each in (name, *(alias for alias, of in aliases.items() if of == name)):
            place, owner = local_part(wanted[each]), others.get(id(wanted[each]))
            extent = extent_of(wanted[each], None if owner is None else owner.sharding)
            if indices is None:
                place.copy_(extent.take(new))
            elif not extent.is_empty:
                at, held = _local_index(indices, extent)
                kind = INTEGERS.get(place.itemsize, place.dtype)  # torch has no put_ of some dtypes, such as float8
                bits = new[held].to(place.device, place.dtype).view(kind)
                place.view(kind).put_(at.to(place.device), bits)

    names = _Names(wanted)
    if not wanted:
        return
    if not changed:
        with stream_full_params(source, bucket_bytes, key_map=names) as stream:
            for bucket in stream:
                for name, full in bucket.items():
                    write(name, bucket.aliases, full)
        return
    with stream_changed_params(source, sent, bucket_bytes, key_map=names) as changes:
        for flush in changes:
            for patch in flush.patches():
                whole = patch.values.view(patch.shape) if patch.indices is None else patch.values
                write(patch.name, flush.aliases, whole, patch.indices)
    _LAST_COPIES[target] = ref(source), sent, _versions(wanted)


def _versions(tensors: Mapping[str, torch.Tensor]) -> _Versions:
    return [(WeakIdRef(tensor), local_part(tensor)._version) for tensor in tensors.values()]


def _local_index(indices: torch.Tensor, extent: ShardExtent) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices in the flattened shard of ``extent``, and which of ``indices`` of the full tensor it has."""
    at, stride = indices.long(), 1
    local, held = torch.zeros_like(at), torch.ones_like(at, dtype=torch.bool)
    for length, ranges in zip(reversed(extent.shape), reversed(extent.ranges), strict=True):
        chosen = torch.cat([torch.arange(each.start, each.stop, device=at.device) for each in ranges])
        own = torch.full((length,), -1, device=at.device)
        own[chosen] = torch.arange(chosen.numel(), device=at.device)
        own = own[at % length]
        held &= own >= 0
        local += own * stride
        at, stride = at // length, stride * chosen.numel()
    return local[held], held


def _is_placed_alike(
    value: torch.Tensor,
    place: torch.Tensor,
    own: Mapping[int, ShardedParameter],
    others: Mapping[int, ShardedParameter],
) -> bool:
    """Return whether each rank has the same part of both. All ranks get the same answer."""
    if not isinstance(value, DTensor) or not isinstance(place, DTensor):
        return not isinstance(value, DTensor) and not isinstance(place, DTensor)
    if value.device_mesh != place.device_mesh or value.placements != place.placements:
        return False
    owners = own.get(id(value)), others.get(id(place))  # who sharded them decides how uneven parts are cut
    one, other = (None if owner is None else owner.sharding.inner is None for owner in owners)
    return one == other
