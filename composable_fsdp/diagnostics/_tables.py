"""Reports as tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["text_table"]


def text_table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str], notes: Sequence[str] = ()
) -> str:
    """Return a table with ``notes`` below it. The columns named in ``numbers`` are aligned to the right."""
    lines = [titles, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    signs = [">" if title in numbers else "<" for title in titles]
    texts = (
        "  ".join(f"{cell:{sign}{width}}" for cell, sign, width in zip(line, signs, widths, strict=True)).rstrip()
        for line in lines
    )
    return "\n".join([*texts, *notes])
