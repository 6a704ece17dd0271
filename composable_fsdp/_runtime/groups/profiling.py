"""Names of operations in profilers, in errors and in ``TORCH_LOGS=+fsdp``, such as ``FSDP::all_gather (layers.0)``.

The labels in profilers are those of torch's FSDP2, which tools search for, and the logger is torch's.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from torch.autograd import profiler

__all__ = ["describe_groups", "label", "labelled", "look_for_readers"]

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("torch.distributed.fsdp.fully_shard")

active = False
"""True if a profiler or the log shows labels. Every hook has several, so it is looked up once per pass."""


def look_for_readers() -> None:
    """Set ``active``: look whether a profiler runs, or the logger is enabled. Called at the beginning of each pass."""
    global active
    active = profiler._is_profiler_enabled or _log.isEnabledFor(logging.DEBUG)


@contextmanager
def label(operation: str, name: str) -> Iterator[None]:
    """Label what runs in this context, or a function that it decorates, ``operation`` of the group ``name``."""
    text = f"FSDP::{operation} ({name})"
    _log.debug("%s", text)
    with profiler.record_function(text):
        yield


def labelled(operation: str, name_of: Callable[..., str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that labels a function ``operation`` and the name that ``name_of`` gives for its arguments."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if not active:
                return function(*args, **kwargs)
            with label(operation, name_of(*args, **kwargs)):
                return function(*args, **kwargs)

        return run

    return decorate


def describe_groups(names: Sequence[str]) -> str:
    """Return the name in errors of several groups that share a collective."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} groups)"
