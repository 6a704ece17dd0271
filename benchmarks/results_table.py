"""Makes ``RESULTS.md`` from the JSON files of benchmarks.

    python benchmarks/results_table.py

If several files have the same benchmark and settings, such as the number of ranks, the newest is used. This program
does not need torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tables import table

HERE = Path(__file__).parent
FIELDS = {"name", "date", "command", "settings", "machine", "columns", "rows"}
INTRODUCTION = """\
# Results

Made by `benchmarks/results_table.py` from `benchmarks/results/*.json`; do not edit. What the figures mean and how to
take them again is in [docs/benchmarks.md](../docs/benchmarks.md). `a [b, c]` is a median with its 95 % interval; in
ratios, less than 1 is better for us.
"""


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the published documents in ``paths``, each with its file's name. Other files are skipped."""
    found = ((path.name, json.loads(path.read_text())) for path in paths)
    return [{"file": name, **data} for name, data in found if isinstance(data, dict) and data.keys() >= FIELDS]


def newest(documents: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one document for each benchmark and settings, sorted by name."""
    latest: dict[tuple[str, str], dict[str, Any]] = {}
    for document in sorted(documents, key=lambda document: document["date"]):
        latest[document["name"], settings(document)] = document
    return [latest[key] for key in sorted(latest)]


def settings(document: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in document["settings"].items())


def section(document: dict[str, Any]) -> str:
    machine = ", ".join(f"{key} {value}" for key, value in document["machine"].items())
    link = f"[{document['file']}](results/{document['file']})"
    return "\n\n".join(
        [
            f"## {document['name'].capitalize()}: {settings(document)}",
            table(document["rows"], document["columns"]),
            f"`{document['command']}`, {document['date']}, {link}; {machine}.",
        ]
    )


def page(documents: Iterable[dict[str, Any]]) -> str:
    """Return the text of ``RESULTS.md``."""
    sections = [section(document) for document in newest(documents)]
    return "\n\n".join([INTRODUCTION.rstrip(), *(sections or ["There are no results yet: `make bench`."])]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder with JSON files")
    parser.add_argument("--out", type=Path, default=HERE / "RESULTS.md")
    arguments = parser.parse_args()
    documents = read(sorted(arguments.results.glob("*.json")))
    arguments.out.write_text(page(documents))
    print(f"written: {arguments.out}, from {len(documents)} files")


if __name__ == "__main__":
    main()
