"""The communicators with which one group talks over one pair of data-parallel axes. They can be exchanged."""

from __future__ import annotations

from collections.abc import MutableMapping

from composable_fsdp.comm.c10d import ProcessGroupCommunicator
from composable_fsdp.comm.custom import customize
from composable_fsdp.comm.protocol import Communicator
from composable_fsdp.layout.plan import PlanOptions
from composable_fsdp.mesh import DataParallelAxes

__all__ = ["Channel"]


_NEVER = 1 << 62


class Channel:
    """All-gathers go over ``gather``, reduce-scatters over ``scatter``: the same ranks, often the same communicator.

    ``smaller`` is the axis from which the next all-gather comes, while slices are kept on it.
    """

    def __init__(self, axes: DataParallelAxes) -> None:
        self.axes = axes
        self.gather: Communicator = axes.shard
        self.scatter: Communicator = axes.shard
        self.smaller: Communicator | None = None
        self.unequal_use = False
        """Whether a rank may take part in a reduction without any gradient."""

    @property
    def replicate(self) -> Communicator:
        return self.axes.replicate

    @property
    def averages(self) -> bool:
        """Whether every axis can average by itself."""
        return self.scatter.averages and self.replicate.averages

    def plan_options(self, *, offloaded: bool) -> PlanOptions:
        """What the plan needs to know."""
        return PlanOptions(
            num_shards=self.axes.shard.size,
            direct_bytes=self.gather.direct_bytes,
            reduce_direct_bytes=self.scatter.direct_bytes,
            alias=self.gather.aliases and not offloaded,
            flags_from=self._flags_from(),
        )

    def _flags_from(self) -> int:
        if self.axes.num_ranks == 1:
            return _NEVER
        return 1 if self.unequal_use else 2  # a group of one is reduced where its gradient is, or not at all

    def customize_gather(self, collective: object) -> None:
        """Lets ``collective`` move the bytes of all-gathers."""
        self.gather = customize(self.gather, collective, "set_custom_all_gather")

    def customize_scatter(self, collective: object) -> None:
        """Lets ``collective`` move the bytes of reduce-scatters."""
        self.scatter = customize(self.scatter, collective, "set_custom_reduce_scatter")

    def pool(self, pooled: bool) -> None:
        """Whether messages lie in memory of the backend's allocator."""
        shared = self.gather is self.scatter
        if isinstance(self.gather, ProcessGroupCommunicator):
            self.gather = self.gather.with_pool(pooled)
        if shared:
            self.scatter = self.gather
        elif isinstance(self.scatter, ProcessGroupCommunicator):
            self.scatter = self.scatter.with_pool(pooled)

    def separate_scatter(self, known: MutableMapping[object, ProcessGroupCommunicator] | None) -> None:
        """Gives reduce-scatters a process group of their own, or takes it back.

        Args:
            known: what was made so far, by the process group that it is a double of; every channel over the same one
                shares it. ``None`` takes back.
        """
        if known is None:
            self.scatter = self.gather
        elif isinstance(self.scatter, ProcessGroupCommunicator) and self.scatter is self.gather:
            if self.scatter.group not in known:
                known[self.scatter.group] = self.scatter.duplicate()
            self.scatter = known[self.scatter.group].with_pool(self.scatter.pooled)
