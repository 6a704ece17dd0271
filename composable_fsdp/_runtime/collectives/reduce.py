"""Reduction of a group's gradients: over the shard axis, then over the replicate axis, then to the shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from composable_fsdp._comm.c10d import WorkList
from composable_fsdp._comm.communicator import Collective, Communicator, Transfer
from composable_fsdp._layout.grad_scaling import Reduction, divide
from composable_fsdp._layout.plan import BucketPlan
from composable_fsdp._memory.streams import CommStreams, InFlight, Work
from composable_fsdp._runtime.collectives.encoded_reduce import EncodedAllReduce, EncodedMessage, EncodedReduceScatter
from composable_fsdp._runtime.collectives.reduce_scatter import BucketReduceScatter, ReducedBucket, ReduceScatterBuffers
from composable_fsdp._sharding.process_groups import ProcessGroups, group_by_key

__all__ = ["BucketReduction", "ReducibleBucket", "launch_reduction"]


class ReducibleBucket(Protocol):
    """The interface of a bucket that a reduction uses."""

    @property
    def plan(self) -> BucketPlan: ...

    @property
    def pgs(self) -> ProcessGroups: ...

    @property
    def scatter(self) -> BucketReduceScatter: ...


class BucketReduction(NamedTuple):
    """One bucket of a reduction.

    ``hook`` is called with the reduced gradients: before their division by ``reduction.post_divide``, or after it if
    ``divides_first``.
    """

    bucket: ReducibleBucket
    reduction: Reduction
    scatter: ReduceScatterBuffers
    hook: Callable[[torch.Tensor], None] | None = None
    divides_first: bool = False


def launch_reduction(
    streams: CommStreams, reductions: Sequence[BucketReduction], device: torch.device, name: str, *, partial: bool
) -> InFlight[list[ReducedBucket]]:
    """Launch a reduction over the shard axis, then over the replicate axis; the result is the sharded gradients.

    Args:
        streams: where each collective runs.
        reductions: buckets of one or several groups, in the same order on every rank.
        device: where modules compute.
        name: the name in errors, the same on every rank.
        partial: reduce over the shard axis only. The buckets keep their sums for a later reduction; the result is
            empty.
    """
    reduce = _HybridReduce(reductions, device, name)
    if partial:
        return streams.reduce.run(reduce.scatter, reduce.keep_partial)
    if all(each.bucket.pgs.axes.replicate.size == 1 for each in reductions):
        return streams.reduce.run(reduce.scatter, reduce.finish_unreplicated)
    scattered = streams.reduce.run(reduce.scatter, reduce.finish_scatter)
    if not any(each.bucket.plan.gradient_codecs.replicate for each in reductions):
        return streams.replicate.run(reduce.all_reduce, reduce.finish, after=scattered)
    summed = streams.replicate.run(reduce.all_reduce, reduce.finish_all_reduce, after=scattered)
    return streams.replicate.run(reduce.gather_sums, reduce.finish_gathered_sums, after=summed)


class _HybridReduce:
    """The collectives of a reduction and the work after each of them.

    In this order: ``scatter``, then ``all_reduce`` if there is a replicate axis, then ``gather_sums`` if that is
    encoded. After each, one of the methods that use its result.
    """

    def __init__(self, reductions: Sequence[BucketReduction], device: torch.device, name: str) -> None:
        self._reductions = reductions
        self._name = name
        self._device = device
        messages = [
            (each.bucket.pgs.exchange, each.scatter.encoded) for each in reductions if each.scatter.encoded is not None
        ]
        self._encoded_scatters = self._encoded_reduce_scatters(messages) if messages else []
        self._encoded_sums: list[EncodedReduceScatter] = []
        self._all_reduces: list[tuple[Communicator, EncodedAllReduce]] = []

    def scatter(self) -> Work:
        label = f"reduce-scatter of {self._name}"
        works: list[Work] = []
        keys = [(each.bucket.pgs.scatter, each.reduction.op) for each in self._reductions]
        for (communicator, op), reductions in group_by_key(keys, self._reductions):
            transfers = [transfer for each in reductions for transfer in each.scatter.transfers]
            if transfers:
                works.append(communicator.launch(Collective.REDUCE_SCATTER, transfers, label, op))
        works += [encoded.launch(label) for encoded in self._encoded_scatters]
        return works[0] if len(works) == 1 else WorkList(tuple(works))

    def _encoded_reduce_scatters(
        self, messages: Sequence[tuple[Communicator, EncodedMessage]]
    ) -> list[EncodedReduceScatter]:
        return [
            EncodedReduceScatter(of_communicator, communicator, self._device)
            for communicator, of_communicator in group_by_key(
                [c for c, _ in messages], [message for _, message in messages]
            )
        ]

    def finish_scatter(self) -> None:
        """Finish ``scatter``: decode and sum encoded gradients."""
        for encoded in self._encoded_scatters:
            encoded.finish()

    def keep_partial(self) -> list[ReducedBucket]:
        self.finish_scatter()
        for each in self._reductions:
            each.bucket.scatter.keep_partial(each.scatter)
        return []

    def all_reduce(self) -> Work:
        works: list[Work] = []
        label = f"all-reduce of {self._name}"
        for bucket, reduction, scatter, *_ in self._reductions:
            bucket.scatter.add_partial(scatter)
            encoded = bucket.scatter.encode_all_reduce(scatter)
            if encoded is None:
                own = [Transfer(scatter.output, scatter.output)]
                works.append(bucket.pgs.replicate.launch(Collective.ALL_REDUCE, own, label, reduction.op))
            else:
                self._all_reduces.append((bucket.pgs.replicate, encoded))
        messages = [(communicator, encoded.message) for communicator, encoded in self._all_reduces]
        self._encoded_sums = self._encoded_reduce_scatters(messages)
        return WorkList((*works, *(encoded.launch(label) for encoded in self._encoded_sums)))

    def finish_all_reduce(self) -> None:
        """Finish an encoded ``all_reduce``: decode and sum."""
        for encoded in self._encoded_sums:
            encoded.finish()

    def gather_sums(self) -> Work:
        by_communicator = group_by_key([c for c, _ in self._all_reduces], [encoded for _, encoded in self._all_reduces])
        return WorkList(
            tuple(
                communicator.launch(
                    Collective.ALL_GATHER,
                    [encoded.gather(communicator) for encoded in of_communicator],
                    f"all-gather of sums of {self._name}",
                )
                for communicator, of_communicator in by_communicator
            )
        )

    def finish_gathered_sums(self) -> list[ReducedBucket]:
        for _, encoded in self._all_reduces:
            encoded.finish()
        return self.finish()

    def finish_unreplicated(self) -> list[ReducedBucket]:
        self.finish_scatter()
        for each in self._reductions:
            each.bucket.scatter.add_partial(each.scatter)
        return self.finish()

    def finish(self) -> list[ReducedBucket]:
        reduced = []
        for bucket, reduction, scatter, hook, divides_first in self._reductions:
            if hook is not None:
                if divides_first:
                    divide(scatter.output, reduction.post_divide)
                    reduction = replace(reduction, post_divide=1.0)
                bucket.scatter.call_hook(scatter, hook)
            reduced.append(bucket.scatter.finish(scatter, reduction))
        return reduced
