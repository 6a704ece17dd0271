"""Names of operations in profilers, in errors and in ``TORCH_LOGS=+fsdp``, such as ``FSDP::all_gather (layers.0)``.

The labels in profilers are those of torch's FSDP2, which tools search for, and the logger is torch's.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from torch.autograd import profiler

__all__ = ["ask_logger", "describe_groups", "labelled"]

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("torch.distributed.fsdp.fully_shard")
_logs = _log.isEnabledFor(logging.DEBUG)


def ask_logger() -> None:
    """Read whether the logger is enabled. Called once per pass, since every hook has several labels."""
    global _logs
    _logs = _log.isEnabledFor(logging.DEBUG)


def labelled(operation: str, name_of: Callable[..., str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that labels a function ``operation`` and the name that ``name_of`` gives for its arguments."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if not profiler._is_profiler_enabled and not _logs:
                return function(*args, **kwargs)
            label = f"FSDP::{operation} ({name_of(*args, **kwargs)})"
            _log.debug("%s", label)
            with profiler.record_function(label):
                return function(*args, **kwargs)

        return run

    return decorate


def describe_groups(names: Sequence[str]) -> str:
    """Return the name in errors of several groups that share a collective."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} groups)"
