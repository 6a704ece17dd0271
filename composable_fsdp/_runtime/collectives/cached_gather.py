"""Gathers that are the same in every step: packed shards travel as they lie, in one message, straight to their places.

Most small groups are gathered so, and for them the host's time counts: all that does not change is listed once, for all
buckets that travel together. What must be encoded, moved between devices, or sent by itself is for ``gathering``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from composable_fsdp._comm.communicator import Communicator, Transfer
from composable_fsdp._layout.bucket_layout import aligned_bytes
from composable_fsdp._layout.strided_runs import PackedRun
from composable_fsdp._memory.streams import Work
from composable_fsdp._memory.unsharded_buffer import UnshardedBuffer
from composable_fsdp._runtime.collectives.grad_mode import without_grad

__all__ = ["AsItLies", "RepeatedGather", "Repetition", "repeated_gather"]


@dataclass(frozen=True, slots=True)
class AsItLies:
    """A bucket that travels so: ``packed``, 1-d, is cast to ``dtype`` and brings a row as long from every rank.

    Rows are cut into pieces of ``widths`` for ``places``, each ``(num_shards, width)``; or into ``runs``, whose places
    are ``(count, num_shards, padded_numel)``.
    """

    packed: torch.Tensor
    dtype: torch.dtype
    buffer: UnshardedBuffer
    places: Sequence[torch.Tensor]
    widths: Sequence[int] = ()
    runs: Sequence[PackedRun] = ()


def repeated_gather(parts: Sequence[AsItLies | None], communicators: Sequence[Communicator]) -> RepeatedGather | None:
    """The gather of all ``parts`` in one message over ``communicators``, one for each; ``None`` if that cannot be."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts) or any(other != communicators[0] for other in communicators):
        return None
    dtype, has_runs = known[0].dtype, bool(known[0].runs)
    for part in known:
        nbytes = part.packed.numel() * dtype.itemsize
        if part.dtype != dtype or bool(part.runs) != has_runs or nbytes != aligned_bytes(nbytes):
            return None
    return RepeatedGather(known, communicators[0])


class RepeatedGather:
    """One gather of ``parts`` over ``communicator``, to be launched as often as it is needed. Final."""

    def __init__(self, parts: Sequence[AsItLies], communicator: Communicator) -> None:
        self._communicator = communicator
        self._packed = [part.packed for part in parts]
        self._numel = sum(packed.numel() for packed in self._packed)
        self._dtype = parts[0].dtype
        self._buffers = [part.buffer for part in parts]
        self._places = [place for part in parts for place in part.places]
        self._widths = [width for part in parts for width in part.widths]
        self._runs: list[tuple[tuple[int, int, int], int, int]] = []
        start = 0
        for part in parts:
            for run in part.runs:
                shape = (run.count, communicator.size, run.padded_numel)
                self._runs.append((shape, run.width, start + run.start))
            start += part.packed.numel()

    def send(self, label: str) -> tuple[Work, torch.Tensor, torch.Tensor]:
        """The launched work, what is sent, and the rows that it brings, both to be kept until they were read."""
        numel, size, device = self._numel, self._communicator.size, self._packed[0].device
        allocate = self._communicator.allocate
        if len(self._packed) > 1:
            sent = torch.cat(self._packed, out=allocate(numel, self._dtype, device))
        else:
            sent = self._packed[0].to(self._dtype)
        received = allocate(size * numel, self._dtype, device)
        work = self._communicator.all_gather([Transfer(received, sent)], label)
        return work, sent, received.view(size, numel)

    def take(self, rows: torch.Tensor) -> None:
        """Copies ``rows`` to their places, which take no memory before that."""
        for buffer in self._buffers:
            buffer.allocate()
        if self._runs:
            begin = rows.storage_offset()
            sources = [rows.as_strided(shape, (step, self._numel, 1), begin + at) for shape, step, at in self._runs]
            torch._foreach_copy_(self._places, sources)
        elif len(self._places) == 1:
            self._places[0].copy_(rows)  # half of what the operation for several costs
        else:
            torch.split_with_sizes_copy(rows, self._widths, dim=1, out=self._places)


class Repetition:
    """One launch of ``gather``. Owns what is sent and received until nobody reads it."""

    writes_to_places = False
    """What comes is a message."""

    def __init__(self, gather: RepeatedGather, label: str) -> None:
        self._gather = gather
        self._label = label
        self._sent: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None

    @without_grad
    def launch(self) -> Work:
        work, self._sent, self._rows = self._gather.send(self._label)
        return work

    @without_grad
    def finish(self) -> None:
        assert self._rows is not None
        self._gather.take(self._rows)
