"""The clock of the computation on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from composable_fsdp._core.memory import capture_error, device_capabilities

__all__ = ["Clock", "Mark"]

Mark: TypeAlias = Any
"""A point in time: an event on the current stream, or seconds of the host's clock."""


class Clock:
    """The clock of the computation on ``device``: events on its streams, or the host's clock where waits block it.

    Args:
        device: the device.
        now: returns the seconds of the computation in place of both, as where it is only simulated.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] | None = None) -> None:
        self.device = device
        self._now = now or time.perf_counter
        capabilities = device_capabilities(device)
        has_events = now is None and capabilities.has_streams
        self._module = capabilities.module if has_events else None
        self.is_host = now is None and not has_events
        """True if waits block the host, so that its work is part of a step's time."""

    def mark(self) -> Mark:
        """Return the current point in time of the current stream."""
        if self._module is None:
            return self._now()
        if device_capabilities(self.device).is_capturing():
            raise capture_error("a step", "calibrate() measures it", "Calibrate before the capture.")
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Return the seconds between two marks that the device has reached."""
        return end - begin if self._module is None else 1e-3 * float(begin.elapsed_time(end))

    def has_reached(self, mark: Mark) -> bool:
        """Return whether the device has reached ``mark``, without waiting for it."""
        return self._module is None or bool(mark.query())

    def time(self, function: Callable[[], object]) -> float:
        """Return the seconds that ``function`` takes on the device. The host waits for it."""
        begin = self.mark()
        function()
        end = self.mark()
        if self._module is not None:
            end.synchronize()
        return self.seconds(begin, end)
