"""The communicator over a ``torch.distributed`` process group, whatever its backend.

The only file that knows which names c10d's collectives have in which release: torch 2.13 renamed
``all_gather_into_tensor`` and ``reduce_scatter_tensor`` and warns about the old names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from composable_fsdp import trace
from composable_fsdp._comm.communicator import Communicator, GroupCommunicator, Transfer, Work
from composable_fsdp._layout.grad_scaling import ReduceOp
from composable_fsdp._memory.streams import blocks_the_host

__all__ = ["OPERATIONS", "ProcessGroupCommunicator", "Together", "gather_objects"]

T = TypeVar("T")
_Call = tuple[Callable[..., Any], tuple[torch.Tensor, ...], dict[str, Any]]

_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

OPERATIONS = {ReduceOp.SUM: dist.ReduceOp.SUM, ReduceOp.AVERAGE: dist.ReduceOp.AVG}

_DIRECT_PART_BYTES, _DIRECT_BYTES = 1 << 17, 3 << 20
"""For backends of which nothing is known: where gloo's own collectives cost the same direct and packed."""

_COALESCING_DIRECT_BYTES = 1 << 19
"""For backends that launch many transfers as one. An estimate of what a launch costs in bytes, not measured yet."""

_WHOLE_BYTES = _COALESCING_DIRECT_BYTES
"""The same estimate: what a launch costs in bytes."""

_BATCH_BYTES_ON_STREAMS, _BATCH_PART_BYTES_ON_STREAMS = 1 << 27, 1 << 15
_BATCH_BYTES_ON_HOST = 1 << 19
"""On streams only what is large and has a large part for each rank: it takes its time by its bytes, however it is cut,
and its beginning need not wait for its end. Estimates, not measured yet.
"""


@dataclass(frozen=True, slots=True)
class Together:
    """Several works as one."""

    works: tuple[Work, ...]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class ProcessGroupCommunicator:
    """Collectives of ``group`` for tensors on ``device_type``. Final.

    Args:
        group: the ranks.
        device_type: of the tensors.
        pooled: take the memory of messages from the backend's own allocator, where it has one (NCCL registers it).
    """

    def __init__(self, group: dist.ProcessGroup, device_type: str, *, pooled: bool = False) -> None:
        self.group = group
        self.pooled = pooled
        self._device = torch.device(device_type)
        self._backend = dist.get_backend(group)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.aliases = False
        self.averages = self._backend == "nccl"
        self.widens = False
        self.direct_bytes = self._direct_bytes()
        self.whole_bytes = _WHOLE_BYTES
        self.batch_bytes = self._batch_bytes()

    def _direct_bytes(self) -> int:
        if self._backend == "nccl":
            return _COALESCING_DIRECT_BYTES
        return min(self.size * _DIRECT_PART_BYTES, _DIRECT_BYTES)

    def _batch_bytes(self) -> int:
        if blocks_the_host(self._device):
            return _BATCH_BYTES_ON_HOST
        return max(_BATCH_BYTES_ON_STREAMS, self.size * _BATCH_PART_BYTES_ON_STREAMS)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._backend}, rank {self.rank} of {self.size})"

    def __eq__(self, other: object) -> bool:
        """Whether what goes over both may go in one launch."""
        return isinstance(other, ProcessGroupCommunicator) and self.group is other.group and self.pooled == other.pooled

    def __hash__(self) -> int:
        return id(self.group)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.pooled:
            backend = cast(Any, self.group)._get_backend(device)
            if backend.supports_tensor_alloc(device):
                return cast(torch.Tensor, backend.allocate_tensor(numel, dtype=dtype, device=device))
        return torch.empty(numel, dtype=dtype, device=device)

    def with_pool(self, pooled: bool) -> ProcessGroupCommunicator:
        """The same ranks, with the memory of messages from the backend's allocator or from torch's."""
        return ProcessGroupCommunicator(self.group, self._device.type, pooled=pooled)

    def all_gather(self, transfers: Sequence[Transfer], label: str = "") -> Work:
        return self._launch(label, [(_all_gather, (t.output, t.input), {}) for t in transfers])

    def reduce_scatter(self, transfers: Sequence[Transfer], op: ReduceOp, label: str = "") -> Work:
        operation = {"op": OPERATIONS[op]}
        return self._launch(label, [(_reduce_scatter, (t.output, t.input), operation) for t in transfers])

    def all_to_all(self, transfers: Sequence[Transfer], label: str = "") -> Work:
        return self._launch(label, [(dist.all_to_all_single, (t.output, t.input), {}) for t in transfers])

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp, label: str = "") -> Work:
        operation = {"op": OPERATIONS[op]}
        works = []
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):  # NCCL takes only one at a time
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            works.append(self._launch(label, [(dist.all_reduce, (tensor,), operation) for tensor in alike]))
        return works[0] if len(works) == 1 else Together(tuple(works))

    def _launch(self, label: str, calls: Sequence[_Call]) -> Work:
        if trace.listeners:
            _note(self.group, label, calls)
        if len(calls) > 1 and self._backend == "nccl":
            with self._coalesced() as works:
                for collective, tensors, options in calls:
                    collective(*tensors, group=self.group, **options)
            return works[0]
        launched = tuple(
            cast(Work, collective(*tensors, group=self.group, async_op=True, **options))
            for collective, tensors, options in calls
        )
        return Together(launched)

    @contextmanager
    def _coalesced(self) -> Iterator[list[Work]]:
        """One launch for all collectives inside; the work is in the list after the block."""
        works: list[Work] = []
        with dist._coalescing_manager(group=self.group, device=self._device, async_ops=True) as manager:
            yield works
        works.append(cast(Work, manager))


_launched: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""While somebody listens to the trace."""


def _note(group: dist.ProcessGroup, label: str, calls: Sequence[_Call]) -> None:
    number = _launched[group] = _launched.get(group, 0) + 1
    position = trace.Position(group.group_name, tuple(dist.get_process_group_ranks(group)), 0, number)
    nbytes = sum(tensors[-1].nbytes for _, tensors, _ in calls)
    trace.emit(trace.Operation.COLLECTIVE, label, nbytes, position=position)


def gather_objects(own: T, communicator: Communicator) -> list[T]:
    """``own`` of every rank of an axis, in their order; slow, for what is settled once. All must call together."""
    if not isinstance(communicator, GroupCommunicator):
        return [own] * communicator.size
    everyones = [own] * communicator.size
    dist.all_gather_object(everyones, own, group=communicator.group)
    return everyones
