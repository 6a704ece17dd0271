"""Process groups of torch: parts of them, their timeouts, an operation that is lost, and collectives of setup."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp._core.comm import Communicator, is_over_group
from composable_fsdp._core.memory import is_host
from composable_fsdp._core.seams import runs_unseen
from composable_fsdp.errors import PeerError


class LostError(PeerError):
    """An operation failed in the backend, for a reason that other ranks know.

    Args:
        text: what the backend says.
        timed_out: the timeout of the process group is over.
    """

    def __init__(self, text: str, *, timed_out: bool) -> None:
        super().__init__(text)
        self.timed_out = timed_out


def part_of(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """Return a new process group of ``size`` neighbouring ranks of ``group``, this one among them.

    ``size`` divides the number of ranks. All ranks of ``group`` must call it together, and no other rank of the job.
    ``new_group`` would wait for those where a device is bound to the default group; torchcomms has no other way.
    """
    world, known = cast(Any, dist.group.WORLD), cast(Any, group)
    bound, number = world.bound_device_id, dist.get_world_size(group)
    is_bound = bound is not None and torch.device(bound.type) in known._device_types
    is_torchcomms = getattr(getattr(dist, "config", None), "use_torchcomms", False)
    if is_torchcomms or (is_bound and known._get_backend(bound).supports_splitting):
        parts = [list(range(first, first + size)) for first in range(0, number, size)]
        return cast(dist.ProcessGroup, cast(Any, dist).split_group(group, parts))
    first = dist.get_rank(group) // size * size
    ranks = dist.get_process_group_ranks(group)[first : first + size]
    return cast(dist.ProcessGroup, dist.new_group(ranks, use_local_synchronization=True))


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return the timeout of ``group`` in seconds, that of its CPU backend if it has one; the default if none tells."""
    backend: Any = group
    if type(group) is dist.ProcessGroup:
        backend = group._get_backend(min(group._device_types, key=lambda device: not is_host(device)))
    timeout = getattr(getattr(backend, "options", None), "_timeout", dist.distributed_c10d.default_pg_timeout)
    return cast(timedelta, timeout).total_seconds()


# -- Collectives of setup: tensors from the first rank of a mesh to all of its ranks, and objects from every rank

T = TypeVar("T")

MESSAGE_BYTES = 32 << 20
"""Small tensors are packed into buckets of up to this size. A larger tensor is sent alone, without a copy."""


@torch.no_grad()
def broadcast_(tensors: Iterable[torch.Tensor], mesh: DeviceMesh) -> None:
    """Overwrite ``tensors`` in place with those of the first rank of ``mesh``, along all of its axes.

    All ranks of the mesh must pass plain tensors of the same shapes and dtypes, of any dtype, in the same order. They
    may be on any device, and are sent on the mesh's.
    """
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    if not groups:
        return
    for bucket in _buckets(tensors):
        # As bytes, since not every backend supports every dtype. Each iteration makes one more axis agree.
        sent = [t.detach().to(mesh.device_type).resolve_conj().resolve_neg().contiguous() for t in bucket]
        sent = [t.as_strided((t.numel(),), (1,)) for t in sent]  # views keep other strides of single elements
        zero_copy = len(bucket) == 1 and sent[0].data_ptr() == bucket[0].data_ptr()
        flat = sent[0].view(torch.uint8) if zero_copy else torch.cat([each.view(torch.uint8) for each in sent])
        for group in groups:
            dist.broadcast(flat, group=group, group_src=0)
        if not zero_copy:
            for tensor, piece in zip(bucket, flat.split([t.nbytes for t in bucket]), strict=True):
                fill_(tensor, piece.view(tensor.dtype).view(tensor.shape))


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group non-empty tensors into buckets of up to ``MESSAGE_BYTES``, so that each one's bytes are aligned."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in sorted((each for each in tensors if each.numel()), key=lambda each: -each.itemsize):
        if bucket and size + tensor.nbytes > MESSAGE_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def fill_(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrite ``tensor``, which may be expanded, with ``values`` of the same shape from any device."""
    if torch._debug_has_internal_overlap(tensor) == 1:  # torch refuses to copy: elements share memory
        tensor.data = values.to(tensor.device, tensor.dtype, copy=True)
    else:
        tensor.copy_(values)


@runs_unseen
def gather_objects(own: T, axis: Communicator | dist.ProcessGroup) -> list[T]:
    """Return ``own`` of every rank of ``axis``, in rank order. For setup only. All ranks must call it together."""
    if isinstance(axis, dist.ProcessGroup):
        group = axis
    elif is_over_group(axis):
        group = axis.group
    else:
        return [own] * axis.size
    gathered = [own] * dist.get_world_size(group)
    with torch.device("cpu"):  # the caller may have set another default device
        dist.all_gather_object(gathered, own, group=group)
    return gathered
