"""The communicator over gloo, with point-to-point collectives and an order check before each.

Gloo's own all-gather is a ring on a thread of its own. Its reduce-scatter accumulates in the dtype of the message, in
an order that depends on the rank. Here, all-gather, reduce-scatter and all-to-all are point-to-point, and zero-copy for
large tensors. Reduce-scatter accumulates in fp32 and in rank order, so that sums are the same on every rank and in
every run. All-reduce is gloo's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.distributed as dist

from composable_fsdp._comm.comm_debug import profiled
from composable_fsdp._comm.communicator import Transfer, Work
from composable_fsdp._comm.gloo.connection import GlooConnection
from composable_fsdp._consistency.rank_report import OperationId
from composable_fsdp._layout.grad_scaling import ReduceOp, add_up
from composable_fsdp.errors import UnsupportedError

__all__ = ["GlooCommunicator"]

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
        operation: OperationId,
        works: Sequence[Work],
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._connection, self._operation, self._finish = connection, operation, finish
        self._is_done = False
        connection.keep(operation, works)

    def wait(self) -> None:
        """Wait for gloo's works and run ``finish``.

        Raises:
            PeerError: a rank failed, is gone, or did not answer within the timeout of the process group.
            DivergenceError: a rank is about to run a different operation.
        """
        if not self._is_done:
            self._connection.wait(self._operation)
            self._is_done = True
        if self._finish is not None:
            self._finish()
            self._finish = None


class GlooCommunicator:
    """Collectives of CPU tensors over gloo. Final.

    Args:
        group: the process group.
        connection: the connection of ``group``, which all communicators of the group on this rank share.
    """

    aliases = False
    averages = False
    """Gloo averages in a separate pass. Dividing the sharded result is cheaper."""
    widens = True
    coalesces = True  # all messages of a call are on their way before the first is waited for
    grad_bucket_bytes = 1 << 21
    """With a quarter of this, reductions of groups of 2 to 4 MiB take 1.4 to 2.3 times as long
    (``benchmarks/group_transfers.py``).
    """

    def __init__(self, group: dist.ProcessGroup, connection: GlooConnection) -> None:
        self.group = group
        self.rank, self.size = connection.rank, connection.size
        self.zero_copy_min_bytes = max(
            min(connection.size * _ZERO_COPY_BYTES_PER_RANK, _ZERO_COPY_BYTES), connection.size * _MIN_BYTES_PER_RANK
        )
        self._connection = connection

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size})"

    def __eq__(self, other: object) -> bool:
        """Return whether collectives of both communicators can share one launch."""
        return isinstance(other, GlooCommunicator) and self.group is other.group

    def __hash__(self) -> int:
        return id(self.group)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def with_pool(self, pooled: bool) -> GlooCommunicator:
        return self

    @profiled
    def all_gather(self, transfers: Sequence[Transfer], label: str = "all-gather") -> Work:
        connection, operation = self._connection, self._connection.begin(label, transfers)
        works: list[Work] = []
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        with connection.launching(operation):
            tag = connection.tag(operation)
            for output, shard in transfers:
                rows = output.view(self.size, shard.numel()).unbind(0)
                works += connection.exchange([shard] * self.size, rows, tag)
                own.append((rows[self.rank], shard))
        _copy(own)  # overlaps with the messages
        return GlooWork(connection, operation, works)

    @profiled
    def reduce_scatter(self, transfers: Sequence[Transfer], op: ReduceOp, label: str = "reduce-scatter") -> Work:
        _check_sum(op)
        messages = [(outputs, full.unbind(0), self._summands(full)) for outputs, full in self._messages(transfers)]
        connection, operation = self._connection, self._connection.begin(label, transfers)
        works: list[Work] = []
        with connection.launching(operation):
            tag = connection.tag(operation)
            for _, parts, summands in messages:
                works += connection.exchange(parts, summands, tag)

        def finish() -> None:
            for outputs, _, summands in messages:
                widths = [output.numel() for output in outputs]
                columns = zip(*[summand.split(widths) for summand in summands], strict=True)
                for output, column in zip(outputs, columns, strict=True):
                    add_up(column, output)

        return GlooWork(connection, operation, works, finish)

    def _summands(self, full: torch.Tensor) -> list[torch.Tensor]:
        """Return a buffer for each rank's contribution to our part. Ours is used in place."""
        summands = list(full.new_empty(self.size - 1, full.size(1)).unbind(0))
        summands.insert(self.rank, full[self.rank])
        return summands

    def _messages(self, transfers: Sequence[Transfer]) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
        """Return outputs and inputs, ``(size, numel)``, that share a message. Small tensors are copied in."""
        small: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        large: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        for output, full in transfers:
            rows = self._rows(full)
            if full.nbytes >= self.zero_copy_min_bytes:
                large.append(([output], rows))
            else:
                outputs, inputs = small.setdefault(full.dtype, ([], []))
                outputs.append(output)
                inputs.append(rows)
        packed = [(outputs, r[0] if len(r) == 1 else torch.cat(r, dim=1)) for outputs, r in small.values()]
        return packed + large

    def _rows(self, full: torch.Tensor) -> torch.Tensor:
        return full.view(self.size, full.numel() // self.size)

    @profiled
    def all_to_all(self, transfers: Sequence[Transfer], label: str = "all-to-all") -> Work:
        connection, operation = self._connection, self._connection.begin(label, transfers)
        works: list[Work] = []
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        with connection.launching(operation):
            tag = connection.tag(operation)
            for output, full in transfers:
                rows, parts = self._rows(output).unbind(0), self._rows(full).unbind(0)
                works += connection.exchange(parts, rows, tag)
                own.append((rows[self.rank], parts[self.rank]))
        _copy(own)  # overlaps with the messages
        return GlooWork(connection, operation, works)

    @profiled
    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp, label: str = "all-reduce") -> Work:
        _check_sum(op)
        operation = self._connection.begin(label, [Transfer(tensor, tensor) for tensor in tensors])
        with self._connection.launching(operation):
            works = [self._connection.backend.allreduce([tensor]) for tensor in tensors]
        return GlooWork(self._connection, operation, cast(list[Work], works))


def _check_sum(op: ReduceOp) -> None:
    if op is not ReduceOp.SUM:
        raise UnsupportedError("a communicator over gloo does not average: ask its `averages`, or sum and divide.")


def _copy(own: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy this rank's own part to its output."""
    for target, source in own:
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)
