"""Measurement of the times of training steps, from which a change of their costs is seen."""

from __future__ import annotations

from statistics import fmean

import torch

from composable_fsdp._runtime.root.clock import Clock, Mark

__all__ = ["StepTimes"]

_EARLY_STEPS = 64
"""The number of steps after a choice in which times are compared at every second step. Estimated."""
_INTERVAL = 64
"""The number of steps from one comparison to the next one after that. Estimated."""
_MOST_KEPT_CHOICES = 8
"""The number of measurements in a row without another choice, from which on each doubles the interval. Estimated."""
_CHANGE = 0.1
"""The relative change of the time of a step from which costs are measured again. Estimated."""


class StepTimes:
    """The times of the steps after a choice of settings: of all early ones, and of two in each later interval.

    Steps that leave gradients unsynchronized do not count.

    Args:
        device: the device of the computation.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._kept_choices = 0
        self.restart(has_changed=True)

    def restart(self, *, has_changed: bool) -> None:
        """Begin again, after a choice that has changed the settings or not."""
        self._kept_choices = 0 if has_changed else self._kept_choices + 1
        self.steps = 0
        """The number of steps since then."""
        self.seconds: float | None = None
        """The mean time of the first two steps after the one that rebuilt the groups."""
        self._begin: Mark | None = None
        self._samples: list[tuple[Mark, Mark]] = []

    def begin_step(self) -> None:
        """Begin a step, before its forward."""
        self._begin = self._clock.mark() if self._is_sampled else None
        self.steps += 1

    def end_step(self, *, synchronized: bool) -> None:
        """End a step, after its backward. ``synchronized`` if it has reduced gradients over all ranks."""
        if self._begin is not None and synchronized:
            self._samples.append((self._begin, self._clock.mark()))
        self._begin = None

    @property
    def _is_sampled(self) -> bool:
        return 0 < self.steps <= self._early_steps or self.steps % self._interval in (0, 1)

    @property
    def _early_steps(self) -> int:
        return _EARLY_STEPS if self._kept_choices < _MOST_KEPT_CHOICES else 2

    @property
    def _interval(self) -> int:
        return _INTERVAL << max(0, self._kept_choices - _MOST_KEPT_CHOICES)

    def has_changed(self) -> bool | None:
        """Return whether the last two steps took another time than the first two, on this rank. Call it between steps.

        ``None`` if there is nothing to compare. All ranks get ``None`` in the same steps.
        """
        if len(self._samples) < 2:
            return None
        self._clock.synchronize()
        times = [self._clock.seconds(*sample) for sample in self._samples]
        self._samples.clear()
        if self.seconds is None:
            self.seconds = fmean(times)
            return None
        return min(times) > (1 + _CHANGE) * self.seconds or max(times) < (1 - _CHANGE) * self.seconds
