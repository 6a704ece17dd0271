"""The communicator over a ``torch.distributed`` process group of any backend.

This is the only file that knows the names of c10d's collectives in each release: torch 2.13 renamed
``all_gather_into_tensor`` and ``reduce_scatter_tensor`` and warns about the old names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from composable_fsdp._comm.communicator import SUM, Collective, GroupReference, Traits, Transfer, Work
from composable_fsdp._layout.grad_scaling import ReduceOp
from composable_fsdp._memory.device_capabilities import backend_capabilities, device_capabilities
from composable_fsdp.errors import PeerError

__all__ = ["OPERATIONS", "ProcessGroupCommunicator", "WorkList", "timeout_of_backend"]

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


_ENQUEUED = WorkList(())
"""The work of a collective on the current stream: what comes after it there runs after it."""


class ProcessGroupCommunicator:
    """Collectives of ``group`` for tensors on ``device_type``. Final."""

    generation = 0
    """Always the first connection: only the owner of a process group can connect it anew."""

    def __init__(self, group: dist.ProcessGroup, device_type: str) -> None:
        self._group, self.name = GroupReference(group), group.group_name
        self._has_streams = device_capabilities(torch.device(device_type)).has_streams
        self._backend = backend_capabilities(group, device_type)
        self._async_op = not (self._has_streams and self._backend.is_native)
        """False if a collective runs on the stream that launches it, with that stream's priority, as from FSDP2."""
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.traits = Traits(
            averages=self._backend.averages,
            coalesces=self._backend.coalesces,
            dispatches=True,
            checks=self.size == 1 or not self._backend.is_watchable,
            zero_copy_min_bytes=self._zero_copy_bytes(),
            grad_bucket_bytes=self._grad_bucket_bytes(),
        )
        self.launched = 0
        self._broken = ""

    @property
    def group(self) -> dist.ProcessGroup:
        return self._group()

    def _zero_copy_bytes(self) -> int:
        if self._backend.coalesces:
            return _COALESCED_LAUNCH_BYTES
        return min(self.size * _ZERO_COPY_BYTES_PER_RANK, _ZERO_COPY_BYTES)

    def _grad_bucket_bytes(self) -> int:
        if self._has_streams:
            return max(_GRAD_BUCKET_BYTES_ON_STREAMS, self.size * _GRAD_BUCKET_PART_BYTES_ON_STREAMS)
        return _GRAD_BUCKET_BYTES_ON_HOST

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._backend.name}, rank {self.rank} of {self.size})"

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def launch(self, kind: Collective, transfers: Sequence[Transfer], label: str = "", op: ReduceOp = SUM) -> Work:
        self.check()
        self.launched, group, async_op = self.launched + 1, self._group(), self._async_op
        pairs = [pair if pair[1].dtype in _DTYPES else _in_known_dtype(kind, *pair) for pair in transfers]
        started: list[Any] = []
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
            return _ENQUEUED
        return started[0] if len(started) == 1 else WorkList(tuple(started))

    @property
    def is_broken(self) -> bool:
        return bool(self._broken)

    def check(self) -> None:
        """Raise a ``PeerError`` if operations were aborted."""
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
        """Abort operations in flight, before their memory is freed."""
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
        """Refuse to connect again, which only the owner of the process group can do.

        Raises:
            PeerError: always.
        """
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


def timeout_of_backend(backend: Any) -> float:
    """Return the timeout of a backend in seconds; the default one if it does not tell."""
    timeout = getattr(getattr(backend, "options", None), "_timeout", dist.distributed_c10d.default_pg_timeout)
    return cast(timedelta, timeout).total_seconds()
