"""The messages between the caller of ``run_ranks`` and its workers, pickled over one pipe per worker."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Call", "Job", "Raised", "Ready", "Returned", "WarningFilter", "apply_warning_filters", "warning_filters"]


WarningFilter = tuple[Any, str, Any, str, int]
"""Action, message, category (or several), module and line of a row of ``warnings.filters``, with patterns as text."""


@dataclass(frozen=True, slots=True)
class Job:
    """The function to run, and the caller's warning filters: an error in the test is then an error on its ranks."""

    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    filters: tuple[WarningFilter, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """To a worker: run the pickled :class:`Job`, which can be unpickled only with ``path`` as ``sys.path``."""

    path: tuple[str, ...]
    directory: str
    job: bytes


@dataclass(frozen=True, slots=True)
class Ready:
    """From a worker: the default process group is initialized."""


@dataclass(frozen=True, slots=True)
class Returned:
    """From a worker: the function's pickled result, and whether the default process group still exists."""

    result: bytes
    group_alive: bool


@dataclass(frozen=True, slots=True)
class Raised:
    """From a worker: the function's exception, as the first line of its text and its traceback."""

    error: str
    traceback: str


def warning_filters() -> tuple[WarningFilter, ...]:
    """Return the warning filters in effect, the strongest first."""
    return tuple(
        (action, _pattern(message), category, _pattern(module), lineno)
        for action, message, category, module, lineno in warnings.filters
    )


def apply_warning_filters(filters: tuple[WarningFilter, ...]) -> None:
    """Replace the warning filters in effect with ``filters``."""
    warnings.resetwarnings()
    for row in reversed(filters):
        warnings.filterwarnings(*row)


def _pattern(matcher: Any) -> str:
    """Return the text of a filter's pattern: compiled, a text (in Python's default filters), or None."""
    return str(getattr(matcher, "pattern", matcher) or "")
