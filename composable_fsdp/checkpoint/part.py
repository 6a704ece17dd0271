"""What this rank holds of one tensor: where that is in the whole, and its memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch.distributed.tensor import DTensor

from composable_fsdp.broadcast import fill_
from composable_fsdp.layout.extent import Extent
from composable_fsdp.placed import extent_of
from composable_fsdp.runtime.parameter import local_part
from composable_fsdp.sharding import ParameterSharding

__all__ = ["Part"]


@dataclass(frozen=True, eq=False)
class Part:
    """This rank's part of ``value``, which ``fully_shard`` cut as ``sharding`` says, if it did."""

    value: torch.Tensor
    sharding: ParameterSharding | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self.value.shape)

    @cached_property
    def extent(self) -> Extent:
        """Where it is in the whole."""
        return extent_of(self.value, self.sharding)

    @cached_property
    def local(self) -> torch.Tensor:
        """Its memory, of the shape that the extent says."""
        return local_part(self.value).detach()

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
            part.copy_(local)
        yield part
        if write:
            fill_(local if isinstance(self.value, DTensor) else self.value, part)
