"""Counters of optimizer steps, which also bump the version counters of the parameters that a step updates.

Foreach and fused optimizers update DTensors without changing torch's version counters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch
from torch.autograd.graph import increment_version

__all__ = ["OptimizerSteps", "note_optimizer_step", "optimizer_steps", "sharded_steps"]

# Several threads may step at once. ``+= 1`` could then give one number twice, and a reader that knew this number would
# miss the second step. ``itertools.count`` gives each number once.
_count, _count_sharded = count(1), count(1)
_steps = _sharded_steps = 0


class OptimizerSteps:
    """The number of steps of the optimizers that hold parameters of one root, or their local shards. Final."""

    def __init__(self) -> None:
        self.number = 0

    def note(self) -> None:
        """Count one step."""
        self.number += 1


def note_optimizer_step(sharded: Sequence[torch.Tensor]) -> None:
    """Count an optimizer step, and bump the versions of those ``sharded`` parameters that have a gradient."""
    global _steps, _sharded_steps
    _steps = next(_count)
    if sharded:
        _sharded_steps = next(_count_sharded)
        increment_version([p for p in sharded if p.grad is not None])


def optimizer_steps() -> int:
    """Return the number of steps of all optimizers of this process since the hooks were installed."""
    return _steps


def sharded_steps() -> int:
    """Return the number of steps of optimizers with sharded parameters. All ranks must take these together."""
    return _sharded_steps
