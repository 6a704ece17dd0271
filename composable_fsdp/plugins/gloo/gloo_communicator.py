"""The communicator over gloo, with point-to-point collectives.

Gloo's own all-gather is a ring on a thread of its own. Its reduce-scatter accumulates in the dtype of the message, in
an order that depends on the rank. Here, all-gather, reduce-scatter and all-to-all are point-to-point, and zero-copy for
large tensors. Reduce-scatter accumulates in fp32 and in rank order, so that sums are the same on every rank and in
every run. All-reduce is gloo's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from composable_fsdp._consistency.order_check import OrderCheck
from composable_fsdp._core.comm import (
    SUM,
    Collective,
    GroupCommunicator,
    GroupReference,
    Traits,
    Transfer,
    has_own_transports,
)
from composable_fsdp._core.layout import ReduceOp, add_up
from composable_fsdp._core.memory import Work
from composable_fsdp.errors import UnsupportedError
from composable_fsdp.plugins.gloo.connection import DATA, DATA_TAGS, GlooConnection

_ZERO_COPY_BYTES_PER_RANK = 1 << 19
"""The bytes per rank from which a tensor is sent zero-copy instead of being packed with others. With 2 ranks,
all-gather and reduce-scatter are faster from there on; ``benchmarks/gloo_transfers.py`` measures it.
"""

_ZERO_COPY_BYTES = 1 << 21
"""The bytes of all ranks from which a tensor is sent zero-copy anyway, if it has ``_MIN_BYTES_PER_RANK``, because
copies take memory. With 4 ranks, all-gather and reduce-scatter are faster from there on.
"""

_MIN_BYTES_PER_RANK = 1 << 16
"""The cost in bytes of posting a message. Estimated, not measured."""


class GlooWork:
    """The work of one operation: gloo's works and a ``finish`` step. Waiting again does nothing.

    The connection keeps the works alive until then, since gloo closes a connection if the receiver of a message is
    deleted.
    """

    def __init__(
        self,
        connection: GlooConnection,
        number: int,
        label: str,
        works: Sequence[Work],
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._connection, self._label, self._finish = connection, label, finish
        self._key = connection.generation, number
        connection.kept[self._key] = works
        self._is_done = False

    def wait(self) -> None:
        """Wait for gloo's works and run ``finish``.

        Raises:
            PeerError: the connection is broken.
            LostError: gloo failed.
        """
        if not self._is_done:
            self._connection.wait(self._key, self._label)
            self._is_done = True
        if self._finish is not None:
            self._finish()
            self._finish = None


class GlooCommunicator:
    """Collectives of CPU tensors over gloo."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.name = GroupReference(group), group.group_name
        self.connection = connection = GlooConnection(group)
        self.check, self.give_up = connection.check, connection.give_up
        self.abandon, self.reopen = connection.abandon, connection.reopen
        self.exchange_numbers, self.exchange_texts = connection.exchange_numbers, connection.exchange_texts
        self.ranks, self.rank, self.size = connection.ranks, connection.rank, connection.size
        self.traits = Traits(
            widens=True,
            coalesces=True,  # all messages of a launch are on their way before the first is waited for
            zero_copy_min_bytes=max(
                min(self.size * _ZERO_COPY_BYTES_PER_RANK, _ZERO_COPY_BYTES), self.size * _MIN_BYTES_PER_RANK
            ),
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size})"

    @property
    def group(self) -> dist.ProcessGroup:
        return self._group()

    @property
    def generation(self) -> int:
        return self.connection.generation

    @property
    def launched(self) -> int:
        return self.connection.launched

    @property
    def is_broken(self) -> bool:
        return bool(self.connection.broken)

    def level(self, level: OrderCheck) -> OrderCheck:
        return level

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def launch(self, kind: Collective, transfers: Sequence[Transfer], label: str = "", op: ReduceOp = SUM) -> GlooWork:
        if op is not ReduceOp.SUM:
            raise UnsupportedError("a communicator over gloo does not average: ask for its traits, or sum and divide.")
        messages = self._messages(transfers) if kind is Collective.REDUCE_SCATTER else []
        connection = self.connection
        if connection.broken:
            connection.check()
        number = connection.launched = connection.launched + 1
        works: list[Work] = []
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        finish = None
        try:
            tag = DATA + number % DATA_TAGS
            if kind is Collective.REDUCE_SCATTER:
                for _, parts, summands in messages:
                    works += connection.exchange(parts, summands, tag)
                finish = partial(_add_up, messages)
            elif kind is Collective.ALL_REDUCE:
                works += [connection.backend.allreduce([transfer.output]) for transfer in transfers]
            else:
                for output, sent in transfers:
                    rows = self._rows(output).unbind(0)
                    parts = [sent] * self.size if kind is Collective.ALL_GATHER else list(self._rows(sent).unbind(0))
                    works += connection.exchange(parts, rows, tag)
                    own.append((rows[self.rank], parts[self.rank]))
        except RuntimeError as error:
            raise connection.lost(error, 0.0) from error
        _copy(own)  # overlaps with the messages
        return GlooWork(connection, number, label or kind.label, works, finish)

    def _messages(self, transfers: Sequence[Transfer]) -> list[_Message]:
        """Return the messages of a reduce-scatter. Small tensors share one for each dtype, and are copied in."""
        small: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        large: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        for output, full in transfers:
            rows = full.view(self.size, full.numel() // self.size)
            if full.nbytes >= self.traits.zero_copy_min_bytes:
                large.append(([output], [rows]))
            else:
                outputs, inputs = small.setdefault(full.dtype, ([], []))
                outputs.append(output)
                inputs.append(rows)
        messages = []
        for outputs, inputs in (*small.values(), *large):
            rows = inputs[0] if len(inputs) == 1 else torch.cat(inputs, dim=1)
            summands = list(rows.new_empty(self.size - 1, rows.size(1)).unbind(0))
            summands.insert(self.rank, rows[self.rank])  # this rank's part is summed in place
            messages.append(_Message(outputs, rows.unbind(0), summands))
        return messages

    def _rows(self, full: torch.Tensor) -> torch.Tensor:
        return full.view(self.size, full.numel() // self.size)


class _Message(NamedTuple):
    """A message of a reduce-scatter: the part for each rank, and the memory for the part that each rank sends."""

    outputs: Sequence[torch.Tensor]
    parts: Sequence[torch.Tensor]
    summands: Sequence[torch.Tensor]


def _add_up(messages: Sequence[_Message]) -> None:
    for outputs, _, summands in messages:
        widths = [output.numel() for output in outputs]
        columns = zip(*[summand.split(widths) for summand in summands], strict=True)
        for output, column in zip(outputs, columns, strict=True):
            add_up(column, output)


def _copy(own: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy this rank's own part to its output."""
    for target, source in own:
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)


def over_gloo(group: dist.ProcessGroup, device_type: str) -> GroupCommunicator | None:
    """Return a communicator for CPU tensors over gloo."""
    return GlooCommunicator(group) if has_own_transports(group, device_type) else None
