"""``python -m tests.helpers.comparison.page`` writes ``docs/generated/compared-with-fsdp2.md`` from the rows."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from tests.helpers.comparison.catalogue import ROWS
from tests.helpers.comparison.rows import Row

PAGE = Path(__file__).parents[3] / "docs" / "generated" / "compared-with-fsdp2.md"

_HEAD = """\
# Compared with torch's FSDP2

<!-- page -->

These programs behave differently on torch's FSDP2 (2.13, on CPU with gloo) and here. Each row is a test:
`tests/parity/test_comparison.py` runs the program on both libraries and checks both outcomes. The last column is the
name of the program: `pytest tests/parity/test_comparison.py -k NAME`. This table is made from them by
`python -m tests.helpers.comparison.page`.
"""

_TAIL = """\
## Not compared

`set_state_dict(broadcast_from_rank0=True)` with empty dicts is torch's own function; this library has no other.
`set_symm_mem_for_comm` has no effect, which is logged once. Pickling a sharded module raises `UnsupportedError`.
"""


def render() -> str:
    """Return the text of the page."""
    sections = groupby(ROWS.values(), key=lambda row: row.section)
    return "\n".join([_HEAD, *(_table(title, list(rows)) for title, rows in sections), _TAIL])


def _table(title: str, rows: list[Row]) -> str:
    lines = [f"## {title}", "", "| program | torch's FSDP2 | here | reason | test |", "|---|---|---|---|---|"]
    lines += [f"| {row.title} | {row.torch} | {row.here} | {row.reason} | `{row.name}` |" for row in rows]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(render())
