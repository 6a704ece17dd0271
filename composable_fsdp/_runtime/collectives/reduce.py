"""Reduction of a group's gradients: over the shard axis, then over the replicate axis, then to the shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from composable_fsdp._comm.c10d import WorkList
from composable_fsdp._comm.communicator import Collective, Communicator, Transfer
from composable_fsdp._layout.bucket_layout import aligned_bytes
from composable_fsdp._layout.grad_scaling import Reduction, divide
from composable_fsdp._memory.streams import CommStreams, InFlight, Work
from composable_fsdp._runtime.collectives.reduce_scatter import (
    BucketReduceScatter,
    Message,
    OwnAllReduce,
    ReducedBucket,
    ReduceScatterBuffers,
)
from composable_fsdp._sharding.process_groups import group_by_key

__all__ = ["BucketReduction", "launch_reduction"]


class BucketReduction(NamedTuple):
    """One bucket of a reduction.

    ``hook`` is called with the reduced gradients: before their division by ``reduction.post_divide``, or after it if
    ``divides_first``.
    """

    scatter: BucketReduceScatter
    reduction: Reduction
    buffers: ReduceScatterBuffers
    hook: Callable[[torch.Tensor], None] | None = None
    divides_first: bool = False


def launch_reduction(
    streams: CommStreams, reductions: Sequence[BucketReduction], device: torch.device, name: str, *, partial: bool
) -> InFlight[list[ReducedBucket]]:
    """Launch a reduction over the shard axis, then over the replicate axis; the result is the sharded gradients.

    ``reductions`` and ``name`` are the same on every rank. A partial one is over the shard axis only. The buckets keep
    its sums for a later reduction, and its result is empty.
    """
    reduce = _HybridReduce(reductions, device, name)
    if partial:
        return streams.reduce.run(reduce.scatter, reduce.keep_partial)
    if all(each.scatter.pgs.axes.replicate.size == 1 for each in reductions):
        return streams.reduce.run(reduce.scatter, reduce.finish_unreplicated)
    scattered = streams.reduce.run(reduce.scatter, reduce.finish_scatter)
    if not any(each.scatter.has_own_all_reduce for each in reductions):
        return streams.replicate.run(reduce.all_reduce, reduce.finish, after=scattered)
    summed = streams.replicate.run(reduce.all_reduce, reduce.finish_own_sums, after=scattered)
    return streams.replicate.run(reduce.gather_own_sums, reduce.finish, after=summed)


class _HybridReduce:
    """The collectives of a reduction and the work after each of them.

    In this order: ``scatter``, then ``all_reduce`` if there is a replicate axis, then ``gather_own_sums`` if a bucket
    has an all-reduce of its own. After each, one of the methods that use its result.
    """

    def __init__(self, reductions: Sequence[BucketReduction], device: torch.device, name: str) -> None:
        self._reductions = reductions
        self._name = name
        self._device = device
        messages = [(r.scatter.pgs.exchange, r.buffers.message) for r in reductions if r.buffers.message is not None]
        self._exchanges = _exchanges(messages, device) if messages else []
        self._own_sums: list[Exchange] = []
        self._own_all_reduces: list[tuple[Communicator, OwnAllReduce]] = []

    def scatter(self) -> Work:
        label = f"reduce-scatter of {self._name}"
        works: list[Work] = []
        keys = [(each.scatter.pgs.scatter, each.reduction.op) for each in self._reductions]
        for (communicator, op), reductions in group_by_key(keys, self._reductions):
            transfers = [transfer for each in reductions for transfer in each.buffers.transfers]
            if transfers:
                works.append(communicator.launch(Collective.REDUCE_SCATTER, transfers, label, op))
        works += [exchange.launch(label) for exchange in self._exchanges]
        return works[0] if len(works) == 1 else WorkList(tuple(works))

    def finish_scatter(self) -> None:
        for exchange in self._exchanges:
            exchange.finish()

    def keep_partial(self) -> list[ReducedBucket]:
        self.finish_scatter()
        for each in self._reductions:
            each.scatter.keep_partial(each.buffers)
        return []

    def all_reduce(self) -> Work:
        works: list[Work] = []
        label = f"all-reduce of {self._name}"
        for scatter, reduction, buffers, *_ in self._reductions:
            scatter.add_partial(buffers)
            own = None if scatter.own is None else scatter.own.all_reduce(scatter, buffers)
            if own is None:
                transfers = [Transfer(buffers.output, buffers.output)]
                works.append(scatter.pgs.replicate.launch(Collective.ALL_REDUCE, transfers, label, reduction.op))
            else:
                self._own_all_reduces.append((scatter.pgs.replicate, own))
        self._own_sums = _exchanges([(c, each.message) for c, each in self._own_all_reduces], self._device)
        return WorkList((*works, *(exchange.launch(label) for exchange in self._own_sums)))

    def finish_own_sums(self) -> None:
        for exchange in self._own_sums:
            exchange.finish()

    def gather_own_sums(self) -> Work:
        label = f"all-gather of sums of {self._name}"
        grouped = group_by_key(*zip(*self._own_all_reduces, strict=True))
        transfers = [(c, [each.gather(c) for each in members]) for c, members in grouped]
        return WorkList(tuple(c.launch(Collective.ALL_GATHER, of_one, label) for c, of_one in transfers))

    def finish_unreplicated(self) -> list[ReducedBucket]:
        self.finish_scatter()
        for each in self._reductions:
            each.scatter.add_partial(each.buffers)
        return self.finish()

    def finish(self) -> list[ReducedBucket]:
        for _, own in self._own_all_reduces:
            own.finish()
        reduced = []
        for scatter, reduction, buffers, hook, divides_first in self._reductions:
            if hook is not None:
                if divides_first:
                    divide(buffers.output, reduction.post_divide)
                    reduction = replace(reduction, post_divide=1.0)
                scatter.call_hook(buffers, hook)
            reduced.append(scatter.finish(buffers, reduction))
        return reduced


class Exchange:
    """A reduce-scatter of messages by one all-to-all, written on construction. They are columns, with a row per rank.

    It keeps the sent message alive, whose memory may come from another stream.
    """

    def __init__(self, messages: Sequence[Message], communicator: Communicator, device: torch.device) -> None:
        self._messages = messages
        self._communicator = communicator
        self._columns: list[slice] = []
        end = 0
        for message in messages:
            self._columns.append(slice(end, end + message.row_bytes))
            end += aligned_bytes(message.row_bytes)
        self._shape = (communicator.size, end)
        self._sent = communicator.allocate(communicator.size * end, torch.uint8, device)
        self._received: torch.Tensor | None = None
        for message, columns in zip(messages, self._columns, strict=True):
            message.write(self._sent.view(self._shape)[:, columns])

    def launch(self, label: str) -> Work:
        self._received = self._communicator.allocate(self._sent.numel(), torch.uint8, self._sent.device)
        return self._communicator.launch(Collective.ALL_TO_ALL, [Transfer(self._received, self._sent)], label)

    def finish(self) -> None:
        received, self._received = self._received, None
        assert received is not None
        for message, columns in zip(self._messages, self._columns, strict=True):
            message.read(received.view(self._shape)[:, columns])


def _exchanges(messages: Sequence[tuple[Communicator, Message]], device: torch.device) -> list[Exchange]:
    by_communicator = group_by_key([c for c, _ in messages], [message for _, message in messages])
    return [Exchange(members, communicator, device) for communicator, members in by_communicator]
