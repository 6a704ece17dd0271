"""How many optimizer steps there were: fused and foreach ones change parameters without torch's versions showing it."""

from __future__ import annotations

__all__ = ["Progress", "note_optimizer_step", "optimizer_steps"]

_steps = 0


def note_optimizer_step(*_: object) -> None:
    """Hook for after every optimizer step."""
    global _steps
    _steps += 1


def optimizer_steps() -> int:
    """Of all optimizers of this process, since the hook was set."""
    return _steps


class Progress:
    """How many backwards of one root are completed on this rank, and how many of them are in its parameters. Final."""

    def __init__(self) -> None:
        self.completed = 0
        self._applied = 0
        self._seen_steps = optimizer_steps()

    @property
    def applied(self) -> int:
        """Backwards that were completed when an optimizer last stepped, as far as was looked."""
        self.look()
        return self._applied

    def look(self) -> None:
        """To be called before each forward, so that what is completed later counts for the next step."""
        steps = optimizer_steps()
        if steps != self._seen_steps:
            self._seen_steps, self._applied = steps, self.completed
