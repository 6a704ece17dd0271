"""What a codec is."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["Codec"]


class Codec(Protocol):
    """How one bucket's flat shard travels. A codec is a value: frozen, without state, the same on every rank.

    Invariant: the payload has as many elements as the shard, in the same order, and the dtype of the unsharded
    parameters, so that an all-gather may land straight in its place.
    """

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the payload and of the unsharded parameters."""
        ...

    def encode(self, shard: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The payload of ``shard`` (1-d, contiguous) on ``device``; ``shard`` itself where nothing changes."""
        ...
