"""A progress bar for whoever watches a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

__all__ = ["progress"]


@contextmanager
def progress(label: str, nbytes: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar of ``nbytes`` on stderr, and what to call with the bytes that have been done.

    There is none if it is not to be ``shown``, or stderr is no terminal, or ``rich`` is not installed.
    """
    if not shown or not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=nbytes)
        yield lambda done: bar.advance(task, done)
