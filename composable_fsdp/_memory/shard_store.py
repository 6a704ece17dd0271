"""Where the shards of one bucket rest: one flat tensor, in which every local shard has its place.

So a cast, or a copy to or from host memory, is one kernel, and the all-gather of the packed parameters needs no copy
in. When somebody replaces a local shard (``to_empty``, ``.to(dtype)``, loading with ``assign``), a new store adopts it.

Ranks that have memory in common keep their shards there, next to each other, so that they are the full parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from composable_fsdp._layout.bucket_layout import FlatLayout
from composable_fsdp._layout.shard import TensorShards
from composable_fsdp._memory.unsharded_buffer import contiguous_strides, view_at

__all__ = ["ShardStore", "carry"]


def carry(shard: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``shard`` as ``dtype`` on ``device``; itself where nothing changes. One kernel per bucket.

    A copy from page-locked host memory does not block the host.
    """
    if shard.dtype == dtype and shard.device == device:  # asking costs a tenth of what two conversions to the same do
        return shard
    return shard.to(device, non_blocking=True).to(dtype)


class ShardStore:
    """The shards of ``rank`` in ``flat``. Invariant: padding is zero until somebody writes to it on purpose.

    Args:
        shards: how the parameters are cut.
        layout: where their shards lie in ``flat``.
        rank: whose they are.
        flat: 1-d memory, zeros. What lies beside the shards belongs to other ranks where they have it in common.
        in_common: whether they do. Then each shard is a storage of its own, as far as torch can see: saving a tensor
            saves its storage, and this rank's is all that it may save.

    Attributes:
        locals: each parameter's shard, contiguous, shaped, without padding.
        counted: tensors whose versions count, together, the changes in place of all shards that torch sees.
    """

    def __init__(
        self, shards: Sequence[TensorShards], layout: FlatLayout, rank: int, flat: torch.Tensor, *, in_common: bool
    ) -> None:
        self.flat = flat
        self.in_common = in_common
        shapes = [s.shard_shape(rank) for s in shards]
        place = _part_of_storage if in_common else view_at
        self.locals = [place(flat, offset, shape) for offset, shape in zip(layout.offsets, shapes, strict=True)]
        self.counted = self.locals if in_common else [flat]


def _part_of_storage(flat: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    """As :func:`view_at`, with a storage that has nothing else. It keeps the whole memory alive."""
    begin = (flat.storage_offset() + offset) * flat.itemsize
    storage = flat.untyped_storage()[begin : begin + prod(shape) * flat.itemsize]
    return torch.empty(0, dtype=flat.dtype).set_(storage, 0, shape, contiguous_strides(shape))
