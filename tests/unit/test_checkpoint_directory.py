"""Names in a directory of checkpoints after a save was killed at any point."""

from __future__ import annotations

from pathlib import Path

import pytest

from composable_fsdp.checkpoint import latest
from tests._internals import MANIFEST, PartialCheckpoint, complete
from tests.helpers.fresh_process import run_program


def make(folder: Path, name: str, *, finished: bool = True) -> Path:
    directory = folder / name
    directory.mkdir(parents=True)
    if finished:
        (directory / MANIFEST).write_text(name)
    return directory


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def write(folder: Path, step: int, **options: int) -> None:
    writing = PartialCheckpoint(folder, step)
    (writing.partial / MANIFEST).write_text("new")
    writing.commit(**options)


def test_the_newest_checkpoint_has_the_highest_step(tmp_path: Path) -> None:
    for step in (2, 10, 123456789):
        write(tmp_path, step)
    make(tmp_path, "step-00000200", finished=False)
    make(tmp_path, "step-300")
    make(tmp_path, "other")
    assert list(complete(tmp_path)) == [2, 10, 123456789]
    assert latest(tmp_path) == tmp_path / "step-123456789"


@pytest.mark.behaviour("F-12")
def test_the_old_checkpoint_is_used_until_the_new_one_is_complete(tmp_path: Path) -> None:
    make(tmp_path, "step-00000001")
    old = make(tmp_path, "step-00000002.old")
    make(tmp_path, "step-00000002.partial")
    assert latest(tmp_path) == old
    write(tmp_path, 3)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    assert (tmp_path / "step-00000002" / MANIFEST).read_text() == "step-00000002.old"


@pytest.mark.behaviour("F-12")
def test_leftovers_are_removed_by_the_next_save(tmp_path: Path) -> None:
    make(tmp_path, "step-00000001.partial", finished=False)
    make(tmp_path, "step-00000002")
    make(tmp_path, "step-00000002.old")
    make(tmp_path, "step-00000003.deleted")
    make(tmp_path, "mine.partial")
    assert latest(tmp_path) == tmp_path / "step-00000002"
    write(tmp_path, 1)
    assert names(tmp_path) == ["mine.partial", "step-00000001", "step-00000002"]


@pytest.mark.multiprocess
@pytest.mark.behaviour("F-12")
def test_a_partial_checkpoint_of_another_process_is_not_removed(tmp_path: Path) -> None:
    writing = PartialCheckpoint(tmp_path, 1)
    script = (
        "import sys; from pathlib import Path\n"
        "from composable_fsdp.errors import CheckpointError\n"
        "from tests._internals import PartialCheckpoint\n"
        "try: PartialCheckpoint(Path(sys.argv[1]), 2)\n"
        "except CheckpointError as error: print(error)\n"
    )
    assert f"{tmp_path} is being written to by process " in run_program(script, tmp_path).stdout
    assert names(tmp_path) == ["step-00000001.partial"]
    writing.abandon()
    writing.abandon()
    assert names(tmp_path) == []
    write(tmp_path, 2)
    assert names(tmp_path) == ["step-00000002"]
