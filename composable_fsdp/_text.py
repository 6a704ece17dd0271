"""Tables and counts in the texts of reports and commands."""

from __future__ import annotations

from collections.abc import Sequence

from composable_fsdp.errors import printable

_WIDEST = 300
"""The most letters to which cells are padded: a long name in a file lengthens one line only."""


def text_table(titles: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str]) -> str:
    """Return a table. The columns named in ``numbers`` are aligned to the right."""
    lines = [[printable(cell, kept="") for cell in line] for line in (titles, *rows)]
    widths = [min(_WIDEST, max(map(len, column))) for column in zip(*lines, strict=True)]
    signs = [">" if title in numbers else "<" for title in titles]
    return "\n".join(
        "  ".join(f"{cell:{sign}{width}}" for cell, sign, width in zip(line, signs, widths, strict=True)).rstrip()
        for line in lines
    )


def count(number: int, noun: str) -> str:
    """Return ``number`` with ``noun``, in the plural if need be."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
