"""The residuals of codecs with error feedback: committed once their step has ended, restored if it failed."""

from __future__ import annotations

from composable_fsdp._core.group import ParamGroup
from composable_fsdp._core.group_plan import HELD_GRADIENTS
from composable_fsdp._core.seams import ObservedRoot, Observer
from composable_fsdp._core.state import FSDPState
from composable_fsdp.codecs.error_feedback import ErrorFeedback
from composable_fsdp.plugins.codecs.chosen_codecs import policy_of
from composable_fsdp.plugins.codecs.encoded_reduce import EncodedReduce


class Residuals(Observer):
    """Commits the residuals of one root at its first forward after a step, and rolls them back in a reset."""

    def __init__(self) -> None:
        self._steps = 0
        """The number of optimizer steps when the last forward began."""

    def for_root(self, root: ObservedRoot) -> Observer | None:
        chosen = [policy_of(p) for state in root.states.values() for p in state.group.parameters]
        codecs = [codec for each in chosen for codec in (each.reduce_scatter, each.all_reduce)]
        return Residuals() if any(isinstance(codec, ErrorFeedback) for codec in codecs) else None

    def begin_forward(self, root: ObservedRoot, outermost: FSDPState) -> None:
        are_used = not root.queue.are_in_flight and not any(_waits(group) for group, _ in _changed(root))
        self.commit(root, always=are_used)  # no gradient of the step is left: they were used or dropped
        self._steps = root.planner.steps.number

    def after_reset(self, root: ObservedRoot) -> None:
        self.commit(root)  # those of the step before, if this rank failed in between
        for _, own in _changed(root):
            own.roll_back()

    def commit(self, root: ObservedRoot, *, always: bool = False) -> None:
        """Commit the residuals if an optimizer has stepped since they changed, or if the shards have changed."""
        changed = _changed(root)
        has_ended = root.planner.steps.number != self._steps or any(own.shards_changed for _, own in changed)
        for _, own in changed if always or has_ended else ():
            own.commit()


def _changed(root: ObservedRoot) -> list[tuple[ParamGroup, EncodedReduce]]:
    """Return what has changed residuals since they were committed, and its groups."""
    groups = [state.group for state in root.states.values()]
    every = [(group, bucket.reducer.own) for group in groups for bucket in group.buckets]
    return [(group, own) for group, own in every if isinstance(own, EncodedReduce) and own.has_changed]


def _waits(group: ParamGroup) -> bool:
    """Return True if gradients wait for an optimizer, in the sharded parameters, or for a later reduction."""
    return group.gradient_state in HELD_GRADIENTS or any(p.sharded.grad is not None for p in group.parameters)
