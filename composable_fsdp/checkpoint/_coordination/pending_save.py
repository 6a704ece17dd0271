"""The handle of a save that may still be running in the background."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["PendingSave", "finish_earlier"]

logger = logging.getLogger(__name__)


class PendingSave(os.PathLike[str]):
    """The handle that ``save`` returns. It is also the path of the checkpoint, which is complete after :meth:`wait`.

    Attributes:
        path: directory of the checkpoint.
        step: training step of the checkpoint.
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
        """Return True if the save has ended, successfully or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> PendingSave:
        """Wait until the checkpoint is complete on all ranks.

        Call it before ``destroy_process_group`` if other ranks may exit before this rank has written its files.

        Raises:
            CheckpointError: the save failed. All ranks get the same error. It is raised once: here, or by the next save
                or load, including those of safetensors.
        """
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self

    def start(self, action: Callable[[], None]) -> None:
        """Run ``action`` in a thread. The interpreter waits for this thread before it exits."""
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
    """Wait for the save that is running, if any, and raise its error unless that was raised before."""
    global _latest
    earlier, _latest = _latest, None
    if earlier is not None:
        earlier.wait()
