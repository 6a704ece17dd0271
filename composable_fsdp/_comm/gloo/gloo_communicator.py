"""The communicator over gloo: collectives made of what gloo does well, compared before they begin.

Gloo's own all-gather goes round a ring, by a thread of its own, and its reduce-scatter adds up in the dtype of the
wire, in an order that depends on the rank. Here gathers, reductions and exchanges go point to point, large parts from
where they lie to their place. A reduce-scatter adds up where the parts arrive: in fp32, in the order of ranks, so that
sums are the same on every rank and from run to run. An all-reduce is gloo's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
import torch.distributed as dist

from composable_fsdp._comm.comm_debug import profiled
from composable_fsdp._comm.communicator import Transfer, Work
from composable_fsdp._comm.gloo.connection import GlooConnection, exchange
from composable_fsdp._comm.ordered_sum import add_up
from composable_fsdp._consistency.rank_report import OperationId
from composable_fsdp._layout.bucket_layout import NEVER_DIRECT
from composable_fsdp._layout.grad_scaling import ReduceOp
from composable_fsdp.errors import UnsupportedError

__all__ = ["GlooCommunicator"]

_DIRECT_PART_BYTES = 1 << 19
"""One rank's part, from which a tensor travels by itself, without copies, instead of in one message with others.
``benchmarks/gloo_transfers.py`` measures it afresh: with 2 ranks both ways gain from there on.
"""

_DIRECT_BYTES = 1 << 21
"""All ranks' parts, from which a tensor does in any case, as long as the parts have ``_LEAST_PART_BYTES``: the copies
take memory. With 4 ranks both ways gain from there on.
"""

_LEAST_PART_BYTES = 1 << 16
"""An estimate, in bytes, of what it takes to post a message; not measured."""


def _nothing() -> None:
    pass


class Arrival:
    """Works of gloo, and what is left to do once they are done. Waiting again does nothing; gloo would wait for ever.

    The line keeps the works until somebody waits: gloo stops a connection on which the receiver of a message is gone.
    """

    def __init__(
        self,
        connection: GlooConnection,
        place: OperationId,
        works: Sequence[Work],
        finish: Callable[[], None] = _nothing,
    ) -> None:
        self._connection, self._place, self._finish = connection, place, finish
        self._has_come = False
        connection.keep(place, works)

    def wait(self) -> None:
        """
        Raises:
            PeerError: a rank failed, is gone, or did not come within the timeout of the process group.
            DivergenceError: a rank is about to do something else.
        """
        if not self._has_come:
            self._connection.wait_for(self._place)
            self._has_come = True
        self._finish()
        self._finish = _nothing


class GlooCommunicator:
    """Collectives of CPU tensors over gloo. Final.

    Args:
        group: the ranks.
        line: of this group. All its communicators on one rank share it.
    """

    aliases = False
    averages = False
    """Gloo sums and divides in one pass more; a division folded into the shard-sized result is cheaper."""
    widens = True
    whole_bytes = NEVER_DIRECT
    """The sum of gloo's all-reduce is not in the order of ranks."""
    batch_bytes = 1 << 21
    """``benchmarks/group_transfers.py``: with a quarter of that, the reductions of groups of 2 to 4 MiB take 1.4 to 2.3
    times as long.
    """

    def __init__(self, group: dist.ProcessGroup, connection: GlooConnection) -> None:
        self.group = group
        self.rank, self.size = connection.rank, connection.size
        self.direct_bytes = max(
            min(connection.size * _DIRECT_PART_BYTES, _DIRECT_BYTES), connection.size * _LEAST_PART_BYTES
        )
        self._connection = connection

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size})"

    def __eq__(self, other: object) -> bool:
        """Whether what goes over both may go in one launch."""
        return isinstance(other, GlooCommunicator) and self.group is other.group

    def __hash__(self) -> int:
        return id(self.group)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def with_pool(self, pooled: bool) -> GlooCommunicator:
        return self

    @profiled
    def all_gather(self, transfers: Sequence[Transfer], label: str = "all-gather") -> Work:
        place = self._connection.begin(label, transfers)
        works: list[Work] = []
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        with self._connection.launching(place):
            for output, shard in transfers:
                places = output.view(self.size, shard.numel()).unbind(0)
                works += exchange(
                    self._connection.backend, self.rank, [shard] * self.size, places, self._connection.tag(place)
                )
                own.append((places[self.rank], shard))
        _copy(own)  # while the wire works
        return Arrival(self._connection, place, works)

    @profiled
    def reduce_scatter(self, transfers: Sequence[Transfer], op: ReduceOp, label: str = "reduce-scatter") -> Work:
        _check_sum(op)
        messages = [(outputs, full.unbind(0), self._summands(full)) for outputs, full in self._messages(transfers)]
        place = self._connection.begin(label, transfers)
        works: list[Work] = []
        with self._connection.launching(place):
            for _, parts, summands in messages:
                works += exchange(self._connection.backend, self.rank, parts, summands, self._connection.tag(place))

        def finish() -> None:
            for outputs, _, summands in messages:
                widths = [output.numel() for output in outputs]
                columns = zip(*(summand.split(widths) for summand in summands), strict=True)
                for output, column in zip(outputs, columns, strict=True):
                    add_up(column, output)

        return Arrival(self._connection, place, works, finish)

    def _summands(self, full: torch.Tensor) -> list[torch.Tensor]:
        """A place for what each rank has for this one; its own part is where it lies."""
        summands = list(full.new_empty(self.size - 1, full.size(1)).unbind(0))
        summands.insert(self.rank, full[self.rank])
        return summands

    def _messages(self, transfers: Sequence[Transfer]) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
        """What goes together: outputs, and ``(size, numel)`` of input, a row for each rank. Small ones are copied."""
        small = [transfer for transfer in transfers if transfer.input.nbytes < self.direct_bytes]
        for dtype in dict.fromkeys(transfer.input.dtype for transfer in small):
            alike = [transfer for transfer in small if transfer.input.dtype == dtype]
            rows = [self._rows(full) for _, full in alike]
            yield [output for output, _ in alike], rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
        for output, full in transfers:
            if full.nbytes >= self.direct_bytes:
                yield [output], self._rows(full)

    def _rows(self, full: torch.Tensor) -> torch.Tensor:
        return full.view(self.size, full.numel() // self.size)

    @profiled
    def all_to_all(self, transfers: Sequence[Transfer], label: str = "all-to-all") -> Work:
        place = self._connection.begin(label, transfers)
        works: list[Work] = []
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        with self._connection.launching(place):
            for output, full in transfers:
                places, parts = self._rows(output).unbind(0), self._rows(full).unbind(0)
                works += exchange(self._connection.backend, self.rank, parts, places, self._connection.tag(place))
                own.append((places[self.rank], parts[self.rank]))
        _copy(own)  # while the wire works
        return Arrival(self._connection, place, works)

    @profiled
    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp, label: str = "all-reduce") -> Work:
        _check_sum(op)
        place = self._connection.begin(label, [Transfer(tensor, tensor) for tensor in tensors])
        with self._connection.launching(place):
            works = [self._connection.backend.allreduce([tensor]) for tensor in tensors]
        return Arrival(self._connection, place, cast(list[Work], works))


def _check_sum(op: ReduceOp) -> None:
    if op is not ReduceOp.SUM:
        raise UnsupportedError("a communicator over gloo does not average: ask its `averages`, or sum and divide.")


def _copy(own: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """What a rank has for itself, to its place."""
    for place, part in own:
        if place.data_ptr() != part.data_ptr():
            place.copy_(part)
