"""Hooks of the whole suite: the markers ``behaviour`` and ``multiprocess``, and the ``--behaviours`` report."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.helpers.behaviour_report import Case, Result, check_ids, load_sections, render
from tests.helpers.sharding import single_rank

SECTIONS = load_sections(Path(__file__).with_name("behaviours.toml"))

TESTS = Path(__file__).parent
MULTIPROCESS = ("gpu", "parity", "ranks")
"""Folders in which every test has the marker ``multiprocess``. Other tests that start processes have it one by one."""

# A first call into torch may exceed hypothesis' deadline of 200 ms, which makes tests flaky. Each run draws others.
settings.register_profile("default", deadline=None, max_examples=60)

# Background jobs of a shell ignore Ctrl-C, and child processes inherit that. Some tests send Ctrl-C to processes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


STREAM_OF_TORCH = torch.cpu.Stream


@pytest.fixture(autouse=True)
def device_of_torch() -> Iterator[None]:
    """Check that a test leaves no simulated device: patches that end in another order than they began do."""
    yield
    assert torch.cpu.Stream is STREAM_OF_TORCH


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A gloo group with this process as its only rank, for a file."""
    with single_rank():
        yield


@pytest.fixture
def own_rank() -> Iterator[None]:
    """The same, for one test."""
    with single_rank():
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--behaviours", action="store_true", help="say at the end which behaviours the tests showed")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(TESTS) and item.path.relative_to(TESTS).parts[0] in MULTIPROCESS:
            item.add_marker("multiprocess")
        ids = tuple(id_ for mark in item.iter_markers("behaviour") for id_ in mark.args)
        try:
            check_ids(ids, SECTIONS, where=item.nodeid)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error
        # user_properties are part of every report of the item
        item.user_properties.extend(("behaviour", id_) for id_ in ids)


def pytest_collection_finish() -> None:
    """Take all imported modules out of garbage collections, of which each would take half a second."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--behaviours"):
        terminalreporter.section("behaviours")
        for line in render(SECTIONS, _cases(terminalreporter)):
            terminalreporter.write_line(line)


def _cases(terminalreporter: pytest.TerminalReporter) -> list[Case]:
    """Return one case per test. If a test passes and then fails in teardown, the category listed later here is used."""
    results: dict[str, Result] = {"skipped": "skipped", "xfailed": "skipped", "passed": "passed"}
    results |= {"failed": "failed", "error": "failed"}
    cases: dict[str, Case] = {}
    for category, result in results.items():
        for report in terminalreporter.stats.get(category, ()):
            if isinstance(report, pytest.TestReport):  # a file that failed in collection has no tests
                ids = tuple(str(value) for key, value in report.user_properties if key == "behaviour")
                cases[report.nodeid] = Case(ids, result, _skip_reason(report) if result == "skipped" else "")
    return list(cases.values())


def _skip_reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # (path, line, "Skipped: reason")
        return report.longrepr[2].removeprefix("Skipped: ")
    return f"expected failure: {getattr(report, 'wasxfail', '')}"
