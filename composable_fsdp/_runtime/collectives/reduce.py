"""Reduction of a group's gradients: over the shard axis, then over the replicate axis, then to the shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from composable_fsdp._comm.c10d import Together
from composable_fsdp._comm.communicator import Communicator
from composable_fsdp._layout.grad_scaling import Reduction, divide
from composable_fsdp._layout.plan import BucketPlan
from composable_fsdp._memory.streams import CommStreams, InFlight, Work
from composable_fsdp._runtime.collectives.encoded_reduce import EncodedAllReduce, Exchange, Parcel
from composable_fsdp._runtime.collectives.grad_mode import without_grad
from composable_fsdp._runtime.collectives.packing import together
from composable_fsdp._runtime.collectives.reduce_scatter import GradientScatter, ReducedBucket, Scatter
from composable_fsdp._sharding.process_groups import ProcessGroups

__all__ = ["Job", "Reducible", "launch_reduction"]


class Reducible(Protocol):
    """The interface of a bucket that a reduction uses."""

    @property
    def plan(self) -> BucketPlan: ...

    @property
    def pgs(self) -> ProcessGroups: ...

    @property
    def scatter(self) -> GradientScatter: ...


class Job(NamedTuple):
    """One bucket of a reduction.

    ``hook`` is called with the reduced gradients: before their division by ``reduction.post_divide``, or after it if
    ``divides_first``.
    """

    bucket: Reducible
    reduction: Reduction
    scatter: Scatter
    hook: Callable[[torch.Tensor], None] | None = None
    divides_first: bool = False


def launch_reduction(
    streams: CommStreams, jobs: Sequence[Job], device: torch.device, name: str, *, partial: bool
) -> InFlight[list[ReducedBucket]]:
    """Launch the reduction over the shard axis, then over the replicate axis if there is one; return the sharded
    gradients.

    Args:
        streams: where each collective runs.
        jobs: buckets of one or several groups, in the same order on every rank.
        device: where modules compute.
        name: the name in errors, the same on every rank.
        partial: reduce over the shard axis only. The buckets keep the result for a later reduction, and the list is
            empty.
    """
    legs = _Legs(jobs, device, name)
    if partial:
        return streams.reduce.run(legs.scatter, legs.keep)
    if all(job.bucket.pgs.replicate.size == 1 for job in jobs):
        return streams.reduce.run(legs.scatter, legs.deliver)
    scattered = streams.reduce.run(legs.scatter, legs.arrive)
    if not any(job.bucket.plan.gradient_codecs.replicate for job in jobs):
        return streams.replicate.run(legs.all_reduce, legs.deliver_reduced, after=scattered)
    summed = streams.replicate.run(legs.all_reduce, legs.add_up, after=scattered)
    return streams.replicate.run(legs.gather_sums, legs.deliver_gathered, after=summed)


class _Legs:
    """The collectives of a reduction and the work after each of them.

    In this order: ``scatter``, then ``all_reduce`` if there is a replicate axis, then ``gather_sums`` if that is
    encoded. After each, one of the methods that use its result.
    """

    def __init__(self, jobs: Sequence[Job], device: torch.device, name: str) -> None:
        self._jobs = jobs
        self._name = name
        self._device = device
        parcels = [(job.bucket.pgs.exchange, job.scatter.parcel) for job in jobs if job.scatter.parcel is not None]
        self._scatters = self._exchange(parcels)
        self._sums: list[Exchange] = []
        self._all_reduces: list[tuple[Communicator, EncodedAllReduce]] = []

    @without_grad
    def scatter(self) -> Work:
        label = f"reduce-scatter of {self._name}"
        plain = [job for job in self._jobs if job.scatter.transfers]
        works: list[Work] = [
            communicator.reduce_scatter([t for job in jobs for t in job.scatter.transfers], op, label)
            for (communicator, op), jobs in together([(j.bucket.pgs.scatter, j.reduction.op) for j in plain], plain)
        ]
        whole = [job for job in self._jobs if job.scatter.whole]
        works += [
            communicator.all_reduce([message for job in jobs for message in job.scatter.whole], op, label)
            for (communicator, op), jobs in together([(j.bucket.pgs.scatter, j.reduction.op) for j in whole], whole)
        ]
        works += [exchange.launch(label) for exchange in self._scatters]
        return works[0] if len(works) == 1 else Together(tuple(works))

    def _exchange(self, parcels: Sequence[tuple[Communicator, Parcel]]) -> list[Exchange]:
        return [
            Exchange(of_communicator, communicator, self._device)
            for communicator, of_communicator in together([c for c, _ in parcels], [p for _, p in parcels])
        ]

    @without_grad
    def arrive(self) -> None:
        """Finish ``scatter``: sum encoded gradients, and copy out this rank's shards of all-reduced ones."""
        for exchange in self._scatters:
            exchange.finish()
        for job in self._jobs:
            job.bucket.scatter.take_own(job.scatter)

    @without_grad
    def keep(self) -> list[ReducedBucket]:
        self.arrive()
        for job in self._jobs:
            job.bucket.scatter.keep_partial(job.scatter)
        return []

    @without_grad
    def all_reduce(self) -> Work:
        works: list[Work] = []
        label = f"all-reduce of {self._name}"
        for bucket, reduction, scatter, *_ in self._jobs:
            bucket.scatter.add_partial(scatter)
            encoded = bucket.scatter.encode_all_reduce(scatter)
            if encoded is None:
                works.append(bucket.pgs.replicate.all_reduce([scatter.output], reduction.op, label))
            else:
                self._all_reduces.append((bucket.pgs.replicate, encoded))
        parcels = [(communicator, encoded.parcel) for communicator, encoded in self._all_reduces]
        self._sums = self._exchange(parcels)
        return Together((*works, *(exchange.launch(label) for exchange in self._sums)))

    @without_grad
    def add_up(self) -> None:
        """Finish an encoded ``all_reduce``: decode and sum."""
        for exchange in self._sums:
            exchange.finish()

    @without_grad
    def gather_sums(self) -> Work:
        by_communicator = together([c for c, _ in self._all_reduces], [encoded for _, encoded in self._all_reduces])
        return Together(
            tuple(
                communicator.all_gather(
                    [encoded.gather(communicator) for encoded in of_communicator], f"all-gather of sums of {self._name}"
                )
                for communicator, of_communicator in by_communicator
            )
        )

    @without_grad
    def deliver_gathered(self) -> list[ReducedBucket]:
        for _, encoded in self._all_reduces:
            encoded.finish()
        return self.deliver_reduced()

    @without_grad
    def deliver(self) -> list[ReducedBucket]:
        self.arrive()
        for job in self._jobs:
            job.bucket.scatter.add_partial(job.scatter)
        return self.deliver_reduced()

    @without_grad
    def deliver_reduced(self) -> list[ReducedBucket]:
        reduced = []
        for bucket, reduction, scatter, hook, divides_first in self._jobs:
            if hook is not None:
                if divides_first:
                    divide(scatter.output, reduction.post_divide)
                    reduction = replace(reduction, post_divide=1.0)
                bucket.scatter.call_hook(scatter, hook)
            reduced.append(bucket.scatter.finish(scatter, reduction))
        return reduced
