"""Refusal of what a CUDA graph cannot capture, before the device raises an error that names no cause.

The host decides what a pass launches, and a replay repeats the launches without the host. So a captured forward begins
with all groups sharded and all earlier gradients reduced, and the host reads nothing of the device in it.
"""

from __future__ import annotations

from composable_fsdp._core.group_plan import HELD_GRADIENTS, ParameterState, Pass
from composable_fsdp._core.memory import capture_error
from composable_fsdp._core.seams import ObservedRoot, Observer
from composable_fsdp._core.state import FSDPState


class CapturedPasses(Observer):
    """Checks the first pass of a capture. The passes after it depend on what the graph itself contains."""

    def __init__(self) -> None:
        self._is_captured = False
        """True if the last pass was captured."""

    def for_root(self, root: ObservedRoot) -> Observer:
        return CapturedPasses()

    def before_first_collective(self, root: ObservedRoot) -> None:
        if root.streams.device.is_capturing():
            text = "the first forward compares ranks on the host and connects process groups"
            raise capture_error(root.root_state.name, text, "Run some steps before the capture.")

    def begin_pass(self, root: ObservedRoot, which: Pass) -> None:
        continues, self._is_captured = self._is_captured, root.streams.device.is_capturing()
        if not self._is_captured or continues:
            return
        name = root.root_state.name
        if which is Pass.BACKWARD:
            raise capture_error(name, "the forward of this backward was not captured", "Capture both.")
        if root.queue.are_in_flight:
            text = "gradients of an earlier backward are still being reduced, which a captured stream cannot wait for"
            raise capture_error(name, text, "Let the last backward wait: set_is_last_backward(True).")
        for state in root.states.values():
            _check(state)


def _check(state: FSDPState) -> None:
    group = state.group
    if group.is_offloaded:
        raise capture_error(state.name, "the host waits for offloaded gradients", "Keep the parameters on the device.")
    if group.parameters and group.parameter_state is not ParameterState.SHARDED:
        text = "the parameters were gathered before the capture, and replays would not gather them again"
        raise capture_error(state.name, text, "Call reshard() before the capture.")
    if group.gradient_state in HELD_GRADIENTS:
        text = "gradients of an earlier backward are not reduced, and each replay would add them again"
        raise capture_error(state.name, text, "Capture the backwards of all microbatches, or none of them.")
    if any(own is not None and own.remembers for own in (bucket.reducer.own for bucket in group.buckets)):
        text = "the host exchanges the residuals of ErrorFeedback after each step, and replays would not"
        raise capture_error(state.name, text, "Use the codec without ErrorFeedback.")
