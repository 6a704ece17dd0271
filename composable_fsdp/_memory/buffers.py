"""The flat memory of a bucket: its shards at rest, and its unsharded parameters.

One flat tensor of shards makes a cast, or a copy to or from host memory, one kernel, and the all-gather of packed
parameters needs no copy in. If user code replaces a local shard (``to_empty``, ``.to(dtype)``, loading with
``assign``), it is copied into a new store.

The buffer of unsharded parameters is freed and allocated again without invalidating its views. Autograd saves the
unsharded tensors and views of them, which stay valid only while their *storage object* lives. So freeing is
``resize_(0)`` on that storage, and the next all-gather fills the same storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from composable_fsdp._layout.bucket_layout import FlatLayout
from composable_fsdp._layout.shard import TensorShards

__all__ = [
    "OwnedBuffer",
    "ShardStore",
    "allocate_storage",
    "cast_and_move",
    "contiguous_strides",
    "view_at",
    "zero_padding",
]


def cast_and_move(shard: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return ``shard`` as ``dtype`` on ``device``, or ``shard`` itself if nothing changes. One kernel per bucket.

    A copy from page-locked host memory does not block the host.
    """
    if shard.dtype == dtype and shard.device == device:  # a tenth of the time of two conversions that do nothing
        return shard
    return shard.to(device, non_blocking=True).to(dtype)


class ShardStore:
    """The shards of ``rank`` in ``flat``. Invariant: padding is zero until user code writes to it.

    Args:
        shards: how the parameters are sharded.
        layout: offsets of the shards in ``flat``.
        rank: the rank that owns the shards.
        flat: 1-d memory, with padding of zeros.

    Attributes:
        locals: each parameter's shard, contiguous, shaped, without padding.
    """

    def __init__(self, shards: Sequence[TensorShards], layout: FlatLayout, rank: int, flat: torch.Tensor) -> None:
        self.flat = flat
        shapes = [s.shard_shape(rank) for s in shards]
        self.locals = [view_at(flat, offset, shape) for offset, shape in zip(layout.offsets, shapes, strict=True)]


def zero_padding(flat: torch.Tensor, layout: FlatLayout, shards: Sequence[TensorShards], rank: int) -> None:
    """Write zeros to ``flat`` except where the shards of ``rank`` are, whose pages of memory stay unused."""
    end = 0
    for offset, length in sorted(zip(layout.offsets, (prod(s.shard_shape(rank)) for s in shards), strict=True)):
        if end < offset:
            flat[end:offset].zero_()
        end = max(end, offset + length)
    if end < layout.numel:
        flat[end:].zero_()


def allocate_storage(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Resize ``storage`` to ``nbytes`` bytes, contents undefined if it grows. No other code allocates storages."""
    if storage.nbytes() != nbytes:  # resize_ would reallocate and copy even to the same size
        storage.resize_(nbytes)


class OwnedBuffer:
    """The memory of one bucket's full parameters, freed between uses. Allocated at first, so that it has views."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._flat = torch.empty(numel, dtype=dtype, device=device)
        self._storage = self._flat.untyped_storage()
        self._writable = self._flat.data
        self._full_nbytes = numel * dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self._storage.nbytes()

    def allocate(self) -> None:
        allocate_storage(self._storage, self._full_nbytes)

    def free(self) -> None:
        self._storage.resize_(0)

    def region(self, offset: int, length: int) -> torch.Tensor:
        return self._writable[offset : offset + length]

    def parameter_data(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        return view_at(self._flat.data, offset, shape)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of ``shape``."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def view_at(flat: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the contiguous view of ``shape`` at ``offset`` elements from the start of ``flat``."""
    return flat.as_strided(shape, contiguous_strides(shape), flat.storage_offset() + offset)
