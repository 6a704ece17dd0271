"""A progress bar on the terminal, drawn by ``rich`` (extra ``cli``)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from composable_fsdp.errors import ConfigurationError

__all__ = ["progress_bar", "wants_progress"]


def wants_progress(asked: bool | None) -> bool:
    """Return True if a progress bar is to be shown. ``None``: if stderr is a terminal and ``rich`` is installed.

    Raises:
        ConfigurationError: ``asked`` is True, but ``rich`` is not installed.
    """
    installed = importlib.util.find_spec("rich") is not None
    if asked and not installed:
        raise ConfigurationError('progress=True needs rich: pip install "composable-fsdp[cli]".')
    return installed and sys.stderr.isatty() if asked is None else asked


@contextmanager
def progress_bar(show: bool, description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar over ``total`` bytes. Yields a function to call with each number of bytes completed."""
    if not show:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(description, total=total)
        yield lambda count: progress.advance(task, count)
