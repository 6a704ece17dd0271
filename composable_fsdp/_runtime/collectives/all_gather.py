"""All-gather of the parameters of one or several groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from composable_fsdp._comm.c10d import WorkList
from composable_fsdp._comm.communicator import AliasingCommunicator, Communicator
from composable_fsdp._layout.grad_scaling import ReduceOp
from composable_fsdp._memory.streams import CommStreams, InFlight, Work
from composable_fsdp._runtime.collectives.bucket import AllGatherBuffers, AnyBucket
from composable_fsdp._runtime.collectives.cached_gather import RepeatedGather, RepeatedLaunch, repeated_gather
from composable_fsdp._runtime.collectives.grad_mode import without_grad
from composable_fsdp._runtime.collectives.packing import group_by_key, pack_messages

__all__ = ["GatherCache", "launch_gather"]


class GatherCache:
    """The most recent all-gather, launched again by the next step if that gathers the same buckets. Final.

    Keeps its buckets alive until then, even one that its group has replaced.
    """

    def __init__(self) -> None:
        self._buckets: Sequence[AnyBucket] = ()
        self._communicators: Sequence[Communicator] = ()
        self._gather: RepeatedGather | None = None

    def of(self, buckets: Sequence[AnyBucket]) -> RepeatedGather | None:
        """Return the cached all-gather of all ``buckets``, or ``None`` if their shards cannot be sent unchanged."""
        process_groups = [bucket.pgs for bucket in buckets]
        if process_groups and process_groups[0].smaller is not None:
            return None  # the smaller mesh sends slices that forward has kept
        communicators = [pgs.gather for pgs in process_groups]
        if buckets != self._buckets or communicators != self._communicators:
            self._gather = None
            self._buckets, self._communicators = buckets, communicators
            self._gather = repeated_gather([bucket.cached_part for bucket in buckets], communicators)
        return self._gather


def launch_gather(
    streams: CommStreams, buckets: Sequence[AnyBucket], device: torch.device, label: str, last: GatherCache
) -> InFlight[None]:
    """Launch the all-gather of ``buckets``, one collective per communicator.

    If this raises, the unsharded memory of ``buckets`` is freed, unless part of the all-gather is in flight.

    Args:
        streams: where to launch.
        buckets: in the same order on every rank.
        device: where modules compute.
        label: the name in errors, the same on every rank.
        last: the cached all-gather of the same buckets, if any.
    """
    repeated = last.of(buckets)
    gathering = _AllGather(buckets, device, label) if repeated is None else RepeatedLaunch(repeated, label)
    try:
        return streams.gather.run(gathering.launch, gathering.finish)
    except BaseException:
        if not gathering.writes_to_places:
            for bucket in buckets:
                bucket.free()
        raise


class _AllGather:
    """One all-gather in flight. Owns the messages until they are no longer read."""

    def __init__(self, buckets: Sequence[AnyBucket], device: torch.device, label: str) -> None:
        self._buckets = buckets
        self._label = label
        self._device = device
        self._gathers: list[AllGatherBuffers] = []
        self.writes_to_places = False
        """True while collectives in flight write directly into the unsharded memory."""

    @without_grad
    def launch(self) -> Work:
        self._await_readers()
        self._gathers = [bucket.prepare_gather() for bucket in self._buckets]
        works: list[Work] = []
        for communicator, gathers in group_by_key([b.pgs.gathers_over for b in self._buckets], self._gathers):
            transfers = [transfer for gather in gathers for transfer in gather.zero_copy]
            transfers += pack_messages(gathers, communicator, self._device)
            all_reduced = [bits for gather in gathers for bits in gather.all_reduced]
            if all_reduced:
                works.append(communicator.all_reduce(all_reduced, ReduceOp.SUM, self._label))
            if communicator.aliases and not transfers:  # all shards are in place once every rank reaches the barrier
                works.append(cast(AliasingCommunicator, communicator).barrier(self._label))
            elif transfers or not all_reduced:
                works.append(communicator.all_gather(transfers, self._label))
            self.writes_to_places = self.writes_to_places or any(
                gather.zero_copy or gather.all_reduced for gather in gathers
            )
        return works[0] if len(works) == 1 else WorkList(tuple(works))

    def _await_readers(self) -> None:
        """Block until no rank reads shared memory that this all-gather overwrites."""
        axes = dict.fromkeys(bucket.pgs.axes.shard for bucket in self._buckets if bucket.awaits_readers)
        for meeting in [cast(AliasingCommunicator, axis).barrier("release before an all-gather") for axis in axes]:
            meeting.wait()

    @without_grad
    def finish(self) -> None:
        self.writes_to_places = False
        for bucket, gather in zip(self._buckets, self._gathers, strict=True):
            bucket.finish_gather(gather)
