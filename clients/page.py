"""Makes ``RESULTS.md``, the table of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from catalogue import CLIENTS

__all__ = ["page_of"]

HEAD = """# Clients

Made by `clients/run_all.py` (`make clients`) from [{source}](results/{source}); do not edit.
What the columns mean is in [docs/compatibility.md](../docs/compatibility.md#libraries-built-on-fsdp2).

<!-- table -->

"""
COLUMNS = ("client", "version", "ranks", "sharded modules", "last loss", "ours against fsdp2", "note")


def page_of(rows: Sequence[Mapping[str, Any]], source: str) -> str:
    """Return Markdown of ``rows``, which are in the file ``source``."""
    notes = {client.name: client.note for client in CLIENTS}
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(_cells(row, notes[row["client"]]) for row in rows)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return HEAD.format(source=source) + table + "\n"


def _cells(row: Mapping[str, Any], note: str) -> tuple[str, ...]:
    ours = row["ours"]
    last = next((f"{losses[-1]:.4f}" for losses in ours["losses"] if losses), "–")  # earlier stages have no losses
    shown = [f"{key}: {value}" for key, value in ours["shown"].items()]
    return (
        row["client"],
        row["version"],
        str(row["ranks"]),
        str(ours["sharded"].get("ours", 0)),
        last,
        row["verdict"].replace("|", "\\|"),
        "; ".join(filter(None, [note, *shown])),
    )
