"""The communicator of ranks on one host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from composable_fsdp._comm.comm_debug import profiled
from composable_fsdp._comm.communicator import Transfer, Work
from composable_fsdp._comm.shm import collective as collectives
from composable_fsdp._comm.shm.engine import ShmEngine
from composable_fsdp._layout.grad_scaling import ReduceOp
from composable_fsdp.errors import UnsupportedError

__all__ = ["SharedMemoryCommunicator"]

_ZERO_COPY_BYTES = 1 << 18
"""Zero-copy and copied-in transfers cost the same at this size (2 and 4 ranks, ``benchmarks/collectives.py``)."""


@dataclass(frozen=True, slots=True)
class _Done:
    def wait(self) -> None:
        pass


class SharedMemoryCommunicator:
    """Collectives of CPU tensors between ranks on one host. Final.

    Sums are accumulated in fp32 and in rank order and are bitwise identical to those over gloo. Waiting for an
    operation also completes those launched before it.

    Args:
        group: the process group.
        engine: the engine of ``group``, which all communicators of the group on this rank share.
    """

    averages = False
    widens = True
    coalesces = True
    zero_copy_min_bytes = _ZERO_COPY_BYTES
    grad_bucket_bytes = 1 << 21
    """With a quarter of this, reductions of groups of 2 to 4 MiB take 1.3 to 1.7 times as long
    (``benchmarks/group_transfers.py``).
    """

    def __init__(self, group: dist.ProcessGroup, engine: ShmEngine) -> None:
        self.group = group
        self.rank, self.size = engine.rank, engine.size
        self.aliases = engine.aliases
        self._engine = engine

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size})"

    def __eq__(self, other: object) -> bool:
        """Return whether collectives of both communicators can share one launch."""
        return isinstance(other, SharedMemoryCommunicator) and self.group is other.group

    def __hash__(self) -> int:
        return id(self.group)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def with_pool(self, pooled: bool) -> SharedMemoryCommunicator:
        return self

    @profiled
    def all_gather(self, transfers: Sequence[Transfer], label: str = "all-gather") -> Work:
        return self._launch(transfers and collectives.all_gather(self.rank, self.size, transfers, label))

    @profiled
    def reduce_scatter(self, transfers: Sequence[Transfer], op: ReduceOp, label: str = "reduce-scatter") -> Work:
        _check_sum(op)
        return self._launch(transfers and collectives.reduce_scatter(self.rank, self.size, transfers, label))

    @profiled
    def all_to_all(self, transfers: Sequence[Transfer], label: str = "all-to-all") -> Work:
        return self._launch(transfers and collectives.all_to_all(self.rank, self.size, transfers, label))

    @profiled
    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp, label: str = "all-reduce") -> Work:
        _check_sum(op)
        return self._launch(tensors and collectives.all_reduce(self.rank, self.size, tensors, label))

    @property
    def epoch(self) -> int:
        return self._engine.epoch

    def barrier(self, name: str) -> Work:
        return self._engine.launch(collectives.Barrier(name))

    def end_epoch(self, name: str) -> Work:
        self._engine.epoch += 1
        return self.barrier(name)

    def share(self, nbytes: int) -> torch.Tensor:
        """Return zeros that all ranks share. Pages take memory once written, until no rank has a view of the tensor.

        Raises:
            OSError: no such memory is available. The other ranks raise ``PeerError``.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        segment = self._engine.segment(nbytes) if self.rank == 0 else None
        barrier = collectives.Barrier("sharing of memory", nbytes, segment)
        self._engine.launch(barrier).wait()
        assert barrier.memory is not None
        return barrier.memory

    def _launch(self, collective: collectives.Collective | Sequence[object]) -> Work:
        return self._engine.launch(collective) if isinstance(collective, collectives.Collective) else _Done()


def _check_sum(op: ReduceOp) -> None:
    if op is not ReduceOp.SUM:
        raise UnsupportedError(
            "a communicator in shared memory does not average: ask its `averages`, or sum and divide."
        )
