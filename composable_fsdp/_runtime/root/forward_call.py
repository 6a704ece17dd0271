"""One forward call of a sharded module, as backward sees it."""

from __future__ import annotations

from composable_fsdp._runtime.groups.state import FSDPState, Round

__all__ = ["Call"]


class Call:
    """One forward call of a unit's module that autograd will come back to. Kept alive by the graph."""

    __slots__ = ("awaits", "entered", "is_open", "is_recomputed", "round", "state")

    def __init__(self, state: FSDPState, of_round: Round, *, is_recomputed: bool) -> None:
        self.state = state
        self.round = of_round
        self.is_recomputed = is_recomputed
        """Whether it ran within a backward, which need not come to its inputs: some recomputations only fill in."""
        self.awaits = False
        """Whether backward tells when it has come to the inputs."""
        self.is_open = False
        """Whether the unit counts it among its open calls."""
        self.entered = -1
        """The backward in which a gradient last reached this call's outputs."""

    def await_inputs(self) -> None:
        """Backward will come to the gradients of this call's inputs, and tell."""
        self.round.awaited += 1
        self.awaits = True
        if not self.is_recomputed:
            self.open()

    def open(self) -> None:
        """The unit's gradients are not complete before backward has come to this call's inputs."""
        if self.awaits and not self.is_open:
            self.is_open = True
            self.state.open_calls += 1

    def close(self) -> None:
        """Backward has come to its inputs."""
        if self.is_open:
            self.is_open = False
            self.state.open_calls -= 1
