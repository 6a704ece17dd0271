"""How many optimizer steps there were: fused and foreach ones change parameters without torch's versions showing it."""

from __future__ import annotations

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

__all__ = ["note_optimizer_step", "optimizer_steps", "sharded_steps"]

_steps = 0
_sharded_steps = 0


def note_optimizer_step(optimizer: Optimizer, *_: object) -> None:
    """Hook for after every optimizer step."""
    global _steps, _sharded_steps
    _steps += 1
    _sharded_steps += any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])


def optimizer_steps() -> int:
    """Of all optimizers of this process, since the hook was set."""
    return _steps


def sharded_steps() -> int:
    """Of those that have sharded parameters, which all ranks must take together."""
    return _sharded_steps
