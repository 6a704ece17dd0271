"""Arguments of the public functions of checkpoints: their checks, and the progress bar drawn by ``rich``."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from composable_fsdp.errors import ArgumentTypeError, ConfigurationError

__all__ = ["check_arguments", "progress_bar", "wants_progress"]


def check_arguments(signature: str, path: object, model: object, optimizer: object = None) -> None:
    """Raise ``ArgumentTypeError``, which shows ``signature``, if a type is wrong, as when two arguments are swapped."""
    for name, value, fits, wanted in (
        ("path", path, isinstance(path, (str, os.PathLike)), "a str or a path"),
        ("model", model, isinstance(model, nn.Module), "an nn.Module"),
        ("optimizer", optimizer, optimizer is None or hasattr(optimizer, "param_groups"), "an optimizer"),
    ):
        if not fits:
            raise ArgumentTypeError(f"{name} must be {wanted}, not {type(value).__name__}. Call {signature}.")


def wants_progress(asked: bool | None) -> bool:
    """Return True if a progress bar is to be shown. ``None``: if stderr is a terminal and ``rich`` is installed."""
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
