"""The plan of the buckets of a stream, and the all-gathers of the messages of a bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import cast

import torch

from composable_fsdp._core.comm import DONE, Collective, Communicator, Transfer
from composable_fsdp._core.layout import ALIGNMENT_BYTES
from composable_fsdp._core.memory import CommStream, InFlight, Work
from composable_fsdp.plugins.weight_stream.model_sources import ModelSources
from composable_fsdp.plugins.weight_stream.packed_layout import (
    HEADER_BYTES,
    MessageLayout,
    PackedLayout,
    Slot,
    fill_buckets,
    placed,
)
from composable_fsdp.plugins.weight_stream.weight_names import Named, Unit

__all__ = ["BucketGather", "BucketPlan", "plan_buckets"]


class BucketPlan:
    """The messages of a bucket and what is made of them: plain tensors, or one tensor of a wrapper class."""

    __slots__ = ("direct", "layout", "messages", "whole")

    def __init__(
        self,
        layout: PackedLayout,
        messages: tuple[Sequence[MessageLayout], Sequence[tuple[int, Slot]]],
        whole: Unit | None = None,
    ) -> None:
        self.layout, self.whole = layout, whole
        self.messages, self.direct = messages

    def sizes(self) -> tuple[object, ...]:
        """Return the sizes of all transfers, which must be the same on all ranks."""
        of_messages = [(m.route, m.width, [(s.source, str(s.dtype)) for s in m.slots]) for m in self.messages]
        of_direct = [(axis, slot.row_bytes, slot.source, str(slot.dtype)) for axis, slot in self.direct]
        return of_messages, of_direct, None if self.whole is None else self.whole.members


def plan_buckets(
    sources: ModelSources, units: Sequence[Unit], named: Sequence[Named], bucket_bytes: int
) -> list[BucketPlan]:
    """Return the plans of buckets of ``units``, parameters of plain tensors."""
    costs = [max(unit.nbytes, sum(sources.received_bytes(i, named[i]) for i in unit.members)) for unit in units]
    plans = []
    for bucket in fill_buckets(costs, bucket_bytes):
        chosen = units[bucket.start : bucket.stop]
        layout, offsets = placed(chosen)
        plans.append(BucketPlan(layout, sources.messages(chosen, offsets, named)))
    return plans


Pack = Callable[[MessageLayout, torch.Tensor], None]
"""Writes what this rank sends in a message to its row, after the header."""


class BucketGather:
    """The all-gathers of some messages, over one axis after the other. Owns the messages.

    On devices without streams the first one is launched at once, and the others when the result is waited for.
    """

    def __init__(
        self, sources: ModelSources, plan: BucketPlan, header: Sequence[int], label: str, pack: Pack | None = None
    ) -> None:
        self._sources, self._plan, self._label = sources, plan, label
        self._pack = pack or sources.pack
        self._messages = plan.messages
        self._device = sources.device
        self._packed: torch.Tensor | None = None
        self._next = 0
        self._own = header
        self._rows: list[torch.Tensor | None] = [None] * len(plan.messages)
        self.header: Sequence[int] = header
        """The largest numbers in the headers of all ranks, once it has arrived."""
        self.is_launched = False
        """Other ranks may have received something of it."""

    def run(self, stream: CommStream) -> InFlight[None]:
        """Launch it on ``stream``."""
        launch = partial(self._launch, has_streams=stream.device.has_streams)
        return stream.run(launch, self._finish, finish_in_wait=True)

    def take_rows(self, k: int) -> torch.Tensor:
        """Return what was received of message ``k``, a row of each rank of its route, and forget it."""
        rows, self._rows[k] = self._rows[k], None
        assert rows is not None
        return rows.view(-1, self._messages[k].width)

    def unpack(self) -> torch.Tensor:
        """Return the memory of the bucket with all tensors, and free what was received."""
        packed = self._bucket_memory()
        for k, message in enumerate(self._messages):
            rows, self._rows[k] = self._rows[k], None
            if message.slots:
                if rows is None:  # no axis cuts these
                    rows = torch.empty(message.width, dtype=torch.uint8, device=self._device)
                    self._write_row(message, None, rows)
                message.unpack(rows, packed)
        return packed

    def _bucket_memory(self) -> torch.Tensor:
        if self._packed is None:
            self._packed = torch.empty(self._plan.layout.nbytes, dtype=torch.uint8, device=self._device)
            self._packed[-ALIGNMENT_BYTES:].zero_()  # the end may belong to no tensor
        return self._packed

    def _launch(self, *, has_streams: bool) -> Work:
        work = self._launch_next()
        while has_streams and self._next < len(self._sources.axes):
            work.wait()
            work = self._launch_next()
        return work

    def _finish(self) -> None:
        while self._next < len(self._sources.axes):
            self._launch_next().wait()
        known = self._known()
        self.header = self._own if known is None else known.tolist()

    def _launch_next(self) -> Work:
        """Launch the all-gather over the next axis, of all messages whose route has it."""
        if self._next == len(self._sources.axes):
            return DONE
        number, known, transfers = self._next, self._known(), []
        self._next += 1
        axis = self._sources.axes[number]
        for k, message in enumerate(self._messages):
            if number in message.route:
                rows = self._rows[k] = self._rows_for(axis, message, self._rows[k], known)
                transfers.append(Transfer(rows.view(-1), rows[axis.rank].view(-1)))
        for slot in (slot for on, slot in self._plan.direct if on == number):
            rows = self._bucket_memory()[slot.place : slot.place + axis.size * slot.row_bytes]
            row = rows[axis.rank * slot.row_bytes : (axis.rank + 1) * slot.row_bytes]
            transfers.append(Transfer(rows, row if self._own[0] else self._sources.shard_in(slot, row)))
        self.is_launched = True
        return axis.launch(Collective.ALL_GATHER, transfers, self._label)

    def _rows_for(
        self, axis: Communicator, message: MessageLayout, before: torch.Tensor | None, known: torch.Tensor | None
    ) -> torch.Tensor:
        """Return memory for the rows of all ranks of ``axis``, with that of this rank, all that it has received."""
        shape = (message.width,) if before is None or not message.slots else tuple(before.shape)
        numel = axis.size * prod(shape)
        rows = axis.allocate(numel, torch.uint8, self._device).view(axis.size, *shape)
        sent = rows[axis.rank]
        if before is None:
            self._write_row(message, known, sent)
        elif not message.slots:  # one header for all ranks that sent one
            assert known is not None
            sent.copy_(known.view(torch.uint8))
        else:
            sent.copy_(before)
            headers = sent.view(torch.int64)[..., : HEADER_BYTES // 8]
            torch.maximum(headers, cast(torch.Tensor, known), out=headers)
        return rows

    def _write_row(self, message: MessageLayout, known: torch.Tensor | None, row: torch.Tensor) -> None:
        """Write the header and the shards of this rank to ``row``. A rank that has left sends a header only."""
        header = row[:HEADER_BYTES].view(torch.int64)
        header.copy_(torch.tensor(self._own, dtype=torch.int64))
        if known is not None:
            torch.maximum(header, known, out=header)
        if not self._own[0]:
            self._pack(message, row)

    def _known(self) -> torch.Tensor | None:
        """Return the largest numbers in the headers that have arrived, ``None`` if none has."""
        found = [rows.view(torch.int64)[..., : HEADER_BYTES // 8] for rows in self._rows if rows is not None]
        if not found:
            return None
        return torch.cat([headers.reshape(-1, HEADER_BYTES // 8) for headers in found]).amax(0)
