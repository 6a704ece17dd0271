"""Communicators: the collectives of one mesh axis, launched without waiting.

All kinds of collectives have one method, so a decorator (:class:`Around`) is one short class. Decorators are the only
way to add to what a launch does: see ``factory.AROUND`` for those that every communicator gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard, TypeVar
from weakref import ref

import torch
import torch.distributed as dist

from composable_fsdp import trace
from composable_fsdp._layout.bucket_layout import NEVER_ZERO_COPY
from composable_fsdp._layout.grad_scaling import ReduceOp
from composable_fsdp._memory.streams import Work
from composable_fsdp.errors import PeerError

__all__ = [
    "SUM",
    "Around",
    "Collective",
    "Communicator",
    "GroupCommunicator",
    "GroupReference",
    "LostError",
    "Traits",
    "Transfer",
    "Work",
    "find",
    "is_over_group",
    "trace_position",
]

T = TypeVar("T")

SUM = ReduceOp.SUM


class LostError(PeerError):
    """An operation failed in the backend, for a reason that other ranks know.

    Args:
        text: what the backend says.
        timed_out: the timeout of the process group is over.
    """

    def __init__(self, text: str, *, timed_out: bool) -> None:
        super().__init__(text)
        self.timed_out = timed_out


class Collective(Enum):
    """The kind of a collective."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    ALL_REDUCE = "all_reduce"
    BARRIER = "barrier"
    """Done when all ranks have launched it. Only communicators with ``aliases`` have it."""

    @property
    def label(self) -> str:
        """The name in errors of an operation without a label."""
        return self.value.replace("_", "-")


class Transfer(NamedTuple):
    """The output and input of one tensor in a coalesced collective. Both are contiguous and 1-d.

    - All-gather: ``output`` has ``size`` times the elements of ``input``, in rank order.
    - Reduce-scatter: ``input`` has ``size`` times the elements of ``output``, and rank r receives the r-th part. If the
      communicator widens, ``input`` may have a narrower dtype.
    - All-to-all: both have the same number of elements, in ``size`` parts.
    - All-reduce: both are the same tensor.
    """

    output: torch.Tensor
    input: torch.Tensor


@dataclass(frozen=True, slots=True)
class Traits:
    """The abilities of a communicator, and the sizes from which a choice between two ways pays off.

    Args:
        averages: ``ReduceOp.AVERAGE`` is supported.
        widens: a reduce-scatter accepts 16-bit floats for an fp32 output and accumulates in fp32.
        aliases: ranks can share memory, or one rank has all, so that an all-gather need not copy.
        coalesces: all transfers of a launch are one message with one latency.
        dispatches: collectives pass torch's dispatcher, so torch's profiler and dispatch modes see them by themselves.
        checks: the communicator itself compares operations between ranks, and reports waits.
        zero_copy_min_bytes: unsharded bytes from which a zero-copy transfer of a tensor is faster than copying it into
            a packed one.
        grad_bucket_bytes: bytes of a group's ready gradients from which they are worth a separate reduction, ahead of
            the rest.
    """

    averages: bool = False
    widens: bool = False
    aliases: bool = False
    coalesces: bool = False
    dispatches: bool = False
    checks: bool = False
    zero_copy_min_bytes: int = NEVER_ZERO_COPY
    grad_bucket_bytes: int = NEVER_ZERO_COPY


class Communicator(Protocol):
    """Collectives over the ranks of one mesh axis.

    Communicators that are equal can share one launch.
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
    def traits(self) -> Traits: ...

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate an uninitialized 1-d message buffer."""
        ...

    def launch(self, kind: Collective, transfers: Sequence[Transfer], label: str = "", op: ReduceOp = SUM) -> Work:
        """Launch one collective for all ``transfers`` at once.

        Every rank of the axis must make the same calls in the same order. The caller must not touch the tensors until
        it has waited for the work. An empty list transfers nothing.

        Args:
            kind: the collective.
            transfers: its tensors.
            label: the name of the operation in errors, the same on every rank.
            op: the operation of a reduce-scatter or an all-reduce.
        """
        ...


class GroupCommunicator(Communicator, Protocol):
    """A communicator over the ranks of a ``torch.distributed`` process group.

    All code that communicates over a group shares one, so its state is that of the connection between the ranks.
    """

    @property
    def group(self) -> dist.ProcessGroup: ...

    @property
    def name(self) -> str:
        """The name of the group."""
        ...

    ranks: tuple[int, ...]
    """The global ranks of the group."""

    @property
    def generation(self) -> int:
        """The number of times that the ranks have reconnected."""
        ...

    @property
    def launched(self) -> int:
        """The number of collectives launched since then."""
        ...

    @property
    def is_broken(self) -> bool:
        """True after a failure, until the ranks have reconnected."""
        ...

    def check(self) -> None:
        """Raise a ``PeerError`` if it is broken."""
        ...

    def give_up(self, reason: str) -> None:
        """End all waits, and let later launches raise a ``PeerError``. Any thread may call it."""
        ...

    def abandon(self) -> None:
        """Abort operations in flight, before their memory is freed and :meth:`reopen` is called."""
        ...

    def reopen(self) -> None:
        """Connect anew. All ranks must call it together.

        Raises:
            PeerError: some rank cannot connect.
        """
        ...


class Around:
    """A communicator that does what ``base`` does. A decorator derives from it, and defines ``launch`` or ``allocate``.

    Decorators are equal if their types, ``base`` and ``settings`` are.
    """

    def __init__(self, base: Communicator, *settings: object) -> None:
        self.base, self.settings = base, settings
        self.rank, self.size, self.traits = base.rank, base.size, base.traits
        for method in ("allocate", "launch"):
            if not hasattr(type(self), method):
                setattr(self, method, getattr(base, method))

    if TYPE_CHECKING:
        allocate = Communicator.allocate
        launch = Communicator.launch

    def __getattr__(self, name: str) -> Any:
        if name == "base":  # not set yet, as in a copy
            raise AttributeError(name)
        return getattr(self.base, name)

    def __eq__(self, other: object) -> bool:
        """Return whether collectives of both can share one launch."""
        if not isinstance(other, Around):
            return False
        return self is other or (type(self), self.base, self.settings) == (type(other), other.base, other.settings)

    def __hash__(self) -> int:
        return hash(self.base)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base!r})"


class GroupReference:
    """A weak reference to a process group. Torch owns the group, until the program destroys it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._ranks = ref(group), dist.get_process_group_ranks(group)

    def __call__(self) -> dist.ProcessGroup:
        """Return the process group.

        Raises:
            PeerError: it was destroyed.
        """
        group = self._group()
        if group is None:
            raise PeerError(f"the process group of ranks {self._ranks} was destroyed, so nothing can be sent over it.")
        return group


def is_over_group(communicator: object) -> TypeGuard[GroupCommunicator]:
    """Return whether ``communicator``, or what it is around, communicates over a process group."""
    return hasattr(communicator, "ranks")


def trace_position(communicator: GroupCommunicator, number: int) -> trace.Position:
    """Return the position of the ``number``-th collective since the ranks have connected, from 1."""
    return trace.Position(communicator.name, communicator.ranks, communicator.generation, number)


def find(communicator: object, kind: type[T]) -> T | None:
    """Return the first object of type ``kind`` among ``communicator`` and what it is around, or ``None``."""
    while not isinstance(communicator, kind):
        if not isinstance(communicator, Around):
            return None
        communicator = communicator.base
    return communicator
