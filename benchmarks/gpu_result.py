"""A section of ``gpu_report.py`` and its result. Without torch, which a section imports itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["UNFINISHED", "CannotRun", "Result", "Section"]

UNFINISHED = "unfinished"
"""The state of a result until its section has ended."""


class CannotRun(Exception):
    """Raised by a section that cannot run here, with the reason."""


@dataclass
class Result:
    """The tables, notes, pictures and failures of a section.

    Args:
        folder: the folder of pictures and further files.
        path: the file that has the result, and always all tables so far.
    """

    folder: Path
    path: Path
    tables: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, title: str, rows: Sequence[dict[str, Any]]) -> None:
        """Add a table. Its columns are the keys of its rows, in the order in which they come up."""
        columns = list(dict.fromkeys(key for row in rows for key in row))
        self.tables.append({"title": title, "columns": columns, "rows": list(rows)})
        self.write(UNFINISHED)

    def write(self, state: str, reason: str = "") -> None:
        content = {"tables": self.tables, "notes": self.notes, "pictures": self.pictures}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"state": state, "reason": reason, "result": content}))
        new.replace(self.path)


@dataclass(frozen=True)
class Section:
    """A section: its title, its function, the seconds that it should take on one H200, and its limit in seconds."""

    title: str
    run: Callable[[Any, Result], None]
    expected: float
    seconds: float
