"""The communicator of an axis with one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from composable_fsdp._comm.communicator import SUM, Collective, Traits, Transfer
from composable_fsdp._layout.grad_scaling import ReduceOp

__all__ = ["DONE", "LoopbackCommunicator"]


@dataclass(frozen=True, slots=True)
class _Done:
    def wait(self) -> None:
        pass


DONE = _Done()
"""The work of an operation that is done."""

_TRAITS = Traits(
    averages=True,
    widens=True,
    aliases=True,
    coalesces=True,
    checks=True,
    zero_copy_min_bytes=0,
    grad_bucket_bytes=1 << 19,
)


@dataclass(frozen=True, slots=True)
class LoopbackCommunicator:
    """Collectives of one rank: copies. The sum or average of one summand is that summand."""

    rank: int = 0
    size: int = 1
    traits: Traits = _TRAITS

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def launch(self, kind: Collective, transfers: Sequence[Transfer], label: str = "", op: ReduceOp = SUM) -> _Done:
        if kind is not Collective.ALL_REDUCE:
            for transfer in transfers:
                transfer.output.copy_(transfer.input)
        return DONE
