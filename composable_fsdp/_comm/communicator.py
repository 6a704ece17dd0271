"""What a communicator is: the collectives of one mesh axis, launched without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from composable_fsdp._layout.grad_scaling import ReduceOp
from composable_fsdp._memory.streams import Work

__all__ = ["AliasingCommunicator", "Communicator", "GroupCommunicator", "Transfer", "Work"]


class Transfer(NamedTuple):
    """One tensor of a coalesced collective; both contiguous and 1-d.

    All-gather: ``output`` has ``size`` times the elements of ``input``, in rank order.
    Reduce-scatter: ``input`` has ``size`` times the elements of ``output``; rank r gets the r-th part. Where the
    communicator widens, ``input`` may have a narrower dtype.
    All-to-all: both have the same number of elements, in ``size`` parts.
    """

    output: torch.Tensor
    input: torch.Tensor


class Communicator(Protocol):
    """Collectives over the ranks of one mesh axis.

    Every method launches all of its transfers at once and returns a :class:`Work`; every rank of the axis must make the
    same calls in the same order. Tensors stay untouched by the caller until the work has been waited for. An empty list
    moves nothing. ``label`` is what errors call the operation, and must be the same on every rank.
    """

    @property
    def rank(self) -> int:
        """This rank's place on the axis."""
        ...

    @property
    def size(self) -> int:
        """Ranks on the axis."""
        ...

    @property
    def averages(self) -> bool:
        """Whether ``ReduceOp.AVERAGE`` is supported."""
        ...

    @property
    def widens(self) -> bool:
        """Whether a reduce-scatter takes 16-bit floats for an fp32 output, and adds them up in fp32."""
        ...

    @property
    def aliases(self) -> bool:
        """Whether ranks can have memory in common (:class:`AliasingCommunicator`), so that a gather moves nothing."""
        ...

    @property
    def direct_bytes(self) -> int:
        """Full size in bytes from which a tensor of its own transfer beats a copy into a packed one."""
        ...

    @property
    def whole_bytes(self) -> int:
        """Padding in bytes from which an all-reduce of its own, without any, beats all-gathers and reduce-scatters."""
        ...

    @property
    def batch_bytes(self) -> int:
        """Bytes of a group's gradients from which these are worth a reduction of their own, ahead of the rest."""
        ...

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """1-d memory for a message, contents undefined."""
        ...

    def all_gather(self, transfers: Sequence[Transfer], label: str = "") -> Work:
        """Every rank's ``input``, in rank order, in every rank's ``output``."""
        ...

    def reduce_scatter(self, transfers: Sequence[Transfer], op: ReduceOp, label: str = "") -> Work:
        """This rank's part of the reduced ``input`` in ``output``."""
        ...

    def all_to_all(self, transfers: Sequence[Transfer], label: str = "") -> Work:
        """The r-th part of every ``input`` goes to rank r; the r-th part of ``output`` is what came from there."""
        ...

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp, label: str = "") -> Work:
        """Reduces in place."""
        ...


class AliasingCommunicator(Communicator, Protocol):
    """A communicator whose ``aliases`` is true. One rank has all its memory in common."""

    @property
    def partings(self) -> int:
        """Counts the calls of :meth:`part`, which are the same on every rank."""
        ...

    def share(self, nbytes: int) -> torch.Tensor:
        """Zeros that all ranks have in common, ``(nbytes,)`` ``uint8`` on the CPU. All must ask, and wait, together."""
        ...

    def barrier(self, name: str) -> Work:
        """Tells every rank that this one has come; the work is done when all have. ``name`` is what errors call it."""
        ...

    def part(self, name: str) -> Work:
        """A barrier at which no rank reads what others wrote: afterwards each may write to its part of common memory.

        Every rank waits for the work before it launches anything else.
        """
        ...


@runtime_checkable
class GroupCommunicator(Communicator, Protocol):
    """A communicator of the ranks of a ``torch.distributed`` process group."""

    group: dist.ProcessGroup

    def with_pool(self, pooled: bool) -> GroupCommunicator:
        """The same ranks, with the memory of messages from the backend's allocator where it has one, or torch's."""
        ...
