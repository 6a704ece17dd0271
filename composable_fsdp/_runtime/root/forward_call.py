"""The backward's view of one forward call of a sharded module."""

from __future__ import annotations

from composable_fsdp._runtime.groups.state import FSDPState, Round

__all__ = ["Call"]


class Call:
    """One forward call of a module that autograd will return to. The autograd graph keeps it alive."""

    __slots__ = ("awaits", "entered", "is_open", "is_recomputed", "round", "state")

    def __init__(self, state: FSDPState, of_round: Round, *, is_recomputed: bool) -> None:
        self.state = state
        self.round = of_round
        self.is_recomputed = is_recomputed
        """True if it ran inside a backward. That backward may never reach its inputs: some recomputations only refill.
        """
        self.awaits = False
        """True if a hook reports that backward has reached the inputs."""
        self.is_open = False
        """True while it counts in the ``open_calls`` of its state."""
        self.entered = -1
        """The number of the backward in which a gradient last reached an output of this call."""

    def await_inputs(self) -> None:
        """Note that a hook will report the gradients of this call's inputs."""
        self.round.awaited += 1
        self.awaits = True
        if not self.is_recomputed:
            self.open()

    def open(self) -> None:
        """Mark the gradients of the state as incomplete until backward has reached this call's inputs."""
        if self.awaits and not self.is_open:
            self.is_open = True
            self.state.open_calls += 1

    def close(self) -> None:
        """Note that backward has reached the inputs."""
        if self.is_open:
            self.is_open = False
            self.state.open_calls -= 1
