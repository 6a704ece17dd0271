"""The communicator of an axis with one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from composable_fsdp._comm.comm_debug import profiled
from composable_fsdp._comm.communicator import Transfer
from composable_fsdp._layout.grad_scaling import ReduceOp

__all__ = ["LoopbackCommunicator"]


@dataclass(frozen=True, slots=True)
class _Done:
    def wait(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class LoopbackCommunicator:
    """Collectives of one rank: copies. The sum or average of one summand is that summand."""

    rank: int = 0
    size: int = 1
    averages: bool = True
    widens: bool = True
    aliases: bool = True
    coalesces: bool = True
    zero_copy_min_bytes: int = 0
    grad_bucket_bytes: int = 1 << 19
    epoch: int = 0

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def share(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def barrier(self, name: str) -> _Done:
        return _Done()

    def end_epoch(self, name: str) -> _Done:
        return _Done()

    @profiled
    def all_gather(self, transfers: Sequence[Transfer], label: str = "") -> _Done:
        return self._copy(transfers)

    @profiled
    def reduce_scatter(self, transfers: Sequence[Transfer], op: ReduceOp, label: str = "") -> _Done:
        return self._copy(transfers)

    @profiled
    def all_to_all(self, transfers: Sequence[Transfer], label: str = "") -> _Done:
        return self._copy(transfers)

    @profiled
    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp, label: str = "") -> _Done:
        return _Done()

    def _copy(self, transfers: Sequence[Transfer]) -> _Done:
        for transfer in transfers:
            transfer.output.copy_(transfer.input)
        return _Done()
