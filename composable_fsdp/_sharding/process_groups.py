"""The communicators with which one group talks over one pair of data-parallel axes. They can be exchanged."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import cast

import torch

from composable_fsdp._comm.communicator import AliasingCommunicator, Communicator, GroupCommunicator
from composable_fsdp._comm.custom import customize
from composable_fsdp._comm.factory import duplicate
from composable_fsdp._layout.plan import PlanOptions
from composable_fsdp._sharding.mesh import DataParallelAxes

__all__ = ["ProcessGroups"]


class ProcessGroups:
    """All-gathers go over ``gather``, reduce-scatters over ``scatter``: the same ranks, often the same communicator.

    Gradients that are added up where they arrive go over ``exchange``, which is ``scatter`` without a callable of the
    user in its place: that moves the bytes of reduce-scatters, in memory that it gives for nothing else.

    ``smaller`` is the axis from which the next all-gather comes, while slices are kept on it.
    """

    def __init__(self, axes: DataParallelAxes) -> None:
        self.axes = axes
        self.gather: Communicator = axes.shard
        self.scatter: Communicator = axes.shard
        self.exchange: Communicator = axes.shard
        self._custom_gather: object = None
        self._custom_scatter: object = None
        self._separate: Communicator | None = None
        self._pooled = False
        self.smaller: Communicator | None = None
        self.common_memory: torch.Tensor | None = None
        """``(nbytes,)``, where the shards of all ranks lie, or their full parameters, if these have it in common."""
        self._released_at = -1
        """The axis' ``partings`` when full parameters in common memory were last released."""
        self.unshard_async_op = False
        """The ``async_op`` that a custom all-gather is called with."""
        self.awaits_parting = False
        """Whether this rank has read full parameters in common memory since all ranks last parted, or still may. All
        ranks find the same, since they gather and part together.
        """
        self.unequal_use = False
        """Whether a rank may take part in a reduction without any gradient. A reduction then gives all trainable
        parameters a gradient, zeros for those that no rank used.
        """

    @property
    def replicate(self) -> Communicator:
        return self.axes.replicate

    def note_release(self) -> None:
        """This rank no longer reads the full parameters in common memory, but others may until all have parted."""
        self._released_at = cast(AliasingCommunicator, self.axes.shard).partings

    @property
    def others_may_read(self) -> bool:
        """Whether full parameters in common memory may be in use on other ranks. All ranks find the same."""
        return (
            self.common_memory is not None and self._released_at == cast(AliasingCommunicator, self.axes.shard).partings
        )

    @property
    def is_custom(self) -> bool:
        """Whether callables of the user move bytes."""
        return self._custom_gather is not None or self._custom_scatter is not None

    @property
    def gathers_over(self) -> Communicator:
        """From where the next all-gather comes."""
        return self.smaller or self.gather

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
            whole_bytes=self.gather.whole_bytes,
            reduce_whole_bytes=self.scatter.whole_bytes,
            widens=self.scatter.widens,
            batch_bytes=self._batch_bytes(),
            alias=self.gather.aliases and not offloaded and (self.gather.size == 1 or self.common_memory is not None),
            flags=self.axes.num_ranks > 1 and not self.unequal_use,
        )

    def _batch_bytes(self) -> int:
        if self.axes.shard.size == 1 and self.replicate.size > 1:  # all that travels
            return self.replicate.batch_bytes
        return max(self.gather.batch_bytes, self.scatter.batch_bytes)

    def customize_gather(self, collective: object) -> None:
        """Lets ``collective`` move the bytes of all-gathers."""
        customize(self.axes.shard, collective, "set_custom_all_gather")  # raises where it cannot
        self._custom_gather = collective
        self._combine()

    def customize_scatter(self, collective: object) -> None:
        """Lets ``collective`` move the bytes of reduce-scatters."""
        customize(self.axes.shard, collective, "set_custom_reduce_scatter")
        self._custom_scatter = collective
        self._combine()

    def pool(self, pooled: bool) -> None:
        """Whether messages lie in memory of the backend's allocator. Custom collectives allocate their own."""
        self._pooled = pooled
        self._combine()

    def separate_scatter(self, known: MutableMapping[object, GroupCommunicator] | None) -> None:
        """Gives reduce-scatters a process group of their own, or takes it back.

        Args:
            known: what was made so far, by the process group that it is a double of; every channel over the same one
                shares it. ``None`` takes back.
        """
        shard = self.axes.shard
        if known is None:
            self._separate = None
        elif self._separate is None and isinstance(shard, GroupCommunicator):
            if shard.group not in known:
                known[shard.group] = duplicate(shard, self.axes.device.type)
            self._separate = known[shard.group]
        self._combine()

    def follow(self, other: ProcessGroups) -> None:
        """Takes over what was chosen for ``other``."""
        self._custom_gather, self._custom_scatter = other._custom_gather, other._custom_scatter
        self._pooled, self._separate, self.unequal_use = other._pooled, other._separate, other.unequal_use
        self.unshard_async_op = other.unshard_async_op
        self._combine()

    def _combine(self) -> None:
        """Makes both communicators out of all that was chosen."""
        gather, scatter = self._with_pool(self.axes.shard), self._with_pool(self._separate or self.axes.shard)
        self.exchange = scatter
        if self._custom_gather is not None:
            gather = customize(gather, self._custom_gather, "set_custom_all_gather", self._all_gather_options)
        if self._custom_scatter is not None:
            scatter = customize(scatter, self._custom_scatter, "set_custom_reduce_scatter")
        self.gather, self.scatter = gather, scatter

    def _all_gather_options(self) -> dict[str, bool]:
        return {"async_op": self.unshard_async_op}

    def _with_pool(self, communicator: Communicator) -> Communicator:
        if isinstance(communicator, GroupCommunicator) and self._pooled:
            return communicator.with_pool(True)
        return communicator
