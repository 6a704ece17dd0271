"""The plan of the buckets of a stream, and the all-gathers of a bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch

from composable_fsdp._core.comm import DONE, Collective, Transfer
from composable_fsdp._core.layout import ALIGNMENT_BYTES
from composable_fsdp._core.memory import CommStream, InFlight, Work
from composable_fsdp.plugins.weight_stream.model_sources import ModelSources, pack
from composable_fsdp.plugins.weight_stream.packed_layout import MessageLayout, PackedLayout, Slot, fill_buckets, placed
from composable_fsdp.plugins.weight_stream.weight_names import Unit

__all__ = ["BucketGather", "BucketPlan", "plan_buckets"]


class BucketPlan(NamedTuple):
    """The messages of a bucket and what is made of them, or a parameter that its class gathers.

    Args:
        layout: the tensors of the bucket.
        messages: one for each route.
        direct: large tensors that one axis shards evenly, which are gathered into the bucket without a message.
        pack: writes what this rank sends in a message to its row.
        wrapped: the parameter that its class gathers.
    """

    layout: PackedLayout = PackedLayout((), 0)
    messages: Sequence[MessageLayout] = ()
    direct: Sequence[Slot] = ()
    pack: Callable[[MessageLayout, torch.Tensor], None] = pack
    wrapped: Unit | None = None

    def sizes(self) -> object:
        """Return the sizes of all transfers, which must be the same on all ranks."""
        slots = [*self.direct, *(slot for message in self.messages for slot in message.slots)]
        widths = [(message.route, message.width) for message in self.messages]
        whole = self.wrapped and self.wrapped.members
        return widths, whole, len(self.direct), [(slot.source.names[0], str(slot.tensor.dtype)) for slot in slots]


def plan_buckets(sources: ModelSources, units: Sequence[Unit], bucket_bytes: int) -> list[BucketPlan]:
    """Return the plans of buckets of ``units``."""
    members = [[sources.sources[i] for i in unit.members] for unit in units]
    costs = [
        max(unit.nbytes, sum(map(sources.received_bytes, of_unit)))
        for unit, of_unit in zip(units, members, strict=True)
    ]
    plans = []
    for bucket in fill_buckets(costs, bucket_bytes):
        layout, offsets = placed(units[bucket.start : bucket.stop])
        direct: list[Slot] = []
        by_route: dict[tuple[int, ...], list[Slot]] = {}
        for unit, place in offsets:
            for source in (sources.sources[i] for i in unit.members):
                tensor, slot = source.distribution, Slot(source, source.distribution, place)
                place += tensor.nbytes
                is_even = len(source.route) == 1 and tensor.concatenates and tensor.shape[0] % tensor.cuts[0][1] == 0
                if is_even and tensor.nbytes >= max(1, sources.axes[source.route[0]].traits.zero_copy_min_bytes):
                    direct.append(slot)
                else:
                    by_route.setdefault(source.route, []).append(slot)
        messages = [MessageLayout.of(route, slots) for route, slots in by_route.items()]
        plans.append(BucketPlan(layout, messages, direct))
    return plans


class BucketGather:
    """The all-gathers of some messages and of a header, over one axis after the other. Owns the messages.

    Args:
        sources: the axes.
        plan: the messages.
        header: int64, of which all ranks learn the largest; if the first one is not 0, no values are sent.
        label: the name in errors.
    """

    def __init__(self, sources: ModelSources, plan: BucketPlan, header: Sequence[int], label: str) -> None:
        self._sources, self._plan, self._label = sources, plan, label
        self._sends = not header[0]
        self._packed: torch.Tensor | None = None
        self._rows: list[torch.Tensor | None] = [None] * len(plan.messages)
        self._header = torch.tensor([header], dtype=torch.int64).to(sources.device)
        """The headers that have arrived."""
        self.header: Sequence[int] = header
        """The largest numbers in the headers of all ranks, once it has arrived."""
        self.is_launched = False
        """Other ranks may have received something of it."""

    def run(self, stream: CommStream) -> InFlight[None]:
        """Launch it on ``stream``."""
        return stream.run(self._launch, self._finish, finish_in_wait=True)

    def take_rows(self, k: int) -> torch.Tensor:
        """Return what was received of message ``k``, a row of each rank of its route, and forget it."""
        message, rows = self._plan.messages[k], self._rows[k]
        self._rows[k] = None
        if rows is None:  # no axis cuts these
            rows = torch.empty(message.width, dtype=torch.uint8, device=self._sources.device)
            self._plan.pack(message, rows)
        return rows

    def unpack(self) -> torch.Tensor:
        """Return the memory of the bucket with all tensors, and free what was received."""
        packed = self._bucket_memory()
        for k, message in enumerate(self._plan.messages):
            message.unpack(self.take_rows(k), packed)
        return packed

    def _bucket_memory(self) -> torch.Tensor:
        if self._packed is None:
            self._packed = torch.empty(self._plan.layout.nbytes, dtype=torch.uint8, device=self._sources.device)
            self._packed[-ALIGNMENT_BYTES:].zero_()  # the end may belong to no tensor
        return self._packed

    def _launch(self) -> Work:
        work: Work = DONE
        for number in range(len(self._sources.axes)):
            work.wait()
            work = self._launch_over(number)
        return work

    def _finish(self) -> None:
        self.header = self._header.amax(0).tolist()

    def _launch_over(self, number: int) -> Work:
        """Launch the all-gather over an axis, of the header and of all messages whose route has the axis."""
        axis, device = self._sources.axes[number], self._sources.device
        headers = self._header.new_empty(axis.size, self._header.shape[1])
        torch.amax(self._header, 0, out=headers[axis.rank])
        self._header = headers
        own = headers.view(torch.uint8)  # as messages: NCCL coalesces only tensors of one dtype
        transfers = [Transfer(own.view(-1), own[axis.rank])]
        for k, message in enumerate(self._plan.messages):
            if number in message.route:
                before = self._rows[k]
                shape = (message.width,) if before is None else tuple(before.shape)
                rows = axis.allocate(axis.size * prod(shape), torch.uint8, device).view(axis.size, *shape)
                if before is not None:
                    rows[axis.rank].copy_(before)
                elif self._sends:
                    self._plan.pack(message, rows[axis.rank])
                self._rows[k] = rows
                transfers.append(Transfer(rows.view(-1), rows[axis.rank].view(-1)))
        for slot in (slot for slot in self._plan.direct if slot.source.route[0] == number):
            rows = self._bucket_memory()[slot.place : slot.place + slot.tensor.nbytes]
            row = rows.view(axis.size, -1)[axis.rank]
            if self._sends:
                local = slot.source.plain
                if local.dtype == slot.tensor.dtype and local.device == device and local.is_contiguous():
                    row = local.reshape(-1).view(torch.uint8)
                else:
                    row.view(slot.tensor.dtype).copy_(local.reshape(-1), non_blocking=True)
            transfers.append(Transfer(rows, row))
        self.is_launched = True
        return axis.launch(Collective.ALL_GATHER, transfers, self._label)
