"""The end of the reductions of a step: with its last backward, or when the user asks for it."""

from __future__ import annotations

from composable_fsdp.errors import LifecycleError

__all__ = ["Finalization"]


class Finalization:
    """The state of manual finalization of a root's backwards. Final.

    Attributes:
        is_manual: backwards leave their last reductions in flight.
        is_last_backward: the next backward is the last one of its step, and waits for the reductions of all.
    """

    def __init__(self) -> None:
        self.is_manual = False
        self.is_last_backward = True
        self._is_due = False
        """True if a backward has ended since the last finalization."""
        self._in_flight: object = None
        """The token of the finalization whose reductions the user has not waited for."""

    def take_settings(self, former: Finalization) -> None:
        """Take the settings of ``former``, that of a root which is now inside of this one."""
        self.is_manual |= former.is_manual
        self.is_last_backward &= former.is_last_backward

    def set_manual(self, enabled: bool) -> None:
        """Set :attr:`is_manual`. Raises a ``LifecycleError`` if a backward has not been finalized."""
        if self._is_due or self._in_flight is not None:
            raise LifecycleError(
                "set_manual_backward_finalization was called between a backward and the end of its finalization. Call "
                "finalize_backward() first, and wait() of its handle."
            )
        self.is_manual = enabled

    def end_backward(self) -> None:
        """Record the end of a backward."""
        self._is_due = self.is_manual

    def check_due(self) -> None:
        """Raise a ``LifecycleError`` unless backwards are finalized by hand and the last finalization has ended."""
        if not self.is_manual:
            raise LifecycleError(
                "finalize_backward() was called after a backward that has finalized itself. Call "
                "set_manual_backward_finalization(True) before the step."
            )
        if self._in_flight is not None:
            raise LifecycleError("finalize_backward() was called again. Call wait() of its last handle first.")

    def begin(self) -> object:
        """Record that the reductions are launched, and return a token for :meth:`end`."""
        self._is_due, self._in_flight = False, object()
        return self._in_flight

    def end(self, token: object) -> None:
        """Record the end of the wait. Raises a ``LifecycleError`` if :meth:`forget` was called since :meth:`begin`."""
        if self._in_flight is not token:
            raise LifecycleError("wait() was called after reset_iter_state() has dropped the reductions of the handle.")
        self._in_flight = None

    def forget(self) -> None:
        """Forget backwards and reductions: the iteration was reset."""
        self._is_due, self._in_flight = False, None
