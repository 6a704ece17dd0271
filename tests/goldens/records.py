"""Reads, writes and compares records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = ["HASHES", "RECORDS", "UNSTABLE", "Key", "Record", "differences", "read", "stable", "write"]

RECORDS = Path(__file__).with_name("records.txt")
HASHES = ("events", "labels", "results")
UNSTABLE = "-"
"""Replaces a value that differs between two recordings."""


class Key(NamedTuple):
    """The name of a case and a transport."""

    case: str
    transport: str


@dataclass(frozen=True)
class Record:
    """The record of a case: hashes over all ranks, and the number and bytes of each kind of event.

    The record of a failed case has no hashes.
    """

    hashes: Mapping[str, str]
    totals: Mapping[str, tuple[int, int]]

    @property
    def failed(self) -> bool:
        return not self.hashes


def stable(first: Mapping[Key, Record], second: Mapping[Key, Record]) -> dict[Key, Record]:
    """Return the records with the values that are equal in both recordings."""
    found = {}
    for key, record in first.items():
        other = second[key]
        hashes = {name: text if other.hashes.get(name) == text else UNSTABLE for name, text in record.hashes.items()}
        found[key] = Record(hashes, record.totals if record.totals == other.totals else {UNSTABLE: (0, 0)})
    return found


def differences(golden: Record, now: Record) -> list[str]:
    """Return descriptions of the differences."""
    if golden.failed or now.failed:
        return [] if golden.failed and now.failed else ["failed then" if golden.failed else "failed now"]
    found = [name for name, text in golden.hashes.items() if text not in (UNSTABLE, now.hashes[name])]
    if UNSTABLE not in golden.totals:
        for kind in sorted({*golden.totals, *now.totals}):
            before, after = golden.totals.get(kind, (0, 0)), now.totals.get(kind, (0, 0))
            if before != after:
                found.append(f"{kind} {before[0]} of {before[1]} bytes -> {after[0]} of {after[1]} bytes")
    return found


def write(records: Mapping[Key, Record], heading: str, path: Path = RECORDS) -> None:
    path.write_text("".join(f"{line}\n" for line in (f"# {heading}", *_lines(records))))


def read(path: Path = RECORDS) -> tuple[dict[Key, Record], str]:
    """Return the records and the heading."""
    heading, *lines = path.read_text().splitlines()
    found: dict[Key, Record] = {}
    for line in lines:
        case, transport, hashes, totals = line.split(_SEPARATOR)
        numbers: dict[str, tuple[int, int]] = {}
        for entry in filter(None, totals.split(", ")):
            kind, number, nbytes = entry.replace("/", " ").split(" ")
            numbers[kind] = int(number), int(nbytes)
        found[Key(case, transport)] = Record(dict(zip(HASHES, hashes.split(), strict=bool(hashes))), numbers)
    return found, heading.removeprefix("# ")


_SEPARATOR = " | "


def _lines(records: Mapping[Key, Record]) -> Iterator[str]:
    for key, record in records.items():
        hashes = " ".join(record.hashes.values())
        totals = ", ".join(f"{kind} {number}/{nbytes}" for kind, (number, nbytes) in record.totals.items())
        yield _SEPARATOR.join((*key, hashes, totals))
