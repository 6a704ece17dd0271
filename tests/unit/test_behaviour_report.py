"""The report of behaviours. An id passes if at least one of its tests passed and none failed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.behaviour_report import load_sections
from tests.helpers.fresh_process import run_module

ROOT = Path(__file__).parents[2]


def test_the_list_has_well_formed_ids_each_under_its_section() -> None:
    sections = load_sections(ROOT / "tests" / "behaviours.toml")
    assert [heading[0] for heading in sections] == list("ABCDEFGHIJM")
    for heading, rows in sections.items():
        assert list(rows) == [f"{heading[0]}-{n:02}" for n in range(1, len(rows) + 1)]
        assert all(rows.values())


def run_pytest(tmp_path: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on one file outside the repository, with our conftest as a plugin."""
    (tmp_path / "test_it.py").write_text(source)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = behaviour(*ids): as in the repository\n")
    return run_module("pytest", "-p", "tests.conftest", "--behaviours", f"--rootdir={tmp_path}", tmp_path)


@pytest.mark.multiprocess
def test_pytest_prints_the_report(tmp_path: Path) -> None:
    source = """
import pytest

@pytest.mark.behaviour("A-01", "A-02")
@pytest.mark.parametrize("n", [1, 2])
def test_passes(n): pass

@pytest.mark.behaviour("A-02")
def test_fails(): assert False

@pytest.mark.behaviour("A-03")
@pytest.mark.skip(reason="no accelerator")
def test_skipped(): pass

@pytest.mark.behaviour("A-04")
@pytest.mark.xfail(reason="not built yet")
def test_fails_as_expected(): assert False

@pytest.fixture
def breaks_at_the_end():
    yield
    raise OSError

@pytest.mark.behaviour("A-05")
def test_fails_in_teardown(breaks_at_the_end): pass
"""
    output = run_pytest(tmp_path, source).stdout
    for row in [
        r"A-01  passing  2 passed",
        r"A-02  failing  1 failed, 2 passed",
        r"A-03  skipped  1 skipped .*\n +skipped: no accelerator",
        r"A-04  skipped  1 skipped .*\n +skipped: expected failure: not built yet",
        r"A-05  failing  1 failed",
        r"A-06  no test",
        r"behaviours: 1 passing, 2 failing, 2 skipped, \d+ no test",
    ]:
        assert re.search(row, output), f"{row!r} does not match\n{output}"
