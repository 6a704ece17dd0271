"""The communicators of one parameter group over one pair of data-parallel axes. They can be replaced."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from composable_fsdp._comm.communicator import Communicator
from composable_fsdp._layout.bucket_layout import NEVER_ZERO_COPY
from composable_fsdp._layout.plan import MessageSizes, PlanOptions
from composable_fsdp._memory.device_capabilities import device_capabilities
from composable_fsdp._sharding.mesh import DataParallelAxes

__all__ = ["Channels", "ProcessGroups", "group_by_key"]

_ONE_MESSAGE = MessageSizes(zero_copy=False, grad_buckets=1)

Key = TypeVar("Key")
Item = TypeVar("Item")


class Channels:
    """The choice of the communicators of a group: here, that of the shard axis for all collectives. For plugins."""

    @property
    def can_be_shared(self) -> bool:
        """True if collectives of the group may be fused with those of other groups."""
        return True

    @property
    def has_separate_scatter(self) -> bool:
        """True if reduce-scatters have a process group of their own."""
        return False

    def of(self, axes: DataParallelAxes) -> tuple[Communicator, Communicator, Communicator]:
        """Return the communicators ``gather``, ``scatter`` and ``exchange`` for ``axes``."""
        return axes.shard, axes.shard, axes.shard


class ProcessGroups:
    """The communicators for all-gathers (``gather``) and reduce-scatters (``scatter``), over the same ranks.

    Encoded reductions, which add up themselves, use ``exchange``. ``averages`` is true if every axis can compute
    averages itself.

    ``smaller`` is the communicator of the next all-gather, while slices are kept for it.
    """

    def __init__(self, axes: DataParallelAxes) -> None:
        self.axes = axes
        self.device = device_capabilities(axes.device)
        """The capabilities of the device on which modules compute."""
        self.choose(Channels())
        self.smaller: Communicator | None = None
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
            custom=not self.channels.can_be_shared,
        )

    def _grad_bucket_bytes(self) -> int:
        if self.axes.shard.size == 1 and self.replicate.size > 1:  # the only axis with communication
            return self.replicate.traits.grad_bucket_bytes
        return max(self.gather.traits.grad_bucket_bytes, self.scatter.traits.grad_bucket_bytes)

    def choose(self, channels: Channels) -> None:
        """Use these communicators until the next choice."""
        self.channels = channels
        self.gather, self.scatter, self.exchange = channels.of(self.axes)
        self.averages = self.scatter.traits.averages and self.replicate.traits.averages

    def follow(self, other: ProcessGroups) -> None:
        """Copy the choices made for ``other``."""
        self.unequal_use = other.unequal_use
        self.choose(other.channels)


def group_by_key(keys: Iterable[Key], members: Iterable[Item]) -> list[tuple[Key, list[Item]]]:
    """Group members with equal keys, in the order of the first of each: the same on every rank."""
    keys, members = list(keys), list(members)
    if keys and keys.count(keys[0]) == len(keys) == len(members):  # usually one communicator: skip hashing it
        return [(keys[0], members)]
    found: dict[Key, list[Item]] = {}
    for key, member in zip(keys, members, strict=True):
        found.setdefault(key, []).append(member)
    return list(found.items())
