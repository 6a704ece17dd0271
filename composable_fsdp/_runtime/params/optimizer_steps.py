"""How many optimizer steps there were, and that each counts as a change in place of the parameters that it steps.

Foreach and fused optimizers change DTensors without torch's versions showing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch
from torch.autograd.graph import increment_version

__all__ = ["OptimizerSteps", "note_optimizer_step", "optimizer_steps", "plain_steps", "sharded_steps"]

# Threads may step at the same time. An addition could then give a number a second time, and who has seen it before
# would miss the step in between; a counter gives each number once.
_count, _count_sharded, _count_plain = count(1), count(1), count(1)
_steps = _sharded_steps = _plain_steps = 0


class OptimizerSteps:
    """Those of the optimizers that hold parameters of one root. Final."""

    def __init__(self) -> None:
        self.number = 0

    def note(self) -> None:
        """One of them has stepped."""
        self.number += 1


def note_optimizer_step(sharded: Sequence[torch.Tensor]) -> None:
    """Counts an optimizer's step, and a change in place of each of the ``sharded`` parameters that it updates."""
    global _steps, _sharded_steps, _plain_steps
    _steps = next(_count)
    if sharded:
        _sharded_steps = next(_count_sharded)
        increment_version([p for p in sharded if p.grad is not None])
    else:
        _plain_steps = next(_count_plain)


def optimizer_steps() -> int:
    """Of all optimizers of this process, since the hook was set."""
    return _steps


def sharded_steps() -> int:
    """Of those that have sharded parameters, which all ranks must take together."""
    return _sharded_steps


def plain_steps() -> int:
    """Of those that have none. They may hold local tensors in the memory of sharded parameters."""
    return _plain_steps
