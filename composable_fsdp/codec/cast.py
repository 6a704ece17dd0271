"""The codec of mixed precision: one cast of the whole bucket."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Cast"]


@dataclass(frozen=True, slots=True)
class Cast:
    """Travels as ``dtype``. One kernel per bucket, or none where the shards already have that dtype and device."""

    dtype: torch.dtype

    def encode(self, shard: torch.Tensor, device: torch.device) -> torch.Tensor:
        """``shard`` as ``dtype`` on ``device``. A copy from page-locked host memory does not block the host."""
        return shard.to(device, non_blocking=True).to(self.dtype)
