"""After a pass that failed: all ranks meet, and connect to each other anew where they were parted, so as to go on.

What was in flight on the old connections is lost on all ranks alike. The meeting comes first, since a rank may come
here long before the others have found out that something failed. Where all failed alike nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from composable_fsdp._comm.communicator import Communicator, GroupCommunicator
from composable_fsdp._comm.factory import abandon, compare, position, reopen
from composable_fsdp._consistency.order_check import OrderCheck
from composable_fsdp._consistency.rank_report import ranks_text
from composable_fsdp._consistency.watchdog import job_watchdog
from composable_fsdp._runtime.groups.state import FSDPState
from composable_fsdp.errors import DivergenceError

__all__ = ["Meeting", "disconnect", "has_failed", "meet", "reconnect", "set_order_check"]


@dataclass(frozen=True, slots=True)
class Meeting:
    """What ranks found out when they met.

    Args:
        is_together: whether they are at the same place, so that what is in flight will come to its end. Otherwise
            :func:`reconnect`.
        steps: by rank, the optimizer steps that it took since the meeting before.
    """

    is_together: bool = True
    steps: Mapping[int, int] = field(default_factory=dict)

    def check_steps(self) -> None:
        """
        Raises:
            DivergenceError: some ranks took a step that others did not, so their shards are of different steps.
        """
        most = max(self.steps.values(), default=0)
        behind = [rank for rank, steps in self.steps.items() if steps < most]
        if behind:
            ahead = [rank for rank, steps in self.steps.items() if steps == most]
            raise DivergenceError(
                f"{ranks_text(ahead)} took an optimizer step after a backward that failed on {ranks_text(behind)}, so "
                "that shards are of different steps. Load a checkpoint on all ranks. To have steps taken by all or "
                "none, let ranks meet between backward and the optimizer's step, as composable_fsdp.find_nonfinite("
                "model) does: it raises where another rank failed."
            )


def has_failed(states: Iterable[FSDPState]) -> bool:
    """Whether the last pass did not come to its end on this rank, or something failed that its ``states`` need."""
    watchdog = job_watchdog()
    return watchdog is not None and (
        watchdog.has_failed or any(position(group) == "broken" for group in _groups(states))
    )


def meet(states: Iterable[FSDPState], steps: int) -> Meeting:
    """Waits for all ranks that hold parameters of ``states``. All of them must call it.

    Args:
        steps: that this rank's optimizers took since the meeting before.

    Raises:
        PeerError: some have not come within the timeout of the process groups. Named in the text.
    """
    watchdog, groups = job_watchdog(), _groups(states)
    if watchdog is None or not groups:
        return Meeting()
    seconds = max(_timeout(group) for group in groups)
    here = " ".join(map(position, groups))
    occasion = "after a pass has failed all ranks must call reset_iter_state() to go on"
    ranks = _ranks(states)
    brought = [text.split(" ", 1) for text in watchdog.meet(ranks, f"{steps} {here}", seconds, occasion)]
    watchdog.go_on()
    is_together = "broken" not in here and len({place for _, place in brought}) == 1
    return Meeting(is_together, {rank: int(taken) for rank, (taken, _) in zip(ranks, brought, strict=True)})


def disconnect(states: Iterable[FSDPState]) -> None:
    """Before :func:`reconnect`: nothing is written any more to the memory of what is under way."""
    abandon(_groups(states))


def reconnect(states: Iterable[FSDPState]) -> None:
    """Connects anew to all ranks that hold parameters of ``states``. All of them must call it.

    Raises:
        PeerError: some cannot be reached any more.
    """
    reopen(_groups(states))


def set_order_check(states: Iterable[FSDPState], level: OrderCheck) -> None:
    """How much ranks compare before the operations of ``states``. The same on every rank."""
    compare(_groups(states), level)


def _groups(states: Iterable[FSDPState]) -> list[dist.ProcessGroup]:
    """The process groups over which ``states`` talk, each once."""
    communicators: list[Communicator] = []
    for state in states:
        for pgs in state.group.process_groups:
            communicators += [pgs.axes.shard, pgs.axes.replicate, pgs.scatter]
            if pgs.smaller is not None:
                communicators.append(pgs.smaller)
    return list(dict.fromkeys(c.group for c in communicators if isinstance(c, GroupCommunicator)))


def _ranks(states: Iterable[FSDPState]) -> list[int]:
    """All ranks of the meshes of ``states``. Each of them gets the same list."""
    meshes = {pgs.axes.mesh for state in states for pgs in state.group.process_groups}
    return sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})


def _timeout(group: dist.ProcessGroup) -> float:
    seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds
