"""Where the shards of one bucket rest: one flat tensor, of which every local shard is a view.

So a cast, or a copy to or from host memory, is one kernel, and the all-gather of the packed parameters needs no copy
in. When somebody replaces a local shard (``to_empty``, ``.to(dtype)``, loading with ``assign``), a new store adopts it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from composable_fsdp.layout.bucket import FlatLayout
from composable_fsdp.layout.shard import TensorShards
from composable_fsdp.memory.storage import contiguous_strides

__all__ = ["ShardStore", "carry"]


def carry(shard: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``shard`` as ``dtype`` on ``device``; itself where nothing changes. One kernel per bucket.

    A copy from page-locked host memory does not block the host.
    """
    return shard.to(device, non_blocking=True).to(dtype)


class ShardStore:
    """The flat shards of ``rank``. Invariant: padding is zero until somebody writes to it on purpose."""

    def __init__(
        self,
        shards: Sequence[TensorShards],
        layout: FlatLayout,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        pin_memory: bool = False,
    ) -> None:
        self._shards = tuple(shards)
        self._layout = layout
        self._rank = rank
        self.flat = torch.zeros(layout.numel, dtype=dtype, device=device, pin_memory=pin_memory)

    def local(self, index: int) -> torch.Tensor:
        """View of one parameter's shard, contiguous, shaped, without padding."""
        shape = self._shards[index].shard_shape(self._rank)
        return self.flat.as_strided(shape, contiguous_strides(shape), self._layout.offsets[index])
