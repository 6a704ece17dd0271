"""Copies of parameters between models of one job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp._core.params import local_part
from composable_fsdp._extents import ShardExtent, extent_of, plain_name
from composable_fsdp.errors import ParameterError
from composable_fsdp.plugins.weight_stream.changed_params import SentParams, stream_changed_params
from composable_fsdp.plugins.weight_stream.flush import INTEGERS
from composable_fsdp.plugins.weight_stream.model_sources import prepare
from composable_fsdp.plugins.weight_stream.stream import BUCKET_BYTES, stream_full_params

__all__ = ["copy_params"]

_Versions = list[tuple[ref[torch.Tensor], int]]
"""Parameters and their version counters."""
_LAST_COPIES: WeakKeyDictionary[nn.Module, tuple[ref[nn.Module], SentParams, _Versions]] = WeakKeyDictionary()
"""By target: the source, what was copied, and the versions of the target's parameters after it."""


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
            :func:`stream_changed_params` does; it keeps a copy of each shard of the source in host memory, while the
            target lives. Everything is copied after another source, and after a change of the target that its version
            counters show: writes through ``.data`` do not.

    Raises:
        ParameterError: the models do not have the same names and shapes, or, with ``changed``, parameters that are
            streamed are of a tensor class, or of a dtype that safetensors lacks. Nothing is copied then.
        LifecycleError: during a forward or backward of one of them.
    """
    own, others = (prepare(model, "copy_params") for model in (source, target))
    values, places = _by_name(source), _by_name(target)
    problems = [f"{name} is only in the {'source' if name in values else 'target'}" for name in values.keys() ^ places]
    problems += [
        f"{name} is of shape {tuple(values[name].shape)} in the source and {tuple(places[name].shape)} in the target"
        for name in values.keys() & places
        if values[name].shape != places[name].shape
    ]
    first: dict[int, str] = {}
    for name, place in places.items():
        known = first.setdefault(id(place), name)
        if name in values and known in values and values[name] is not values[known]:
            problems.append(f"{known} and {name} are one parameter in the target and two in the source")
    problems += [
        f"{name} of the {where} is on the meta device"
        for where, found in (("source", values), ("target", places))
        for name, tensor in found.items()
        if tensor.is_meta
    ]
    if problems:
        raise ParameterError(f"copy_params needs models with the same parameters: {'; '.join(sorted(problems))}.")
    done = set[int]()
    wanted: dict[str, torch.Tensor] = {}
    for name, place in places.items():
        if id(place) in done:
            continue
        done.add(id(place))
        value = values[name]
        if _is_placed_alike(value, place, own, others):
            local_part(place).copy_(local_part(value).detach())
        else:
            wanted[name] = place
    if not wanted:
        return
    mapping = {name: name if name in wanted else None for name in values}
    if changed:
        _copy_changed(source, target, mapping, wanted, others, bucket_bytes)
        return
    with stream_full_params(source, bucket_bytes, key_map=mapping) as stream:
        for bucket in stream:
            for name, full in bucket.items():
                for local, extent in _places_of(name, bucket.aliases, wanted, others):
                    local.copy_(extent.take(full))


def _places_of(
    name: str, aliases: Mapping[str, str], wanted: Mapping[str, torch.Tensor], others: Mapping[int, Any]
) -> Iterator[tuple[torch.Tensor, ShardExtent]]:
    """Yield this rank's parts of the target's parameters that get the values of ``name``, and their extents."""
    for each in (name, *(alias for alias, first in aliases.items() if first == name)):
        place = wanted[each]
        owner = others.get(id(place))
        yield local_part(place), extent_of(place, None if owner is None else owner.sharding)


def _copy_changed(
    source: nn.Module,
    target: nn.Module,
    mapping: Mapping[str, str | None],
    wanted: Mapping[str, torch.Tensor],
    others: Mapping[int, Any],
    bucket_bytes: int,
) -> None:
    of, sent, versions = _LAST_COPIES.get(target, (None, SentParams(), []))
    if of is None or of() is not source or not _are_as_left(versions, wanted):
        sent.forget()
    _LAST_COPIES.pop(target, None)  # until this copy is complete
    with stream_changed_params(source, sent, bucket_bytes, key_map=mapping) as stream:
        for flush in stream:
            for name, shape, _, new, indices in flush.patches():
                for local, extent in _places_of(name, flush.parsed.aliases, wanted, others):
                    if indices is None:
                        local.copy_(extent.take(new.view(shape)))
                    elif not extent.is_empty:
                        at, held = _local_index(indices, extent)
                        values = new[held].to(local.device, local.dtype)
                        kind = INTEGERS.get(local.itemsize, local.dtype)
                        local.view(kind).put_(at.to(local.device), values.view(kind))  # torch has no put_ of float8
    _LAST_COPIES[target] = ref(source), sent, _versions(wanted)


def _versions(tensors: Mapping[str, torch.Tensor]) -> _Versions:
    return [(ref(tensor), local_part(tensor)._version) for tensor in tensors.values()]


def _are_as_left(versions: _Versions, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether the parameters are those of ``versions``, and nobody has written to them."""
    pairs = zip(versions, tensors.values(), strict=False)
    return len(versions) == len(tensors) and all(
        known() is tensor and version == local_part(tensor)._version for (known, version), tensor in pairs
    )


def _local_index(indices: torch.Tensor, extent: ShardExtent) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices in the flattened shard of ``extent``, and which of ``indices`` of the full tensor it has."""
    at, stride = indices.long(), 1
    local, held = torch.zeros_like(at), torch.ones_like(at, dtype=torch.bool)
    for length, ranges in zip(reversed(extent.shape), reversed(extent.ranges), strict=True):
        coordinates = torch.full((length,), -1, device=at.device)
        size = sum(map(len, ranges))
        coordinates[torch.cat([torch.arange(r.start, r.stop, device=at.device) for r in ranges])] = torch.arange(
            size, device=at.device
        )
        own = coordinates[at % length]
        held &= own >= 0
        local += own * stride
        at, stride = at // length, stride * size
    return local[held], held


def _by_name(model: nn.Module) -> dict[str, torch.Tensor]:
    return {plain_name(name): tensor for name, tensor in model.named_parameters(remove_duplicate=False)}


def _is_placed_alike(
    value: torch.Tensor, place: torch.Tensor, own: Mapping[int, Any], others: Mapping[int, Any]
) -> bool:
    """Return whether each rank has the same part of both. All ranks get the same answer."""
    if not isinstance(value, DTensor) or not isinstance(place, DTensor):
        return not isinstance(value, DTensor) and not isinstance(place, DTensor)
    if value.device_mesh != place.device_mesh or value.placements != place.placements:
        return False
    one, other = own.get(id(value)), others.get(id(place))  # who sharded them decides how uneven parts are cut
    return (one and one.sharding.inner is None) == (other and other.sharding.inner is None)
