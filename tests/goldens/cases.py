"""Runs the cases on the transports and returns one record for each."""

from __future__ import annotations

import lzma
import re
import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from composable_fsdp.testing import RanksError
from tests.goldens.chosen import CHOSEN
from tests.goldens.observe import PORTABLE, Digest, Observation, hash_of, observe_call, observe_programs
from tests.goldens.records import HASHES, Key, Record
from tests.helpers.fuzz import programs as vocabulary
from tests.helpers.fuzz.programs import Program
from tests.helpers.run_ranks import run_ranks
from tests.helpers.transports import TRANSPORTS

__all__ = ["PROGRAMS", "Found", "draw", "known_programs", "run_all"]

PROGRAMS = Path(__file__).with_name("programs.txt.xz")
"""The file of programs. Each line is the ``repr`` of a program."""

DRAWN = {2: (900, 22), 4: (100, 22)}
"""Maps a number of ranks to the number of programs and the seed of hypothesis."""

BATCH = 100
"""The number of programs in one call of ``run_ranks``."""

QUICK = 10
"""A quick comparison runs one of this many cases."""


@dataclass
class Found:
    """The records of cases by name and transport, and all observations if ``full`` is true."""

    full: bool = False
    records: dict[Key, Record] = field(default_factory=dict)
    observations: dict[Key, list[Observation]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, key: Key, seen: Sequence[Observation | Digest]) -> None:
        """Add the record of one case from the observations of all ranks."""
        observations = [each for each in seen if isinstance(each, Observation)]
        if observations:
            self.observations[key] = observations
        digests = [each.digest if isinstance(each, Observation) else each for each in seen]
        totals: dict[str, tuple[int, int]] = {}
        for digest in digests:
            for kind, number, nbytes in digest.totals:
                before = totals.get(kind, (0, 0))
                totals[kind] = before[0] + number, before[1] + nbytes
        self.records[key] = Record({name: hash_of([each.hashes[name] for each in digests]) for name in HASHES}, totals)

    def add_failure(self, key: Key, error: BaseException) -> None:
        self.failures.append(f"{key.case}, {key.transport} failed:\n{error}")
        self.records[key] = Record({}, {})


def draw() -> None:
    """Draw new programs from the fuzzer and write them."""
    from tests.parity.test_fuzz import DrawnPrograms  # only here, as it imports much of the library

    drawn = [repr(p) for ranks, (size, seed) in DRAWN.items() for p in DrawnPrograms(size, ranks, seed).programs()]
    PROGRAMS.write_bytes(lzma.compress("\n".join(drawn).encode(), preset=9 | lzma.PRESET_EXTREME))


def known_programs() -> dict[str, Program]:
    """Return the programs by the name of their case."""
    lines = lzma.decompress(PROGRAMS.read_bytes()).decode().split("\n")
    return {str(number): eval(line, vars(vocabulary)) for number, line in enumerate(lines)}


def run_all(
    *, quick: bool = False, only: Collection[str] = (), transports: Collection[str] = tuple(TRANSPORTS)
) -> Found:
    """Run all cases, a tenth of them, or the cases named in ``only``, whose observations are kept in full."""
    found = Found(full=bool(only))
    programs = {name: program for name, program in known_programs().items() if not only or name in only}
    names = [name for name in CHOSEN if not only or any(re.split(r"[\[ ]", case)[0] == name for case in only)]
    if quick:
        programs = {name: program for name, program in programs.items() if int(name) % QUICK == 0}
        names = names[::QUICK]
    for transport in transports:
        begin = time.monotonic()
        run_programs(programs, transport, found)
        if programs:
            _say(f"{len(programs)} programs, {transport}: {time.monotonic() - begin:.0f} s")
    begin = time.monotonic()
    if names:
        run_tests(names, transports, found)
        _say(f"{len(names)} tests: {time.monotonic() - begin:.0f} s")
    for text in found.failures:
        _say(text)
    return found


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


# -- programs


def run_programs(programs: Mapping[str, Program], transport: str, found: Found) -> None:
    by_ranks: dict[int, list[str]] = {}
    for name, program in programs.items():
        by_ranks.setdefault(program.world_size, []).append(name)
    for ranks, names in by_ranks.items():
        for start in range(0, len(names), BATCH):
            batch = {name: programs[name] for name in names[start : start + BATCH]}
            run_batch(batch, ranks, transport, found)


def run_batch(batch: Mapping[str, Program], ranks: int, transport: str, found: Found) -> None:
    """Run programs in one call. If it dies or hangs, run each half, until only one program fails."""
    names, environment = list(batch), {**TRANSPORTS[transport], **PORTABLE}
    timeout = 60.0 + 3.0 * len(batch)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen = run_ranks(
                observe_programs, ranks, list(batch.values()), full=found.full, timeout=timeout, environment=environment
            )
    except RanksError as error:
        if len(names) == 1:
            found.add_failure(Key(names[0], transport), error)
            return
        middle = len(names) // 2
        for half in (names[:middle], names[middle:]):
            run_batch({name: batch[name] for name in half}, ranks, transport, found)
        return
    for name, each in zip(names, zip(*seen, strict=True), strict=True):
        found.add(Key(name, transport), each)


# -- tests


def run_tests(names: Sequence[str], transports: Collection[str], found: Found) -> None:
    """Run the chosen tests with pytest, and each ``run_ranks`` in them on the transports.

    Raises:
        RuntimeError: a test failed or does not exist.
    """
    plugin = _Plugin(names, transports, found)
    code = pytest.main(["tests", "-q", "--no-header", "-p", "no:cacheprovider"], plugins=[plugin])
    missing = set(names) - plugin.collected
    if code or missing:
        raise RuntimeError(f"pytest ended with {code}; tests that do not exist: {sorted(missing)}")


class _Plugin:
    """Selects tests by name, and replaces their ``run_ranks`` by one that records."""

    def __init__(self, names: Sequence[str], transports: Collection[str], found: Found) -> None:
        self.names, self.transports, self.found = set(names), transports, found
        self.collected: set[str] = set()
        self.item: pytest.Function | None = None
        self.calls = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_name: dict[str, list[pytest.Function]] = {}
        for item in items:
            if isinstance(item, pytest.Function) and item.originalname in self.names:
                by_name.setdefault(item.originalname, []).append(item)
        for name, each in by_name.items():
            if len({item.path for item in each}) > 1:
                raise pytest.UsageError(f"{name} names tests in two files; a case needs a unique name")
            each[0].module.run_ranks = self.run_ranks
        items[:] = [item for each in by_name.values() for item in one_of(each)]
        self.collected = set(by_name)

    def pytest_runtest_call(self, item: pytest.Item) -> None:
        assert isinstance(item, pytest.Function)
        self.item, self.calls = item, 0

    def run_ranks(
        self, function: Callable[..., Any], world_size: int, *args: object, timeout: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """Run ``function`` as the test asks. If the test chooses no transport, first run it on all others."""
        assert self.item is not None
        given: Mapping[str, str] = kwargs.pop("environment", {})
        self.calls += 1
        case = f"{self.item.name} #{self.calls}"
        own_transport, others = "in common", [name for name in self.transports if name != "in common"]
        if given or "transport" in parameters_of(self.item):
            own_transport, others = next((name for name, each in TRANSPORTS.items() if each == given), "its own"), []

        def run(transport: str, environment: Mapping[str, str]) -> list[Any]:
            full, merged = self.found.full, {**environment, **PORTABLE}
            try:
                both = run_ranks(
                    observe_call, world_size, function, args, kwargs, full=full, timeout=3 * timeout, environment=merged
                )
            except RanksError as error:
                self.found.add_failure(Key(case, transport), error)
                return []
            self.found.add(Key(case, transport), [seen for _, seen in both])
            return [result for result, _ in both]

        for transport in others:
            run(transport, TRANSPORTS[transport])
        return run(own_transport, given)


def one_of(items: Sequence[pytest.Function]) -> list[pytest.Function]:
    """Choose one set of parameters of a test, always the same, with all transports that the test names."""
    keys = [str([(k, repr(v)) for k, v in parameters_of(item).items() if k != "transport"]) for item in items]
    different = list(dict.fromkeys(keys))
    chosen = different[crc32(items[0].originalname.encode()) % len(different)]
    return [item for item, key in zip(items, keys, strict=True) if key == chosen]


def parameters_of(item: pytest.Function) -> Mapping[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}
