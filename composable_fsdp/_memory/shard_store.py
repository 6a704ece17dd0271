"""The flat tensor that holds all local shards of one bucket.

One flat tensor makes a cast, or a copy to or from host memory, one kernel, and the all-gather of packed parameters
needs no copy in. If user code replaces a local shard (``to_empty``, ``.to(dtype)``, loading with ``assign``), it is
copied into a new store.

Ranks that share memory keep their shards there contiguously, so that the shards of all ranks are the full parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from composable_fsdp._layout.bucket_layout import FlatLayout
from composable_fsdp._layout.shard import TensorShards
from composable_fsdp._memory.unsharded_buffer import contiguous_strides, view_at

__all__ = ["ShardStore", "cast_and_move"]


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
        flat: 1-d memory, zeros. In shared memory, the rest of it belongs to other ranks.
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


def _part_of_storage(flat: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Like :func:`view_at`, with a storage that holds nothing else. It keeps all of the memory alive."""
    begin = (flat.storage_offset() + offset) * flat.itemsize
    storage = flat.untyped_storage()[begin : begin + prod(shape) * flat.itemsize]
    return torch.empty(0, dtype=flat.dtype).set_(storage, 0, shape, contiguous_strides(shape))
