"""All-gathers from a smaller mesh: forward keeps a slice, and backward gathers slices of neighbouring ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from composable_fsdp._consistency.process_groups import part_of
from composable_fsdp._core.comm import Communicator, communicator_over
from composable_fsdp._core.gather import AllGatherBuffers, AnyBucket, Bucket, Gatherable, InPlaceBucket
from composable_fsdp._core.group_plan import BucketPlan
from composable_fsdp._core.layout import TensorShards, plan_gather, take_shard
from composable_fsdp._core.memory import ShardStore
from composable_fsdp._core.mesh import DataParallelAxes, ProcessGroups
from composable_fsdp.errors import MeshError, UnsupportedError

# By the process group of the shard axis; then by type of device, because a process group can have a backend for each.
_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, int], dist.ProcessGroup]] = WeakKeyDictionary()


def smaller_shard_axis(axes: DataParallelAxes, size: int) -> Communicator:
    """Return the communicator of the ``size`` neighbouring shard ranks around this one, or of the shard axis.

    The shard axis is returned if it has no more than ``size`` ranks. All shard ranks must make the first call together.

    Raises:
        MeshError: ``size`` does not divide the shard axis.
    """
    if size >= axes.shard.size:
        return axes.shard
    if axes.shard.size % size:
        raise MeshError(
            f"reshard_after_forward={size} does not divide the {axes.shard.size} shard ranks of {axes.mesh}, over "
            "which some parameters of the group are sharded."
        )
    mesh = axes.mesh
    known, key = _groups.setdefault(mesh.get_group(mesh.ndim - 1), {}), (mesh.device_type, size)
    if key not in known:
        known[key] = part_of(mesh.get_group(mesh.ndim - 1), size)
    return communicator_over(known[key], mesh.device_type)


def cut_over(axes: Iterable[DataParallelAxes], size: int) -> Callable[[AnyBucket, int], Gatherable]:
    """Return :func:`sliced` for buckets on ``axes``, and make the process groups of ``size`` ranks that it needs.

    These need all ranks, and forwards may differ between ranks.
    """
    for each in dict.fromkeys(axes):
        smaller_shard_axis(each, size)
    return sliced


def sliced(bucket: AnyBucket, size: int) -> Gatherable:
    """Return what to gather again over ``size`` neighbouring ranks in place of the full ``bucket``.

    Raises:
        UnsupportedError: the tensors of ``bucket`` decide what is sent.
    """
    pgs = ProcessGroups(replace(bucket.pgs.axes, shard=smaller_shard_axis(bucket.pgs.axes, size)))
    if not isinstance(bucket, Bucket | InPlaceBucket):
        raise UnsupportedError(
            f"reshard_after_forward={size} cannot keep slices of parameter {bucket.parameters[0].name!r}, whose tensor "
            "class decides what is gathered. Pass reshard_after_forward=True or False."
        )
    slices = Slices(bucket, pgs) if isinstance(bucket, Bucket) else UsedAgain(bucket, pgs)
    slices.keep()
    return slices


def plan_slices(bucket: BucketPlan, num_shards: int, zero_copy_min_bytes: int) -> BucketPlan:
    """Return the plan of the same bucket on a smaller mesh, gathered into the existing unsharded buffer.

    A multiple of the larger number of shards is also a multiple of the smaller, so the padded places always fit.
    """
    layout = plan_gather(
        [TensorShards(s.shape, s.dim, num_shards) for s in bucket.gather.shards],
        itemsize=bucket.compute_dtype.itemsize,
        zero_copy_min_bytes=zero_copy_min_bytes,
        places=bucket.gather.places,
    )
    return replace(bucket, gather=layout, dtype=bucket.compute_dtype)


class Slices(Bucket):
    """This rank's slices of the full parameters of ``bucket``, decoded ones if they were encoded."""

    cached_part = None

    def __init__(self, bucket: Bucket, pgs: ProcessGroups) -> None:
        vars(self).update(vars(bucket))
        self.pgs = pgs
        self.plan = plan_slices(bucket.plan, pgs.gather.size, pgs.gather.traits.zero_copy_min_bytes)

    def keep(self) -> None:
        """Copy the slices."""
        self.gather_by(self.plan)
        layout, rank = self.plan.gather, self.pgs.gather.rank
        kept = torch.empty(layout.store.numel, dtype=self.plan.dtype, device=self.device)
        for shards, start, parameter in zip(layout.shards, layout.store.offsets, self.parameters, strict=True):
            take_shard(shards, parameter.full, rank, kept[start : start + shards.padded_numel])
        self.store = ShardStore(layout.shards, layout.store, rank, kept)


class UsedAgain:
    """The full parameters of ``bucket``, which are in place still: ranks of the smaller mesh only wait."""

    needs_barrier = False
    cached_part = None

    def __init__(self, bucket: InPlaceBucket, pgs: ProcessGroups) -> None:
        self._bucket, self.plan, self.pgs = bucket, bucket.plan, pgs
        self.sent_bytes, self.allocate_gather = bucket.sent_bytes, bucket.allocate_gather
        self.finish_gather = bucket.finish_gather

    def keep(self) -> None: ...

    def prepare_gather(self, cast: torch.Tensor | None) -> AllGatherBuffers:
        return self._bucket.use()
