"""The flat memory of a bucket: its shards at rest, and its unsharded parameters.

One flat tensor of shards makes a cast, or a copy to or from host memory, one kernel, and the all-gather of packed
parameters needs no copy in. If user code replaces a local shard (``to_empty``, ``.to(dtype)``, loading with
``assign``), it is copied into a new store. Ranks that share memory keep their shards there contiguously, so that the
shards of all ranks are the full parameters.

The buffer of unsharded parameters is freed and allocated again without invalidating its views. Autograd saves the
unsharded tensors and views of them, which stay valid only while their *storage object* lives. So freeing is
``resize_(0)`` on that storage, and the next all-gather fills the same storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch

from composable_fsdp._layout.bucket_layout import FlatLayout
from composable_fsdp._layout.shard import TensorShards

__all__ = [
    "AliasedBuffer",
    "OwnedBuffer",
    "ShardStore",
    "UnshardedBuffer",
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
        flat: 1-d memory, with padding of zeros. In shared memory, the rest of it belongs to other ranks.
        is_shared: True if ``flat`` is shared by ranks. Each shard then is a torch storage of its own: saving a tensor
            saves its storage, and this rank must save its own shards only.

    Attributes:
        locals: each parameter's shard, contiguous, shaped, without padding.
        versioned: tensors whose version counters together count the in-place changes of all shards that torch sees.
    """

    def __init__(
        self, shards: Sequence[TensorShards], layout: FlatLayout, rank: int, flat: torch.Tensor, *, is_shared: bool
    ) -> None:
        self.flat = flat
        self.is_shared = is_shared
        shapes = [s.shard_shape(rank) for s in shards]
        place = _part_of_storage if is_shared else view_at
        self.locals = [place(flat, offset, shape) for offset, shape in zip(layout.offsets, shapes, strict=True)]
        self.versioned = self.locals if is_shared else [flat]


def zero_padding(flat: torch.Tensor, layout: FlatLayout, shards: Sequence[TensorShards], rank: int) -> None:
    """Write zeros to ``flat`` except where the shards of ``rank`` are, whose pages of memory stay unused."""
    end = 0
    for offset, length in sorted(zip(layout.offsets, (prod(s.shard_shape(rank)) for s in shards), strict=True)):
        if end < offset:
            flat[end:offset].zero_()
        end = max(end, offset + length)
    if end < layout.numel:
        flat[end:].zero_()


def _part_of_storage(flat: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Like :func:`view_at`, with a storage that holds nothing else. It keeps all of the memory alive."""
    begin = (flat.storage_offset() + offset) * flat.itemsize
    storage = flat.untyped_storage()[begin : begin + prod(shape) * flat.itemsize]
    return torch.empty(0, dtype=flat.dtype).set_(storage, 0, shape, contiguous_strides(shape))


def allocate_storage(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Resize ``storage`` to ``nbytes`` bytes, contents undefined if it grows. No other code allocates storages."""
    if storage.nbytes() != nbytes:  # resize_ would reallocate and copy even to the same size
        storage.resize_(nbytes)


class UnshardedBuffer(Protocol):
    """The memory of one bucket's full parameters while they are unsharded."""

    @property
    def nbytes(self) -> int:
        """The memory in bytes that the buffer takes now, beside the shards."""
        ...

    def allocate(self) -> None:
        """Allocate the memory, contents undefined. Does nothing if it is allocated."""
        ...

    def free(self) -> None:
        """Free the memory. Does nothing if it is free."""
        ...

    def region(self, offset: int, length: int) -> torch.Tensor:
        """Return a 1-d view for writing that does not change the version counters of the parameters in it."""
        ...

    def parameter_data(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the view of one parameter, with a version counter of its own."""
        ...


class OwnedBuffer:
    """Memory of its own, freed to zero bytes between uses. Allocated at construction, so that views can be taken."""

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


class AliasedBuffer:
    """The memory of the shards, if one rank holds all or ranks share it: nothing is gathered or freed."""

    def __init__(self, store: torch.Tensor) -> None:
        self._flat = store

    @property
    def nbytes(self) -> int:
        return 0

    def allocate(self) -> None:
        pass

    def free(self) -> None:
        pass

    def region(self, offset: int, length: int) -> torch.Tensor:
        return self._flat.data[offset : offset + length]

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
