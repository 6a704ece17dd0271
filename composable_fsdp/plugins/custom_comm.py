"""Choices of a group's communicators: callables of the user, the backend's allocator, a process group for reductions.

The callables have the interface of ``torch.distributed.fsdp``'s ``AllGather`` and ``ReduceScatter``: ``allocate(size,
*, dtype, device)`` returns a message buffer, and the call launches the collective and returns a work, or ``None`` if it
is already done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from composable_fsdp._consistency.process_groups import part_of
from composable_fsdp._core.comm import (
    OPERATIONS,
    SUM,
    Around,
    Collective,
    Communicator,
    GroupCommunicator,
    Traits,
    Transfer,
    WorkList,
    communicator_over,
    is_over_group,
)
from composable_fsdp._core.layout import ReduceOp
from composable_fsdp._core.memory import Work
from composable_fsdp._core.mesh import Channels, DataParallelAxes, ProcessGroups
from composable_fsdp._core.state import FSDPState
from composable_fsdp.errors import ArgumentTypeError


class CustomCollective(Protocol):
    """The argument type of ``set_custom_all_gather`` and ``set_custom_reduce_scatter``."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a 1-d message buffer of ``size`` elements."""
        ...

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, *args: Any, **kw: Any
    ) -> Work | None:
        """Launch. An all-gather gets the keyword ``async_op``, a reduce-scatter ``op``, a ``dist.ReduceOp``."""
        ...


class CustomCommunicator(Around):
    """Collectives of one kind are launched by ``collective``, a callable of the user.

    All parameters of a group and dtype share one message, so that ``allocate`` is called for all of them.

    Args:
        base: the communicator of the other kinds.
        kind: an all-gather or a reduce-scatter.
        collective: the user's collective.
        async_op: the keyword of an all-gather.
    """

    def __init__(
        self, base: GroupCommunicator, kind: Collective, collective: CustomCollective, *, async_op: bool = False
    ) -> None:
        super().__init__(base, kind, collective, async_op)
        self.traits = Traits(averages=base.traits.averages)
        self._kind, self._collective, self._async_op = kind, collective, async_op

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._collective.allocate((numel,), dtype=dtype, device=device)

    def launch(self, kind: Collective, transfers: Sequence[Transfer], label: str = "", op: ReduceOp = SUM) -> Work:
        if kind is not self._kind:
            return self.base.launch(kind, transfers, label, op)
        options = {"async_op": self._async_op} if kind is Collective.ALL_GATHER else {"op": OPERATIONS[op]}
        call, group = self._collective, self.group
        works = [call(output_tensor=t.output, input_tensor=t.input, group=group, **options) for t in transfers]
        return WorkList(tuple(work for work in works if work is not None))


class Pooled(Around):
    """Messages are in memory of the backend's own allocator, if it has one (NCCL registers that memory)."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        backend = self.group._get_backend(device)
        if backend.supports_tensor_alloc(device):
            return cast(torch.Tensor, backend.allocate_tensor(numel, dtype=dtype, device=device))
        return self.base.allocate(numel, dtype, device)


@dataclass(frozen=True)
class ChosenChannels(Channels):
    """The choices of the user for one group and pair of axes.

    Encoded reductions do not use ``custom_scatter``, which moves bytes, and allocates memory, for reduce-scatters only.

    Args:
        custom_gather: the user's all-gather, or ``None``.
        custom_scatter: the user's reduce-scatter, or ``None``.
        async_op: the argument for the user's all-gather.
        separate: the communicator of reductions, if they have a process group of their own.
        pooled: messages use the backend's allocator. Custom collectives allocate their own.
    """

    custom_gather: Any = None
    custom_scatter: Any = None
    async_op: bool = False
    separate: Communicator | None = None
    pooled: bool = False

    @property
    def can_be_shared(self) -> bool:
        return self.custom_gather is None and self.custom_scatter is None

    @property
    def has_separate_scatter(self) -> bool:
        return self.separate is not None

    def of(self, axes: DataParallelAxes) -> tuple[Communicator, Communicator, Communicator]:
        gather, exchange = (
            Pooled(each) if self.pooled and each.traits.dispatches else each
            for each in (axes.shard, self.separate or axes.shard)
        )
        scatter = exchange
        if self.custom_gather is not None and is_over_group(gather):
            gather = CustomCommunicator(gather, Collective.ALL_GATHER, self.custom_gather, async_op=self.async_op)
        if self.custom_scatter is not None and is_over_group(scatter):
            scatter = CustomCommunicator(scatter, Collective.REDUCE_SCATTER, self.custom_scatter)
        return gather, scatter, exchange


def choose(states: Iterable[FSDPState], **choices: Any) -> None:
    """Change ``choices`` of all groups of ``states``: arguments of :class:`ChosenChannels`.

    Raises:
        ArgumentTypeError: a custom collective lacks ``allocate`` or cannot be called.
    """
    for name, kind in (("custom_gather", Collective.ALL_GATHER), ("custom_scatter", Collective.REDUCE_SCATTER)):
        collective = choices.get(name)
        if name in choices and not (callable(collective) and callable(getattr(collective, "allocate", None))):
            raise ArgumentTypeError(
                f"set_custom_{kind.value} takes an object with allocate(size, *, dtype, device) that can be called "
                f"with (output_tensor, input_tensor, group, ...), not {type(collective).__name__}."
            )
    for state in states:
        for pgs in state.group.process_groups:
            pgs.choose(replace(_chosen(pgs), **choices))


def _chosen(pgs: ProcessGroups) -> ChosenChannels:
    return pgs.channels if isinstance(pgs.channels, ChosenChannels) else ChosenChannels()


def separate_scatter(states: Iterable[FSDPState], enable: bool) -> None:
    """Give reduce-scatters process groups of their own, one for each of the shard axes', or undo that."""
    made: dict[object, Communicator] = {}
    for state in states:
        for pgs in state.group.process_groups:
            shard, separate = pgs.axes.shard, _chosen(pgs).separate if enable else None
            if enable and separate is None and is_over_group(shard):
                if shard.group not in made:
                    made[shard.group] = communicator_over(part_of(shard.group, shard.size), pgs.axes.device.type)
                separate = made[shard.group]
            pgs.choose(replace(_chosen(pgs), separate=separate))


@contextmanager
def unshard_async_op(state: FSDPState, async_op: bool) -> Iterator[None]:
    """Pass ``async_op`` to the custom all-gathers of ``state`` in this context."""
    before = [pgs.channels for pgs in state.group.process_groups]
    choose([state], async_op=async_op)
    try:
        yield
    finally:
        for pgs, channels in zip(state.group.process_groups, before, strict=True):
            pgs.choose(channels)
