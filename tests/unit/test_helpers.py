"""The helpers of the tests: the report of behaviours, fresh processes, the index of errors, and simulated ranks."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests._internals import Collective, ReduceOp, Transfer
from tests.helpers.behaviour_report import load_sections
from tests.helpers.error_index import PAGE, SECTIONS, indexed_errors, place_of, render
from tests.helpers.fake_world import DeadlockError, FakeCommunicator, FakeWork, FakeWorld, MismatchError
from tests.helpers.fresh_process import run_module, run_script_on_ranks

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


RANKS = """
import os, sys, time
import torch.distributed as dist
if sys.argv[1:] == ["raise"]:
    if os.environ["RANK"] == "1":
        raise ArithmeticError("test failure")
    time.sleep(600)
dist.init_process_group("gloo")
seen = [None, None]
dist.all_gather_object(seen, os.environ["LOCAL_RANK"])
os.write(1, f"{__name__} {sys.argv[1:]} {__file__} {seen}\\n".encode())  # both ranks write to one file
"""


@pytest.mark.multiprocess
def test_a_rank_that_fails_ends_the_others_and_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RANKS)
    begin = time.monotonic()
    with pytest.raises(AssertionError, match=r"ArithmeticError: test failure"):
        run_script_on_ranks(script, "raise")
    assert time.monotonic() - begin < 150
    with pytest.raises(AssertionError):
        run_script_on_ranks(script, "raise", ranks=1, timeout=0.5)


def test_the_page_is_made_from_the_code_and_has_every_error() -> None:
    found = list(indexed_errors())
    assert PAGE.read_text() == render(found), "make errors writes it anew"
    places = {place for section in SECTIONS.values() for place in section}
    assert {place_of(each.place) for each in found} == places
    assert len(found) > 300, "parts of the package were not read"


def ranks_of(world: FakeWorld) -> list[FakeCommunicator]:
    return [world.communicator(rank) for rank in range(world.size)]


def gather(comm: FakeCommunicator, *numels: int, dtype: torch.dtype = torch.float32) -> FakeWork:
    inputs = [torch.ones(numel, dtype=dtype) for numel in numels]
    return comm.launch(Collective.ALL_GATHER, [Transfer(input.repeat(comm.size), input) for input in inputs])


def scatter(comm: FakeCommunicator, numel: int, op: ReduceOp = ReduceOp.SUM) -> FakeWork:
    return comm.launch(Collective.REDUCE_SCATTER, [Transfer(torch.empty(numel), torch.ones(numel * comm.size))], op=op)


def message(error: pytest.ExceptionInfo[BaseException]) -> str:
    return str(error.value)


def test_an_early_wait_names_the_collective_and_the_missing_ranks() -> None:
    world = FakeWorld(6)
    comms = ranks_of(world)
    for comm in comms:
        gather(comm, 1)
    gather(comms[0], 4, 2)
    work = gather(comms[2], 4, 2)
    with pytest.raises(DeadlockError) as error:
        work.wait()
    assert message(error) == (
        "rank 2 waits for its collective 1, all_gather(2 transfers: float32 4 -> 24, float32 2 -> 12), which "
        "ranks 1, 3-5 of 6 did not launch. Real ranks would wait for ever. Let every simulated rank launch before one "
        "of them waits."
    )


def test_a_mismatch_shows_both_sides_with_their_ranks() -> None:
    comms = ranks_of(FakeWorld(4))
    for comm in comms:
        gather(comm, 1)
    for comm in comms[:3]:
        gather(comm, 4)
    with pytest.raises(MismatchError) as error:
        scatter(comms[3], 4)
    assert message(error) == (
        "ranks disagree on their collective 1 (the first is 0):\n"
        "  ranks 0-2: all_gather(1 transfer: float32 4 -> 16)\n"
        "  rank 3: reduce_scatter(sum, 1 transfer: float32 16 -> 4)"
    )
