"""All-gathers that are the same in every step: the packed shards of all buckets in one message, without other work.

Most small groups are gathered this way, and for them host time dominates. So everything that does not change is
computed once, for all buckets of the message. Buckets that must be encoded, moved between devices or sent zero-copy
take the path of ``all_gather``.
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

__all__ = ["CachedPart", "RepeatedGather", "RepeatedLaunch", "repeated_gather"]


@dataclass(frozen=True, slots=True)
class CachedPart:
    """One bucket of a cached all-gather: ``packed``, 1-d, is cast to ``dtype`` and gathered, one row per rank.

    Rows are split into ``widths`` and copied to ``places``, each ``(num_shards, width)``; or they are copied by
    ``runs``, whose places are ``(count, num_shards, padded_numel)``.
    """

    packed: torch.Tensor
    dtype: torch.dtype
    buffer: UnshardedBuffer
    places: Sequence[torch.Tensor]
    widths: Sequence[int] = ()
    runs: Sequence[PackedRun] = ()


def repeated_gather(parts: Sequence[CachedPart | None], communicators: Sequence[Communicator]) -> RepeatedGather | None:
    """Return the all-gather of all ``parts`` in one message, or ``None`` if they cannot share one.

    Args:
        parts: the part of each bucket; ``None`` for a bucket that cannot be cached.
        communicators: the communicator of each bucket.
    """
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
    """An all-gather of ``parts`` over ``communicator`` that can be launched any number of times. Final."""

    def __init__(self, parts: Sequence[CachedPart], communicator: Communicator) -> None:
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
        """Launch, and return the work, the sent message and the received rows. The caller keeps both until they are
        read.
        """
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
        """Copy ``rows`` to their places, whose memory is allocated only now."""
        for buffer in self._buffers:
            buffer.allocate()
        if self._runs:
            begin = rows.storage_offset()
            sources = [rows.as_strided(shape, (step, self._numel, 1), begin + at) for shape, step, at in self._runs]
            torch._foreach_copy_(self._places, sources)
        elif len(self._places) == 1:
            self._places[0].copy_(rows)  # half the host time of the operation for several
        else:
            torch.split_with_sizes_copy(rows, self._widths, dim=1, out=self._places)


class RepeatedLaunch:
    """One launch of ``gather``. Owns the messages until they are no longer read."""

    writes_to_places = False
    """Always false: the collective writes to a message."""

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
