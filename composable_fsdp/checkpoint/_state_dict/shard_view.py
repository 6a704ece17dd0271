"""What this rank holds of one tensor: where that is in the whole, and its memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from math import prod
from zlib import crc32

import torch
from torch.distributed.tensor import DTensor

from composable_fsdp._comm.broadcast import fill_
from composable_fsdp._layout.block import Extent
from composable_fsdp._runtime.params.sharded_param import local_part
from composable_fsdp._runtime.shard_extent import extent_of, has_own_memory
from composable_fsdp._sharding.param_sharding import ParameterSharding
from composable_fsdp.checkpoint._coordination.mismatch import said
from composable_fsdp.errors import CheckpointError

__all__ = ["Part", "checksum"]


class Part:
    """This rank's part of a tensor. Final.

    Args:
        value: the tensor.
        sharding: how ``fully_shard`` cut it, if it did.
        extent: which part of a larger tensor the plain tensor ``value`` is, where nothing else says so.
    """

    def __init__(
        self, value: torch.Tensor, sharding: ParameterSharding | None = None, *, extent: Extent | None = None
    ) -> None:
        self.value = value
        self.sharding = sharding
        self._given = extent

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self.value.shape) if self._given is None else self._given.shape

    @cached_property
    def extent(self) -> Extent:
        """Where it is in the whole."""
        return extent_of(self.value, self.sharding) if self._given is None else self._given

    @cached_property
    def local(self) -> torch.Tensor:
        """Its memory, of the shape that the extent says. A plain view of it where the tensor is of a class of its own
        that has no ``__torch_dispatch__``.
        """
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
        """Contiguous blocks of the whole, by their offsets, as views of ``local`` or of another tensor that stands for
        it. A tensor without elements has one, on every rank, so that it is in the checkpoint too.
        """
        memory = self.local if local is None else local
        if 0 in self.shape:
            return {(0,) * len(self.shape): memory.new_empty(self.shape)}
        return {box.offsets: box.of_part(memory) for box in self.extent.boxes()}

    @contextmanager
    def plain(self, *, write: bool) -> Iterator[torch.Tensor]:
        """It as a plain tensor, which may be viewed and written block by block; writes stay with ``write``. That is
        ``local`` itself, but a copy of a tensor of a class of its own, and of an expanded one.
        """
        local = self.local
        if type(local) is torch.Tensor and torch._debug_has_internal_overlap(local) != 1:
            yield local
            return
        part = torch.empty(local.shape, dtype=local.dtype, device=local.device)
        if not write:
            try:
                part.copy_(local)
            except Exception as error:  # code of the class
                raise CheckpointError(
                    f"a {type(local).__name__} cannot be copied to a plain tensor ({said(error)}). "
                    "composable_fsdp.checkpoint.save keeps such tensors as they are."
                ) from error
        yield part
        if write:
            fill_(local if isinstance(self.value, DTensor) else self.value, part)


def checksum(value: torch.Tensor) -> int:
    """Compute a CRC-32 of the shape, the dtype and the bytes."""
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return crc32(data.numpy().data, crc32(repr((tuple(value.shape), value.dtype)).encode()))
