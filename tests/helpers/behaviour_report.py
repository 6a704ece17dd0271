"""Makes the report of behaviours from test results. All functions are pure."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Result = Literal["passed", "failed", "skipped"]
Status = Literal["passing", "failing", "skipped", "no test"]
STATUSES: tuple[Status, ...] = ("passing", "failing", "skipped", "no test")

Sections = Mapping[str, Mapping[str, str]]
"""Maps section heading to behaviour id to title, in the order of the file."""


@dataclass(frozen=True, slots=True)
class Case:
    """The outcome of one test case (one set of arguments of a parametrised test) and the behaviours that it covers."""

    ids: tuple[str, ...]
    result: Result
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """One row of the report."""

    id: str
    title: str
    cases: tuple[Case, ...]

    @property
    def status(self) -> Status:
        results = {case.result for case in self.cases}
        if "failed" in results:
            return "failing"
        if "passed" in results:
            return "passing"
        return "skipped" if results else "no test"

    @property
    def counts(self) -> str:
        found = Counter(case.result for case in self.cases)
        return ", ".join(f"{n} {result}" for result in ("failed", "passed", "skipped") if (n := found[result]))

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return the distinct reasons why cases were skipped."""
        return tuple(dict.fromkeys(case.reason for case in self.cases if case.result == "skipped"))


def load_sections(path: Path) -> Sections:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def check_ids(ids: Iterable[str], sections: Sections, *, where: str) -> None:
    """Raise ``ValueError`` that names the valid ids if an id is not in the list."""
    known = [id_ for rows in sections.values() for id_ in rows]
    unknown = [id_ for id_ in ids if id_ not in known]
    if unknown:
        raise ValueError(f"{where}: unknown behaviour {', '.join(map(repr, unknown))}. Known: {', '.join(known)}")


def behaviours(rows: Mapping[str, str], cases: Iterable[Case]) -> list[Behaviour]:
    cases = tuple(cases)
    return [Behaviour(id_, title, tuple(case for case in cases if id_ in case.ids)) for id_, title in rows.items()]


def render(sections: Sections, cases: Iterable[Case]) -> Iterator[str]:
    """Return the lines of the report; the last line counts the behaviours by status."""
    cases = tuple(cases)
    totals: Counter[Status] = Counter()
    for heading, rows in sections.items():
        yield heading
        for behaviour in behaviours(rows, cases):
            totals[behaviour.status] += 1
            yield f"  {behaviour.id}  {behaviour.status:<8} {behaviour.counts:<24} {behaviour.title}".rstrip()
            yield from (f"        skipped: {reason}" for reason in behaviour.reasons)
    yield f"{totals.total()} behaviours: " + ", ".join(f"{totals[status]} {status}" for status in STATUSES)
