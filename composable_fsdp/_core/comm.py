"""Communicators: the collectives of one mesh axis, their decorators, and how they are found."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard, TypeVar, cast
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from composable_fsdp._core.layout import NEVER_ZERO_COPY, ReduceOp
from composable_fsdp._core.memory import Work, backend_capabilities, device_capabilities
from composable_fsdp.errors import PeerError

T = TypeVar("T")

SUM = ReduceOp.SUM


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
        checks: nothing needs to watch it: it compares operations and reports waits itself, or has no peers.
        zero_copy_min_bytes: unsharded bytes from which a zero-copy transfer of a tensor is faster than copying it into
            a packed one.
    """

    averages: bool = False
    widens: bool = False
    aliases: bool = False
    coalesces: bool = False
    dispatches: bool = False
    checks: bool = False
    zero_copy_min_bytes: int = NEVER_ZERO_COPY


# Note: what ranks must agree on
#
# A collective has no name on the wire: the n-th launch of a rank over a process group meets the n-th of each other one.
# So all that decides about launches must be the same on all ranks of the group:
#   - the kind, order, sizes and dtypes of messages: they follow from model and options, compared once before the
#     first collective, and from the recorded order of the last forward that all ranks ran;
#   - never from which parameters have a gradient here, memory that is free here, time, addresses, or orders of sets.
# A rank that uses a part of the model sends zeros and flags for the rest. A forward without grad that gathers
# nothing may run on some ranks only: it changes no plan. What a rank alone finds, such as an error, it tells through
# the store.


class Communicator(Protocol):
    """Collectives over the ranks of one mesh axis.

    Communicators that are equal can share one launch.
    """

    @property
    def rank(self) -> int:
        """This rank's index on the axis."""

    @property
    def size(self) -> int:
        """The number of ranks on the axis."""

    @property
    def traits(self) -> Traits: ...

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate an uninitialized 1-d message buffer."""

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


class GroupCommunicator(Communicator, Protocol):
    """A communicator over the ranks of a ``torch.distributed`` process group.

    All code that communicates over a group shares one, so its state is that of the connection between the ranks.
    """

    @property
    def group(self) -> dist.ProcessGroup: ...

    @property
    def name(self) -> str:
        """The name of the group."""

    ranks: tuple[int, ...]
    """The global ranks of the group."""

    @property
    def generation(self) -> int:
        """The number of times that the ranks have reconnected."""

    @property
    def launched(self) -> int:
        """The number of collectives launched since then."""

    @property
    def is_broken(self) -> bool:
        """True after a failure, until the ranks have reconnected."""

    def check(self) -> None:
        """Raise a ``PeerError`` if it is broken."""

    def give_up(self, reason: str) -> None:
        """End all waits, and let later launches raise a ``PeerError``. Any thread may call it."""

    def abandon(self) -> None:
        """Abort operations in flight, before their memory is freed and :meth:`reopen` is called."""

    def reopen(self) -> None:
        """Connect anew. All ranks must call it together.

        Raises:
            PeerError: some rank cannot connect.
        """


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


class OverGroup:
    """The base of communicators over a process group. They refer to it weakly: torch owns it until it is destroyed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.name = ref(group), group.group_name
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.rank, self.size = dist.get_rank(group), len(self.ranks)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            PeerError: it was destroyed.
        """
        group = self._group()
        if group is None:
            ranks = list(self.ranks)
            raise PeerError(f"the process group of ranks {ranks} was destroyed, so nothing can be sent over it.")
        return group

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size})"


def is_over_group(communicator: object) -> TypeGuard[GroupCommunicator]:
    """Return whether ``communicator``, or what it is around, communicates over a process group."""
    return hasattr(communicator, "ranks")


def find(communicator: object, kind: type[T]) -> T | None:
    """Return the first object of type ``kind`` among ``communicator`` and what it is around, or ``None``."""
    while not isinstance(communicator, kind):
        if not isinstance(communicator, Around):
            return None
        communicator = communicator.base
    return communicator


logger = logging.getLogger(__name__)

_COLLECTIVES: dict[Collective, Callable[..., Any]] = {
    Collective.ALL_GATHER: getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor,
    Collective.REDUCE_SCATTER: getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor,
    Collective.ALL_TO_ALL: dist.all_to_all_single,
}
_COALESCED: dict[Collective, tuple[str, type[Any]]] = {
    Collective.ALL_GATHER: ("allgather_into_tensor_coalesced", dist.distributed_c10d.AllgatherOptions),
    Collective.REDUCE_SCATTER: ("reduce_scatter_tensor_coalesced", dist.distributed_c10d.ReduceScatterOptions),
}
"""The method of process groups that launches several at once, and the class of its options. c10d's context manager for
that leaves its process group open if it ends with an exception: nothing that is launched later starts.
"""

OPERATIONS = {ReduceOp.SUM: dist.ReduceOp.SUM, ReduceOp.AVERAGE: dist.ReduceOp.AVG}

_DTYPES = frozenset(
    (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64)
)
"""The dtypes that NCCL and gloo both have. Others are sent as bytes, at the cost of a view."""

_ZERO_COPY_BYTES_PER_RANK, _ZERO_COPY_BYTES = 1 << 17, 3 << 20
"""For unknown backends: with gloo's own collectives, zero-copy and copied-in transfers cost the same at these sizes."""

_COALESCED_LAUNCH_BYTES = 1 << 19
"""The cost of a launch in bytes, for backends that coalesce transfers into one launch. Estimated, not measured."""


@dataclass(frozen=True, slots=True)
class WorkList:
    """Several works that are waited for as one."""

    works: tuple[Work, ...]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


DONE = WorkList(())
"""The work of an operation that is done, or on the current stream: what comes after it there runs after it."""


class ProcessGroupCommunicator(OverGroup):
    """Collectives of ``group`` for tensors on ``device_type``."""

    generation = 0
    """Always the first connection: only the owner of a process group can connect it anew."""

    def __init__(self, group: dist.ProcessGroup, device_type: str) -> None:
        super().__init__(group)
        self._has_streams = device_capabilities(torch.device(device_type)).has_streams
        self._backend = backend_capabilities(group, device_type)
        # On streams, a collective of NCCL runs on the stream that launches it; gloo runs in threads of its own.
        self._async_op = not (self._has_streams and self._backend.is_native)
        """False if a collective runs on the stream that launches it, with that stream's priority, as from FSDP2."""
        one_by_one = min(self.size * _ZERO_COPY_BYTES_PER_RANK, _ZERO_COPY_BYTES)
        self.traits = Traits(
            averages=self._backend.averages,
            coalesces=self._backend.coalesces,
            dispatches=True,
            checks=self.size == 1 or not self._backend.is_watchable,
            zero_copy_min_bytes=_COALESCED_LAUNCH_BYTES if self._backend.coalesces else one_by_one,
        )
        self.launched = 0
        self._broken = ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._backend.name}, rank {self.rank} of {self.size})"

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def launch(self, kind: Collective, transfers: Sequence[Transfer], label: str = "", op: ReduceOp = SUM) -> Work:
        self.check()
        self.launched, group, async_op = self.launched + 1, self.group, self._async_op
        # Send what the backend cannot, as bytes.
        pairs = [pair if pair[1].dtype in _DTYPES else _in_known_dtype(kind, *pair) for pair in transfers]
        started: list[Any] = []
        # One launch for each tensor, or for all of one dtype if the backend coalesces.
        if kind is Collective.ALL_REDUCE:
            for output, _ in pairs:
                started.append(dist.all_reduce(output, op=OPERATIONS[op], group=group, async_op=async_op))
        elif len(pairs) > 1 and self._backend.coalesces and kind in _COALESCED:
            by_dtype: dict[torch.dtype, list[Transfer]] = {}  # NCCL coalesces only tensors of one dtype
            for pair in pairs:
                by_dtype.setdefault(pair[1].dtype, []).append(pair)
            started = [_launch_coalesced(group, kind, same, op, async_op) for same in by_dtype.values()]
        else:
            collective = _COLLECTIVES[kind]
            options = {"op": OPERATIONS[op]} if kind is Collective.REDUCE_SCATTER else {}
            for output, input in pairs:
                started.append(collective(output, input, group=group, async_op=async_op, **options))
        if not async_op:
            return DONE
        return started[0] if len(started) == 1 else WorkList(tuple(started))

    @property
    def is_broken(self) -> bool:
        return bool(self._broken)

    def check(self) -> None:
        if self._broken:
            raise PeerError(
                f"ranks {list(self.ranks)} cannot go on together, since {self._broken}\nOperations were aborted, so "
                "their results are undefined, and this process group cannot be used any more. End the job, and restart "
                "it from a checkpoint."
            )

    def give_up(self, reason: str) -> None:
        """Let later launches raise a ``PeerError``, and end a wait of the host by aborting operations in flight.

        On streams, waits do not block the host, and only threads of the program may touch the device: nothing is
        aborted before :meth:`abandon`.
        """
        self._broken = self._broken or reason
        if not self._has_streams:
            self._abort()

    def abandon(self) -> None:
        self._broken = self._broken or "operations were given up after a failed pass."
        self._abort()

    def _abort(self) -> None:
        group: Any = self.group
        try:
            if hasattr(group, "abort"):
                group.abort()
            else:  # torch has it from 2.6, but a backend in Python need not
                group.shutdown()
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            logger.warning("the process group of ranks %s cannot be aborted: %s", list(self.ranks), error)

    def reopen(self) -> None:
        """Refuse, since only the owner of the process group can connect it again."""
        raise PeerError(
            f"ranks {list(self.ranks)} cannot connect again over the backend of their process group after they failed "
            "at different operations. End the job, and restart it from a checkpoint."
        )


def _launch_coalesced(
    group: dist.ProcessGroup, kind: Collective, pairs: Sequence[Transfer], op: ReduceOp, async_op: bool
) -> Work | None:
    method, options_class = _COALESCED[kind]
    options = options_class()
    options.asyncOp = async_op
    if kind is Collective.REDUCE_SCATTER:
        options.reduceOp = OPERATIONS[op]
    work: Work | None = getattr(group, method)(*map(list, zip(*pairs, strict=True)), options)
    if work is not None and not async_op:  # torch before 2.12 takes no note of asyncOp here
        work.wait()
    return work


def _in_known_dtype(kind: Collective, output: torch.Tensor, input: torch.Tensor) -> Transfer:
    """Return views of a transfer, in bytes or in the parts of complex numbers."""
    dtype = input.dtype.to_real() if input.dtype.is_complex else torch.uint8
    if dtype is torch.uint8 and kind in (Collective.REDUCE_SCATTER, Collective.ALL_REDUCE):
        return Transfer(output, input)  # the backend tells what it cannot add up
    return Transfer(output.view(dtype), input.view(dtype))


_TRAITS = Traits(averages=True, widens=True, aliases=True, coalesces=True, checks=True, zero_copy_min_bytes=0)


@dataclass(frozen=True, slots=True)
class LoopbackCommunicator:
    """Collectives of one rank: copies. The sum or average of one summand is that summand."""

    rank: int = 0
    size: int = 1
    traits: Traits = _TRAITS

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def launch(self, kind: Collective, transfers: Sequence[Transfer], label: str = "", op: ReduceOp = SUM) -> Work:
        if kind is not Collective.ALL_REDUCE:
            for transfer in transfers:
                transfer.output.copy_(transfer.input)
        return DONE


TRANSPORTS: list[Callable[[dist.ProcessGroup, str], GroupCommunicator | None]] = [ProcessGroupCommunicator]
"""Each makes the communicator of a process group for a type of device, or returns ``None``. The first answer counts."""

AROUND: list[Callable[[Communicator], Communicator]] = []
"""Each decorates a new communicator or returns it unchanged. The last is the outermost."""


def has_own_transports(group: dist.ProcessGroup, device_type: str) -> bool:
    """Return whether plugins may send tensors of ``device_type`` over ``group`` without its own collectives."""
    return dist.get_world_size(group) > 1 and backend_capabilities(group, device_type).has_own_transports


def communicators(groups: Collection[dist.ProcessGroup]) -> Iterator[GroupCommunicator]:
    """Yield the communicators over ``groups`` that exist."""
    for group in groups:
        yield from _known.get(group, {}).values()


def _decorated(communicator: Communicator) -> Communicator:
    for around in AROUND:
        communicator = around(communicator)
    return communicator


# Communicators do not keep their process group alive, so an entry is freed with it. Never iterate over these: another
# thread may be adding a group.
_known: WeakKeyDictionary[dist.ProcessGroup, dict[str, GroupCommunicator]] = WeakKeyDictionary()
"""The communicator of each process group for each type of device: ``"cpu:gloo,cuda:nccl"`` has two."""
_creation_order: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Process groups in the order in which this rank first requested them."""
_next_index = count()


def communicator_over(group: dist.ProcessGroup, device_type: str) -> GroupCommunicator:
    """Return the communicator of ``group`` for tensors on ``device_type``, decorated.

    All ranks must make the first call for a group together. The communicator is cached.
    """
    known = _known.setdefault(group, {}).get(device_type)
    if known is None:
        _creation_order.setdefault(group, next(_next_index))
        # The first transport that serves the group and device makes its communicator; decorators go around it.
        made = (transport(group, device_type) for transport in TRANSPORTS)
        communicator = _decorated(next(found for found in made if found is not None))
        known = _known[group][device_type] = cast(GroupCommunicator, communicator)
    return known


def loopback() -> Communicator:
    """Return the communicator of an axis with one rank over which something is launched."""
    return _decorated(LoopbackCommunicator())


def reopen(groups: Collection[dist.ProcessGroup]) -> None:
    """Reconnect all communicators over ``groups``. All ranks of each group must call it together.

    Raises:
        PeerError: some rank cannot connect.
    """
    # The order is the same on all ranks.
    for group in sorted((group for group in groups if group in _known), key=_creation_order.__getitem__):
        for known in communicators([group]):
            known.reopen()
