"""All-gather and reduce-scatter over gloo, made of what gloo does well.

Gloo's own all-gather copies what it moves in and out, and its reduce-scatter adds up in the dtype of the wire, in an
order that depends on the rank. Here large parts go point to point, from where they lie to their place. Sums are made
where the parts arrive: in fp32, in the order of ranks, so that they are the same on every rank and from run to run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from composable_fsdp.comm.protocol import Transfer, Work
from composable_fsdp.comm.sums import add_up
from composable_fsdp.errors import PeerError

__all__ = ["Arrival", "all_gather", "reduce_scatter"]

_GATHER_DIRECT_BYTES = 1 << 17
_REDUCE_DIRECT_BYTES = 1 << 17
"""One rank's part, from which it travels point to point. On an idle machine a quarter of that wins as well, as
``benchmarks/gloo_transfers.py`` shows; on a busy one every message more waits for a thread to wake up.
"""

_TAG = 0x46534450
"""Of our messages, so that they do not meet those of users."""


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Arrival:
    """Works of gloo, and what is left to do once they are done."""

    operation: str
    group: dist.ProcessGroup
    works: Sequence[Work]
    finish: Callable[[], None] = _nothing

    def wait(self) -> None:
        """
        Raises:
            PeerError: a rank is gone, or did not answer within the timeout of the process group.
        """
        begin = time.monotonic()
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise PeerError(
                f"{self.operation} over ranks {dist.get_process_group_ranks(self.group)} failed after "
                f"{time.monotonic() - begin:.1f} s of waiting: one of them is gone, or did not answer within the "
                f"timeout of the process group. Look at the output of each for the first error. Gloo says: {error}"
            ) from error
        self.finish()


def all_gather(
    group: dist.ProcessGroup, rank: int, transfers: Sequence[Transfer], small: Callable[[Transfer], Work]
) -> Work:
    """As :meth:`~composable_fsdp.comm.protocol.Communicator.all_gather`; ``small`` moves what is not worth more."""
    works: list[Work] = []
    own: list[tuple[torch.Tensor, torch.Tensor]] = []
    for transfer in transfers:
        output, shard = transfer
        if shard.nbytes < _GATHER_DIRECT_BYTES:
            works.append(small(transfer))
            continue
        places = output.view(-1, shard.numel()).unbind(0)
        works += _exchange(group, rank, [shard] * len(places), places)
        own.append((places[rank], shard))

    def finish() -> None:
        for place, shard in own:
            if place.data_ptr() != shard.data_ptr():
                place.copy_(shard)

    return Arrival("all-gather", group, works, finish)


def reduce_scatter(group: dist.ProcessGroup, rank: int, transfers: Sequence[Transfer]) -> Work:
    """The sum, as :meth:`~composable_fsdp.comm.protocol.Communicator.reduce_scatter`."""
    works: list[Work] = []
    sums: list[tuple[torch.Tensor, Sequence[torch.Tensor]]] = []
    size = dist.get_world_size(group)
    small = [transfer for transfer in transfers if transfer.input.nbytes < size * _REDUCE_DIRECT_BYTES]
    for dtype in dict.fromkeys(transfer.input.dtype for transfer in small):
        alike = [transfer for transfer in small if transfer.input.dtype == dtype]
        rows = [full.view(size, -1) for _, full in alike]
        sent = rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
        received = torch.empty_like(sent)
        works.append(_all_to_all(group, received.view(-1), sent.view(-1)))
        columns = torch.split_with_sizes(received, [row.size(1) for row in rows], dim=1)
        sums += [(output, column.unbind(0)) for (output, _), column in zip(alike, columns, strict=True)]
    for output, full in transfers:
        if full.nbytes < size * _REDUCE_DIRECT_BYTES:
            continue
        parts = list(full.view(size, -1).unbind(0))
        summands = list(full.new_empty(size - 1, output.numel()).unbind(0))
        summands.insert(rank, parts[rank])
        works += _exchange(group, rank, parts, summands)
        sums.append((output, summands))

    def finish() -> None:
        for output, summands in sums:
            add_up(summands, output)

    return Arrival("reduce-scatter", group, works, finish)


def _all_to_all(group: dist.ProcessGroup, received: torch.Tensor, sent: torch.Tensor) -> Work:
    work: Work = dist.all_to_all_single(received, sent, group=group, async_op=True)
    return work


def _exchange(
    group: dist.ProcessGroup, rank: int, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]
) -> list[Work]:
    """Each rank's part, straight from where it lies to its place; peers in turn, so that none is everyone's first."""
    size = len(sent)
    works: list[Work] = []
    for distance in range(1, size):
        source, target = (rank - distance) % size, (rank + distance) % size
        works.append(group.recv([received[source]], source, _TAG))
        works.append(group.send([sent[target]], target, _TAG))
    return works
