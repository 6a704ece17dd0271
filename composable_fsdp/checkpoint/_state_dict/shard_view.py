"""This rank's shard of one tensor: its extent in the global tensor, and its memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from math import prod
from zlib import crc32

import torch
from torch.distributed.tensor import DTensor

from composable_fsdp._comm.broadcast import fill_
from composable_fsdp._layout.block import ShardExtent
from composable_fsdp._runtime.params.sharded_param import local_part
from composable_fsdp._runtime.shard_extent import extent_of, has_own_memory
from composable_fsdp._sharding.param_sharding import ParameterSharding
from composable_fsdp.checkpoint._coordination.mismatch import said
from composable_fsdp.errors import CheckpointError

__all__ = ["LocalShard", "checksum"]


class LocalShard:
    """This rank's shard of a tensor. Final.

    ``sharding`` is its sharding by ``fully_shard``, if any. ``extent`` is that of the plain tensor ``value`` in a
    larger tensor, if it is a piece of one.
    """

    def __init__(
        self, value: torch.Tensor, sharding: ParameterSharding | None = None, *, extent: ShardExtent | None = None
    ) -> None:
        self.value = value
        self.sharding = sharding
        self._given = extent

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the global tensor."""
        return tuple(self.value.shape) if self._given is None else self._given.shape

    @cached_property
    def extent(self) -> ShardExtent:
        """The extent of the shard in the global tensor."""
        return extent_of(self.value, self.sharding) if self._given is None else self._given

    @cached_property
    def local(self) -> torch.Tensor:
        """The shard's memory, shaped like the extent; a plain view if the subclass has no ``__torch_dispatch__``."""
        local = local_part(self.value).detach()
        is_special = type(local) is not torch.Tensor and has_own_memory(local)
        return local.as_subclass(torch.Tensor) if is_special else local

    @property
    def numel(self) -> int:
        return prod(self.extent.local_shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.value.dtype.itemsize

    def blocks(self, local: torch.Tensor | None = None) -> dict[tuple[int, ...], torch.Tensor]:
        """Return contiguous blocks of the global tensor by offset, as views of ``local`` (default: the shard's memory).

        A tensor without elements has one block on every rank, so that the checkpoint contains it too.
        """
        memory = self.local if local is None else local
        if 0 in self.shape:
            return {(0,) * len(self.shape): memory.new_empty(self.shape)}
        return {box.offsets: box.of_part(memory) for box in self.extent.boxes()}

    @contextmanager
    def plain(self, *, write: bool) -> Iterator[torch.Tensor]:
        """Yield the shard as a plain tensor that can be viewed and written block by block.

        This is ``local`` itself, or a copy for a subclass or an expanded tensor, copied back at the end if ``write``.
        """
        local = self.local
        if type(local) is torch.Tensor and torch._debug_has_internal_overlap(local) != 1:
            yield local
            return
        copy = torch.empty(local.shape, dtype=local.dtype, device=local.device)
        if not write:
            try:
                copy.copy_(local)
            except Exception as error:  # the subclass's own code
                raise CheckpointError(
                    f"a {type(local).__name__} cannot be copied to a plain tensor ({said(error)}). "
                    "composable_fsdp.checkpoint.save keeps such tensors as they are."
                ) from error
        yield copy
        if write:
            fill_(local if isinstance(self.value, DTensor) else self.value, copy)


def checksum(value: torch.Tensor) -> int:
    """Return a CRC-32 of the shape, the dtype and the bytes."""
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return crc32(data.numpy().data, crc32(repr((tuple(value.shape), value.dtype)).encode()))
