"""The communicator over a ``torch.distributed`` process group of any backend.

This is the only file that knows the names of c10d's collectives in each release: torch 2.13 renamed
``all_gather_into_tensor`` and ``reduce_scatter_tensor`` and warns about the old names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from composable_fsdp import trace
from composable_fsdp._comm.communicator import Transfer, Work
from composable_fsdp._comm.device_connection import DeviceConnection
from composable_fsdp._layout.grad_scaling import ReduceOp
from composable_fsdp._memory.device_capabilities import backend_capabilities, device_capabilities

__all__ = ["OPERATIONS", "ProcessGroupCommunicator", "WorkList"]

_Call = tuple[Callable[..., Any], tuple[torch.Tensor, ...], dict[str, Any]]

_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

OPERATIONS = {ReduceOp.SUM: dist.ReduceOp.SUM, ReduceOp.AVERAGE: dist.ReduceOp.AVG}

_ZERO_COPY_BYTES_PER_RANK, _ZERO_COPY_BYTES = 1 << 17, 3 << 20
"""For unknown backends: with gloo's own collectives, zero-copy and copied-in transfers cost the same at these sizes."""

_COALESCED_LAUNCH_BYTES = 1 << 19
"""The cost of a launch in bytes, for backends that coalesce transfers into one launch. Estimated, not measured."""

_GRAD_BUCKET_BYTES_ON_STREAMS, _GRAD_BUCKET_PART_BYTES_ON_STREAMS = 1 << 27, 1 << 15
_GRAD_BUCKET_BYTES_ON_HOST = 1 << 19
"""On streams, only large groups with a large part per rank are split into gradient buckets. Their time is proportional
to their bytes, split or not, and the first gradient bucket does not wait for the last gradient. Estimated, not
measured.
"""


@dataclass(frozen=True, slots=True)
class WorkList:
    """Several works that are waited for as one."""

    works: tuple[Work, ...]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class ProcessGroupCommunicator:
    """Collectives of ``group`` for tensors on ``device_type``. Final.

    Args:
        group: the process group.
        device_type: device type of the tensors.
        pooled: allocate messages with the backend's own allocator if it has one (NCCL registers that memory).
        connection: checks and watches the operations; ``None`` for neither.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device_type: str,
        *,
        pooled: bool = False,
        connection: DeviceConnection | None = None,
    ) -> None:
        self._connection = connection
        self.group = group
        self.pooled = pooled
        self._device = torch.device(device_type)
        self._backend = backend_capabilities(group, device_type)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.aliases = False
        self.averages = self._backend.averages
        self.widens = False
        self.coalesces = self._backend.coalesces
        self.zero_copy_min_bytes = self._zero_copy_bytes()
        self.grad_bucket_bytes = self._grad_bucket_bytes()

    def _zero_copy_bytes(self) -> int:
        if self.coalesces:
            return _COALESCED_LAUNCH_BYTES
        return min(self.size * _ZERO_COPY_BYTES_PER_RANK, _ZERO_COPY_BYTES)

    def _grad_bucket_bytes(self) -> int:
        if device_capabilities(self._device).has_streams:
            return max(_GRAD_BUCKET_BYTES_ON_STREAMS, self.size * _GRAD_BUCKET_PART_BYTES_ON_STREAMS)
        return _GRAD_BUCKET_BYTES_ON_HOST

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._backend.name}, rank {self.rank} of {self.size})"

    def __eq__(self, other: object) -> bool:
        """Return whether collectives of both communicators can share one launch."""
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
        """Return a communicator of the same ranks that allocates with the backend's allocator or with torch's."""
        return ProcessGroupCommunicator(self.group, self._device.type, pooled=pooled, connection=self._connection)

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
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):  # NCCL coalesces only tensors of one dtype
            same_dtype = [tensor for tensor in tensors if tensor.dtype == dtype]
            works.append(self._launch(label, [(dist.all_reduce, (tensor,), operation) for tensor in same_dtype]))
        return works[0] if len(works) == 1 else WorkList(tuple(works))

    def _launch(self, label: str, calls: Sequence[_Call]) -> Work:
        if trace.listeners:
            _emit_collective(self.group, label, calls)
        if self._connection is None or not calls:
            return self._launch_unwatched(calls)
        operation = self._connection.begin(label, tuple([tensors[-1].nbytes for _, tensors, _ in calls]))
        try:
            return self._connection.launched(operation, self._launch_unwatched(calls))
        except dist.DistError as error:
            raise self._connection.failure(operation, str(error)) from error

    def _launch_unwatched(self, calls: Sequence[_Call]) -> Work:
        if len(calls) > 1 and self.coalesces:
            with self._coalesced() as works:
                for collective, tensors, options in calls:
                    collective(*tensors, group=self.group, **options)
            return works[0]
        launched = tuple(
            cast(Work, collective(*tensors, group=self.group, async_op=True, **options))
            for collective, tensors, options in calls
        )
        return WorkList(launched)

    @contextmanager
    def _coalesced(self) -> Iterator[list[Work]]:
        """Coalesce all collectives in the block into one launch, whose work is in the list after the block."""
        works: list[Work] = []
        with dist._coalescing_manager(group=self.group, device=self._device, async_ops=True) as manager:
            yield works
        works.append(cast(Work, manager))


_launched: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""The number of collectives per process group. Counted only while the trace has listeners."""


def _emit_collective(group: dist.ProcessGroup, label: str, calls: Sequence[_Call]) -> None:
    number = _launched[group] = _launched.get(group, 0) + 1
    position = trace.Position(group.group_name, tuple(dist.get_process_group_ranks(group)), 0, number)
    nbytes = sum(tensors[-1].nbytes for _, tensors, _ in calls)
    trace.emit(trace.Operation.COLLECTIVE, label, nbytes, position=position)
