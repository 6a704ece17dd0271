"""The communicators of one parameter group over one pair of data-parallel axes. They can be replaced."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import TypeVar

from composable_fsdp._comm.c10d import Pooled
from composable_fsdp._comm.communicator import Collective, Communicator, is_over_group
from composable_fsdp._comm.custom import customize
from composable_fsdp._comm.factory import communicator_over, part_of
from composable_fsdp._layout.bucket_layout import NEVER_ZERO_COPY
from composable_fsdp._layout.plan import MessageSizes, PlanOptions
from composable_fsdp._memory.device_capabilities import device_capabilities
from composable_fsdp._sharding.mesh import DataParallelAxes

__all__ = ["ProcessGroups", "group_by_key"]

_ONE_MESSAGE = MessageSizes(zero_copy=False, grad_buckets=1)

Key = TypeVar("Key")
Item = TypeVar("Item")


class ProcessGroups:
    """The communicators for all-gathers (``gather``) and reduce-scatters (``scatter``), over the same ranks.

    Reductions that add up in place use ``exchange``: ``scatter`` without the user's callable, because that callable
    moves bytes, and allocates memory, for reduce-scatters only.

    ``smaller`` is the communicator of the next all-gather, while slices are kept for it.
    """

    def __init__(self, axes: DataParallelAxes) -> None:
        self.axes = axes
        self.device = device_capabilities(axes.device)
        """The capabilities of the device on which modules compute."""
        self.gather: Communicator = axes.shard
        self.scatter: Communicator = axes.shard
        self.exchange: Communicator = axes.shard
        self.averages = axes.shard.traits.averages and axes.replicate.traits.averages
        """True if every axis can compute averages itself."""
        self._custom_gather: object = None
        self._custom_scatter: object = None
        self._separate: Communicator | None = None
        self._pooled = False
        self.smaller: Communicator | None = None
        self.unshard_async_op = False
        """The ``async_op`` argument for a custom all-gather."""
        self.message_sizes = self.default_message_sizes
        self.unequal_use = False
        """True if a rank may join a reduction without any gradient.

        A reduction then gives every trainable parameter a gradient, zeros for those that no rank used.
        """

    @property
    def replicate(self) -> Communicator:
        return self.axes.replicate

    @property
    def default_message_sizes(self) -> MessageSizes:
        """The sizes without a choice by costs: on streams one message per group and direction, as FSDP2 sends them."""
        return _ONE_MESSAGE if self.device.has_streams else MessageSizes()

    @property
    def is_custom(self) -> bool:
        """True if callables of the user move bytes."""
        return self._custom_gather is not None or self._custom_scatter is not None

    @property
    def has_separate_scatter(self) -> bool:
        """True if reduce-scatters have a process group of their own."""
        return self._separate is not None

    def plan_options(self, sizes: MessageSizes | None = None) -> PlanOptions:
        """Return the options of the group's plan, or of its plan with other message ``sizes``."""
        sizes = MessageSizes() if self.gather.traits.aliases else sizes or self.message_sizes
        return PlanOptions(
            num_shards=self.axes.shard.size,
            zero_copy_min_bytes=self.gather.traits.zero_copy_min_bytes if sizes.zero_copy else NEVER_ZERO_COPY,
            reduce_direct_bytes=self.scatter.traits.zero_copy_min_bytes if sizes.zero_copy else NEVER_ZERO_COPY,
            max_grad_buckets=sizes.grad_buckets,
            widens=self.scatter.traits.widens,
            grad_bucket_bytes=self._grad_bucket_bytes(),
            alias=self.gather.traits.aliases and self.gather.size == 1,
            flags=self.axes.num_ranks > 1 and not self.unequal_use,
            custom=self.is_custom,
        )

    def _grad_bucket_bytes(self) -> int:
        if self.axes.shard.size == 1 and self.replicate.size > 1:  # the only axis with communication
            return self.replicate.traits.grad_bucket_bytes
        return max(self.gather.traits.grad_bucket_bytes, self.scatter.traits.grad_bucket_bytes)

    def customize_gather(self, collective: object) -> None:
        """Use ``collective`` for all-gathers."""
        customize(self.axes.shard, Collective.ALL_GATHER, collective)  # raises if it cannot be used
        self._custom_gather = collective
        self._combine()

    def customize_scatter(self, collective: object) -> None:
        """Use ``collective`` for reduce-scatters."""
        customize(self.axes.shard, Collective.REDUCE_SCATTER, collective)
        self._custom_scatter = collective
        self._combine()

    def pool(self, pooled: bool) -> None:
        """Choose whether messages use the backend's allocator. Custom collectives allocate their own."""
        self._pooled = pooled
        self._combine()

    def separate_scatter(self, known: MutableMapping[object, Communicator] | None) -> None:
        """Give reduce-scatters their own process group, or undo that.

        Args:
            known: the duplicates made so far, keyed by the original process group; process groups with the same
                original share one. ``None`` undoes.
        """
        shard = self.axes.shard
        if known is None:
            self._separate = None
        elif self._separate is None and is_over_group(shard):
            if shard.group not in known:
                known[shard.group] = communicator_over(part_of(shard.group, shard.size), self.axes.device.type)
            self._separate = known[shard.group]
        self._combine()

    def follow(self, other: ProcessGroups) -> None:
        """Copy the choices made for ``other``."""
        self._custom_gather, self._custom_scatter = other._custom_gather, other._custom_scatter
        self._pooled, self._separate, self.unequal_use = other._pooled, other._separate, other.unequal_use
        self.unshard_async_op = other.unshard_async_op
        self._combine()

    def _combine(self) -> None:
        """Rebuild the communicators from all choices."""
        gather, scatter = self._with_pool(self.axes.shard), self._with_pool(self._separate or self.axes.shard)
        self.exchange = scatter
        if self._custom_gather is not None:
            gather = customize(gather, Collective.ALL_GATHER, self._custom_gather, self._all_gather_options)
        if self._custom_scatter is not None:
            scatter = customize(scatter, Collective.REDUCE_SCATTER, self._custom_scatter)
        self.gather, self.scatter = gather, scatter
        self.averages = scatter.traits.averages and self.replicate.traits.averages

    def _all_gather_options(self) -> dict[str, bool]:
        return {"async_op": self.unshard_async_op}

    def _with_pool(self, communicator: Communicator) -> Communicator:
        """Return ``communicator`` with the chosen allocator of messages."""
        if self._pooled and communicator.traits.dispatches:
            return Pooled(communicator)
        return communicator


def group_by_key(keys: Iterable[Key], members: Iterable[Item]) -> list[tuple[Key, list[Item]]]:
    """Group members with equal keys, in the order of the first of each: the same on every rank."""
    keys, members = list(keys), list(members)
    if keys and keys.count(keys[0]) == len(keys) == len(members):  # usually one communicator: skip hashing it
        return [(keys[0], members)]
    found: dict[Key, list[Item]] = {}
    for key, member in zip(keys, members, strict=True):
        found.setdefault(key, []).append(member)
    return list(found.items())
