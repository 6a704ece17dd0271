"""The communicator of ranks on one host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from composable_fsdp._comm.comm_debug import profiled
from composable_fsdp._comm.communicator import Transfer, Work
from composable_fsdp._comm.shm import collective as operation
from composable_fsdp._comm.shm.engine import ShmEngine
from composable_fsdp._layout.bucket_layout import NEVER_DIRECT
from composable_fsdp._layout.grad_scaling import ReduceOp
from composable_fsdp.errors import UnsupportedError

__all__ = ["SharedMemoryCommunicator"]

_DIRECT_BYTES = 1 << 18
"""Where direct and packed cost the same with 2 and 4 ranks, as ``benchmarks/collectives.py`` finds it."""


@dataclass(frozen=True, slots=True)
class _Done:
    def wait(self) -> None:
        pass


class SharedMemoryCommunicator:
    """Collectives of CPU tensors between ranks on one host. Final.

    Sums are made in fp32 and in the order of ranks, as over gloo, so that they have the same bits. A rank that waits
    for an operation completes those launched before it too.

    Args:
        group: the ranks.
        engine: of this group. All its communicators on one rank share it.
    """

    averages = False
    widens = True
    direct_bytes = _DIRECT_BYTES
    whole_bytes = NEVER_DIRECT  # the ranks of one host are few, and so is what they pad
    batch_bytes = 1 << 21
    """``benchmarks/group_transfers.py``: with a quarter of that, the reductions of groups of 2 to 4 MiB take 1.3 to 1.7
    times as long.
    """

    def __init__(self, group: dist.ProcessGroup, engine: ShmEngine) -> None:
        self.group = group
        self.rank, self.size = engine.rank, engine.size
        self.aliases = engine.aliases
        self._engine = engine

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size})"

    def __eq__(self, other: object) -> bool:
        """Whether what goes over both may go in one launch."""
        return isinstance(other, SharedMemoryCommunicator) and self.group is other.group

    def __hash__(self) -> int:
        return id(self.group)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def with_pool(self, pooled: bool) -> SharedMemoryCommunicator:
        return self

    @profiled
    def all_gather(self, transfers: Sequence[Transfer], label: str = "all-gather") -> Work:
        return self._launch(transfers and operation.all_gather(self.rank, self.size, transfers, label))

    @profiled
    def reduce_scatter(self, transfers: Sequence[Transfer], op: ReduceOp, label: str = "reduce-scatter") -> Work:
        _check_sum(op)
        return self._launch(transfers and operation.reduce_scatter(self.rank, self.size, transfers, label))

    @profiled
    def all_to_all(self, transfers: Sequence[Transfer], label: str = "all-to-all") -> Work:
        return self._launch(transfers and operation.all_to_all(self.rank, self.size, transfers, label))

    @profiled
    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp, label: str = "all-reduce") -> Work:
        _check_sum(op)
        return self._launch(tensors and operation.all_reduce(self.rank, self.size, tensors, label))

    @property
    def partings(self) -> int:
        return self._engine.partings

    def barrier(self, name: str) -> Work:
        return self._engine.launch(operation.Barrier(name))

    def part(self, name: str) -> Work:
        self._engine.partings += 1
        return self.barrier(name)

    def share(self, nbytes: int) -> torch.Tensor:
        """It takes memory only where it is written, and lives as long as the tensor or a view of it on any rank.

        Raises:
            OSError: there is no such memory. The other ranks raise ``PeerError``.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        segment = self._engine.segment(nbytes) if self.rank == 0 else None
        meeting = operation.Barrier("sharing of memory", nbytes, segment)
        self._engine.launch(meeting).wait()
        assert meeting.memory is not None
        return meeting.memory

    def _launch(self, collective: operation.Collective | Sequence[object]) -> Work:
        return self._engine.launch(collective) if isinstance(collective, operation.Collective) else _Done()


def _check_sum(op: ReduceOp) -> None:
    if op is not ReduceOp.SUM:
        raise UnsupportedError(
            "a communicator in shared memory does not average: ask its `averages`, or sum and divide."
        )
