"""Measures the resident memory of training steps on this rank, to compare it with the plan."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class StepMemory:
    """The most resident memory of steps, without that of the interpreter and its libraries. Linux only.

    What the process has between two steps, less the bytes of its shards and of the optimizer's state, counts as that
    of the libraries. The kernel notes the most that the process has had since then. Let the C library return freed
    memory at once (``MALLOC_MMAP_THRESHOLD_=65536``), or some of it counts too.
    """

    def __init__(self) -> None:
        self._others: int | None = None

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Measure from now on, between two steps. Without a ``/proc`` that can be written nothing is measured."""
        gc.collect()
        state = (value for each in optimizer.state.values() for value in each.values() if torch.is_tensor(value))
        held = {id(tensor): _local_bytes(tensor) for tensor in (*model.parameters(), *model.buffers(), *state)}
        try:
            _RESET.write_text("5")
        except OSError:
            return
        self._others = _kibibytes("VmRSS") * 1024 - sum(held.values())

    def peak_bytes(self) -> int | None:
        """Return the most bytes since ``begin``, or None where it could not be measured."""
        return None if self._others is None else _kibibytes("VmHWM") * 1024 - self._others


def _local_bytes(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def _kibibytes(name: str) -> int:
    return next(int(line.split()[1]) for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
