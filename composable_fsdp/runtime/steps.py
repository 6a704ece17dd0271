"""How many optimizer steps there were: fused and foreach ones change parameters without torch's versions showing it."""

from __future__ import annotations

__all__ = ["note_optimizer_step", "optimizer_steps"]

_steps = 0


def note_optimizer_step(*_: object) -> None:
    """Hook for after every optimizer step."""
    global _steps
    _steps += 1


def optimizer_steps() -> int:
    """Of all optimizers of this process, since the hook was set."""
    return _steps
