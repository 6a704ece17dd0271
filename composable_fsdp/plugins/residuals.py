"""The residuals of codecs with error feedback: committed once their step has ended, restored if it failed."""

from __future__ import annotations

from composable_fsdp._core.seams import Observer, Root
from composable_fsdp._runtime.groups.param_group_gradients import ParamGroupGradients
from composable_fsdp._runtime.groups.state import FSDPState

__all__ = ["Residuals", "commit_residuals"]


class Residuals(Observer):
    """Commits the residuals of one root at its first forward after a step, and rolls them back in a reset."""

    def __init__(self) -> None:
        self._steps = 0
        """The number of optimizer steps when the last forward began."""

    def for_root(self, root: Root) -> Observer:
        return Residuals()

    def begin_forward(self, root: Root, outermost: FSDPState) -> None:
        changed = _changed(root)
        is_used = not root.reductions_are_in_flight and not any(each.are_waiting for each in changed)
        if is_used or self._has_ended(root, changed):  # no gradient of the step is left: they were used or dropped
            _commit(changed)
        self._steps = root.plans.steps.number

    def after_reset(self, root: Root) -> None:
        self.commit(root)  # those of the step before, if this rank failed in between
        for gradients in _changed(root):
            gradients.roll_back_residuals()

    def commit(self, root: Root) -> None:
        """Commit the residuals if an optimizer has stepped since they changed, or if the shards have changed."""
        changed = _changed(root)
        if self._has_ended(root, changed):
            _commit(changed)

    def _has_ended(self, root: Root, changed: list[ParamGroupGradients]) -> bool:
        return root.plans.steps.number != self._steps or any(each.shards_changed for each in changed)


def commit_residuals(root: Root) -> None:
    """Commit the residuals of ``root``, if the step that changed them has ended."""
    for observer in root.events.observers:
        if isinstance(observer, Residuals):
            observer.commit(root)


def _changed(root: Root) -> list[ParamGroupGradients]:
    """Return the gradients of groups whose residuals have changed since they were committed."""
    every = [state.group.gradients for state in root.states.values()]
    return [each for each in every if each.version_before_step is not None]


def _commit(changed: list[ParamGroupGradients]) -> None:
    for gradients in changed:
        gradients.commit_residuals()
