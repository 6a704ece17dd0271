"""After a pass that failed: all ranks meet, and connect to each other anew where they were parted, so as to go on.

What was in flight on the old connections is lost on all ranks alike. The meeting comes first, since a rank may come
here long before the others have found out that something failed. Where all failed alike nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from composable_fsdp.comm.agreement import OrderCheck
from composable_fsdp.comm.choose import compare, position, reopen
from composable_fsdp.comm.protocol import Communicator, GroupCommunicator
from composable_fsdp.comm.watch import watch_of_job
from composable_fsdp.errors import DivergenceError
from composable_fsdp.runtime.unit import Unit

__all__ = ["Meeting", "has_failed", "meet", "reconnect", "set_order_check"]


@dataclass(frozen=True, slots=True)
class Meeting:
    """What ranks brought when they met.

    Args:
        at_same_place: whether what is in flight will come to its end.
        applied: by rank, how many backwards its parameters have.
    """

    at_same_place: bool
    applied: Mapping[int, int]

    def check_parameters(self) -> None:
        """
        Raises:
            DivergenceError: ranks have parameters of different steps. On all of them, with the same text.
        """
        if len(set(self.applied.values())) < 2:
            return
        lines = "".join(f"\n  rank {rank}: {applied} steps" for rank, applied in sorted(self.applied.items()))
        raise DivergenceError(
            "a pass failed on some ranks after others had completed it and stepped their optimizers, so that the "
            f"shards of the parameters are of different steps:{lines}\nLoad a checkpoint on all ranks, parameters and "
            "optimizer. Everything else is reset: training can go on from there."
        )


def has_failed(units: Iterable[Unit]) -> bool:
    """Whether the last pass did not come to its end on this rank, or something failed that its ``units`` need."""
    watch = watch_of_job()
    return watch is not None and (watch.has_failed or any(position(group) == "broken" for group in _groups(units)))


def meet(units: Iterable[Unit], applied: int) -> Meeting:
    """Waits for all ranks that hold parameters of ``units``. All of them must call it.

    Raises:
        PeerError: some have not come within the timeout of the process groups. Named in the text.
    """
    watch, groups = watch_of_job(), _groups(units)
    if watch is None or not groups:
        return Meeting(at_same_place=True, applied={})
    ranks = sorted({rank for group in groups for rank in dist.get_process_group_ranks(group)})
    seconds = max(_timeout(group) for group in groups)
    here = " ".join(map(position, groups))
    occasion = "after a pass has failed all ranks must call reset_iter_state() to go on"
    brought = [text.split("/") for text in watch.meet(ranks, f"{applied}/{here}", seconds, occasion)]
    watch.go_on()
    places = {place for _, place in brought}
    return Meeting(
        at_same_place="broken" not in here and len(places) == 1,
        applied={rank: int(of_rank) for rank, (of_rank, _) in zip(ranks, brought, strict=True)},
    )


def reconnect(units: Iterable[Unit]) -> None:
    """Connects anew to all ranks that hold parameters of ``units``. All of them must call it.

    Raises:
        PeerError: some cannot be reached any more.
    """
    reopen(_groups(units))


def set_order_check(units: Iterable[Unit], level: OrderCheck) -> None:
    """How much ranks compare before the operations of ``units``. The same on every rank."""
    compare(_groups(units), level)


def _groups(units: Iterable[Unit]) -> list[dist.ProcessGroup]:
    """The process groups over which ``units`` talk, each once."""
    communicators: list[Communicator] = []
    for unit in units:
        for channel in unit.group.channels:
            communicators += [channel.axes.shard, channel.axes.replicate, channel.scatter]
            if channel.smaller is not None:
                communicators.append(channel.smaller)
    return list(dict.fromkeys(c.group for c in communicators if isinstance(c, GroupCommunicator)))


def _timeout(group: dist.ProcessGroup) -> float:
    seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds
