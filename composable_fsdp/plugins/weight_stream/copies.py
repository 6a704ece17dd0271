"""Copies of parameters between models of one job."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp._core.params import ShardedParameter, local_part
from composable_fsdp._extents import extent_of, plain_name
from composable_fsdp.errors import ParameterError
from composable_fsdp.plugins.weight_stream.model_sources import prepare
from composable_fsdp.plugins.weight_stream.stream import BUCKET_BYTES, stream_full_params

__all__ = ["copy_params"]


@torch.no_grad()
def copy_params(source: nn.Module, target: nn.Module, *, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Copy the values of all parameters of ``source`` to those of the same names in ``target``, in place.

    The models may be sharded over different meshes, on different dims, or not at all, and have other dtypes and
    devices; each rank must have a part of both. Parameters that are placed alike are copied without communication. All
    others are streamed bucket by bucket, which takes the memory of two buckets. All ranks must call it together.
    Buffers are not copied.

    Args:
        source: the module with the values.
        target: the module to write to.
        bucket_bytes: as for :func:`stream_full_params`.

    Raises:
        ParameterError: the models do not have the same names and shapes. Nothing is copied then.
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
    wanted: dict[str, torch.Tensor] = {}
    for name in first.values():
        if _is_placed_alike(values[name], places[name], own, others):
            local_part(places[name]).copy_(local_part(values[name]).detach())
        else:
            wanted[name] = places[name]
    if not wanted:
        return
    with stream_full_params(source, bucket_bytes, key_map=lambda name: name if name in wanted else None) as stream:
        for bucket in stream:
            for name, full in bucket.items():
                for each in (name, *(alias for alias, of in bucket.aliases.items() if of == name)):
                    owner = others.get(id(wanted[each]))
                    extent = extent_of(wanted[each], None if owner is None else owner.sharding)
                    local_part(wanted[each]).copy_(extent.take(full))


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
