"""A save that may still be under way."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["PendingSave", "finish_earlier"]

logger = logging.getLogger(__name__)


class PendingSave(os.PathLike[str]):
    """What ``save`` returns. Can be used as the path of the checkpoint, which is complete after :meth:`wait`.

    Attributes:
        path: of the checkpoint.
        step: its step.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.step = step
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"PendingSave({str(self.path)!r}, {'done' if self.done() else 'under way'})"

    def done(self) -> bool:
        """Whether it has come to an end, good or bad."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> PendingSave:
        """Returns when the checkpoint is complete on all ranks. Call it before ``destroy_process_group`` if other
        ranks may end before this one has written its part.

        Raises:
            CheckpointError: it failed; the same on all ranks. Raised once: by this, or by the next save or load,
                of safetensors too.
        """
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self

    def start(self, action: Callable[[], None]) -> None:
        """Runs ``action`` in a thread that the end of the interpreter waits for."""
        global _latest

        def run() -> None:
            try:
                action()
            except BaseException as error:
                logger.error("the checkpoint %s was not saved: %s", self.path, error)
                self._error = error

        self._thread = threading.Thread(target=run, name=f"save {self.path.name}")
        _latest = self
        self._thread.start()


_latest: PendingSave | None = None


def finish_earlier() -> None:
    """Waits for the save that is under way, if there is one, and raises its error if nobody has seen it."""
    global _latest
    earlier, _latest = _latest, None
    if earlier is not None:
        earlier.wait()
