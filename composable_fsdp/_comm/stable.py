"""A communicator whose message buffers stay at one address, as CUDA graphs need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from composable_fsdp._comm.communicator import GroupCommunicator
from composable_fsdp._memory.device_capabilities import DeviceCapabilities

__all__ = ["StableCommunicator"]

_users: Callable[[int], int] = torch._C._storage_Use_Count


class StableCommunicator:
    """``base`` with message buffers that are kept, and given out again when nothing else refers to them. Final.

    Steps that allocate and release in the same order then get the same addresses. A buffer is given out again only on
    the stream that it was given out on before, as torch's caching allocators do.
    """

    def __init__(self, base: GroupCommunicator, device: DeviceCapabilities) -> None:
        self.base, self._device = base, device
        self.group, self.rank, self.size = base.group, base.rank, base.size
        self.averages, self.widens = base.averages, base.widens
        self.aliases, self.coalesces = base.aliases, base.coalesces
        self.zero_copy_min_bytes = base.zero_copy_min_bytes
        self.grad_bucket_bytes = base.grad_bucket_bytes
        self.all_gather, self.reduce_scatter = base.all_gather, base.reduce_scatter
        self.all_to_all, self.all_reduce = base.all_to_all, base.all_reduce
        self._kept: dict[tuple[Any, int, torch.dtype, torch.device], list[tuple[torch.Tensor, int]]] = {}
        """Buffers, each with the users of its memory while it is not given out."""

    def __eq__(self, other: object) -> bool:
        """Return whether collectives of both communicators can share one launch."""
        return isinstance(other, StableCommunicator) and self.base == other.base

    def __hash__(self) -> int:
        return hash(self.base)

    def with_pool(self, pooled: bool) -> StableCommunicator:
        """Return a communicator of the same ranks that allocates with the backend's allocator or with torch's."""
        return StableCommunicator(self.base.with_pool(pooled), self._device)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        kept = self._kept.setdefault((self._device.module.current_stream(), numel, dtype, device), [])
        for buffer, users in kept:
            if _users(buffer.untyped_storage()._cdata) == users:
                return buffer.view(numel)
        buffer = self.base.allocate(numel, dtype, device)
        kept.append((buffer, _users(buffer.untyped_storage()._cdata)))
        return buffer.view(numel)
