"""Reports as tables: plain text, and HTML for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from composable_fsdp._runtime.schedule.html_table import html_table

__all__ = ["ReportTable"]


@dataclass(frozen=True)
class ReportTable:
    """A table of texts with ``notes`` below it. The columns named in ``numbers`` are aligned to the right."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[str]
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        lines = [self.titles, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        signs = [">" if title in self.numbers else "<" for title in self.titles]
        texts = (
            "  ".join(f"{cell:{sign}{width}}" for cell, sign, width in zip(line, signs, widths, strict=True)).rstrip()
            for line in lines
        )
        return "\n".join([*texts, *self.notes])

    def as_html(self) -> str:
        return html_table(self.titles, self.rows, self.notes)
