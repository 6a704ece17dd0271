"""The communicator protocol: collectives of one mesh axis, launched without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from composable_fsdp._layout.grad_scaling import ReduceOp
from composable_fsdp._memory.streams import Work

__all__ = ["AliasingCommunicator", "Communicator", "GroupCommunicator", "Transfer", "Work"]


class Transfer(NamedTuple):
    """The output and input of one tensor in a coalesced collective. Both are contiguous and 1-d.

    - All-gather: ``output`` has ``size`` times the elements of ``input``, in rank order.
    - Reduce-scatter: ``input`` has ``size`` times the elements of ``output``, and rank r receives the r-th part. If the
      communicator widens, ``input`` may have a narrower dtype.
    - All-to-all: both have the same number of elements, in ``size`` parts.
    """

    output: torch.Tensor
    input: torch.Tensor


class Communicator(Protocol):
    """Collectives over the ranks of one mesh axis.

    Every method launches all of its transfers at once and returns a :class:`Work`. Every rank of the axis must make the
    same calls in the same order. The caller must not touch the tensors until it has waited for the work. An empty list
    transfers nothing. ``label`` names the operation in errors and must be the same on every rank.
    """

    @property
    def rank(self) -> int:
        """This rank's index on the axis."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks on the axis."""
        ...

    @property
    def averages(self) -> bool:
        """True if ``ReduceOp.AVERAGE`` is supported."""
        ...

    @property
    def widens(self) -> bool:
        """True if a reduce-scatter accepts 16-bit floats for an fp32 output and accumulates in fp32."""
        ...

    @property
    def aliases(self) -> bool:
        """True if ranks can share memory (:class:`AliasingCommunicator`), so that an all-gather copies nothing."""
        ...

    @property
    def coalesces(self) -> bool:
        """True if all transfers of a call are one launch, with one latency."""
        ...

    @property
    def zero_copy_min_bytes(self) -> int:
        """Unsharded bytes from which a zero-copy transfer of a tensor is faster than copying it into a packed one."""
        ...

    @property
    def grad_bucket_bytes(self) -> int:
        """Bytes of a group's ready gradients from which they are worth a separate reduction, ahead of the rest."""
        ...

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate an uninitialized 1-d message buffer."""
        ...

    def all_gather(self, transfers: Sequence[Transfer], label: str = "") -> Work:
        """Gather every rank's ``input``, in rank order, into every rank's ``output``."""
        ...

    def reduce_scatter(self, transfers: Sequence[Transfer], op: ReduceOp, label: str = "") -> Work:
        """Reduce ``input`` over the ranks and write this rank's part of the result to ``output``."""
        ...

    def all_to_all(self, transfers: Sequence[Transfer], label: str = "") -> Work:
        """Send the r-th part of every ``input`` to rank r, and receive from rank r into the r-th part of ``output``."""
        ...

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp, label: str = "") -> Work:
        """Reduce ``tensors`` in place."""
        ...


class AliasingCommunicator(Communicator, Protocol):
    """A communicator with ``aliases``: its ranks can share memory. On an axis of one rank, all memory is shared."""

    @property
    def epoch(self) -> int:
        """The number of :meth:`end_epoch` calls so far, which is the same on every rank."""
        ...

    def share(self, nbytes: int) -> torch.Tensor:
        """Return zeros that all ranks share, ``(nbytes,)`` ``uint8`` on the CPU. All ranks must call it together."""
        ...

    def barrier(self, name: str) -> Work:
        """Launch a barrier whose work is done when all ranks have launched it. ``name`` is its name in errors."""
        ...

    def end_epoch(self, name: str) -> Work:
        """Launch a barrier that ends an epoch of shared memory.

        No rank reads what others wrote before it. Afterwards each rank may write to its own part of the shared memory.
        Every rank must wait for the work before it launches anything else.
        """
        ...


@runtime_checkable
class GroupCommunicator(Communicator, Protocol):
    """A communicator over the ranks of a ``torch.distributed`` process group."""

    group: dist.ProcessGroup

    def with_pool(self, pooled: bool) -> GroupCommunicator:
        """Return a communicator of the same ranks that allocates with the backend's allocator, if any, or torch's."""
        ...
