"""Names in a directory of checkpoints after a save was killed at any point."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from composable_fsdp.checkpoint import latest
from composable_fsdp.errors import CheckpointError
from tests._internals import MANIFEST, PartialCheckpoint, directory
from tests.helpers.fresh_process import run_program
from tests.helpers.single_rank_checkpoints import unreadable

pytestmark = pytest.mark.behaviour("F-12")


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
    assert list(directory.candidates(tmp_path)) == [2, 10, 200, 123456789]
    assert latest(tmp_path) == tmp_path / "step-123456789"


def test_the_old_checkpoint_is_used_until_the_new_one_is_complete(tmp_path: Path) -> None:
    make(tmp_path, "step-00000001")
    old = make(tmp_path, "step-00000002.old")
    make(tmp_path, "step-00000002.partial")
    assert latest(tmp_path) == old
    write(tmp_path, 3)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    assert (tmp_path / "step-00000002" / MANIFEST).read_text() == "step-00000002.old"


def test_leftovers_are_removed_by_the_next_save(tmp_path: Path) -> None:
    make(tmp_path, "step-00000001.partial", finished=False)
    make(tmp_path, "step-00000002")
    make(tmp_path, "step-00000002.old")
    make(tmp_path, "step-00000003.deleted")
    os.mkfifo(tmp_path / "step-00000004.partial")  # which nothing may open, since that waits for a writer
    os.mkfifo(tmp_path / "step-00000005.deleted")
    make(tmp_path, "mine.partial")
    assert latest(tmp_path) == tmp_path / "step-00000002"
    write(tmp_path, 1)
    assert names(tmp_path) == ["mine.partial", "step-00000001", "step-00000002"]


USERS = [
    "step-00000001-best.old",
    "step-00000001.old.1",
    "step-00000002.good",
    "step-00000001-eval.deleted",
    "step-00000002x.partial",
    "step-00000002.old.partial",
    "step-000000002",
    "step-000000002.partial",
    "step-2.old",
    "xstep-00000002.partial",
]


def test_other_names_of_users_are_left_alone_and_are_no_checkpoints(tmp_path: Path) -> None:
    for name in USERS:
        make(tmp_path, name)
    assert latest(tmp_path) is None
    for step in (1, 2, 2, 3):
        write(tmp_path, step, keep_last=1)
    assert names(tmp_path) == sorted([*USERS, "step-00000003"])


def test_links_in_place_of_checkpoints_are_replaced_and_their_targets_kept(tmp_path: Path) -> None:
    folder, moved = tmp_path / "run", tmp_path / "moved"
    for step in (1, 2, 3):
        make(moved, f"step-0000000{step}")
        folder.mkdir(exist_ok=True)
        (folder / f"step-0000000{step}").symlink_to(moved / f"step-0000000{step}")
    (folder / "step-00000004").symlink_to(tmp_path / "nothing")
    (folder / "step-00000007.deleted").symlink_to(moved)
    (folder / "step-00000008.partial").symlink_to(moved)
    assert latest(folder) == folder / "step-00000003"
    for _ in range(3):
        write(folder, 3)
    assert names(folder) == [f"step-0000000{step}" for step in (1, 2, 3, 4)]
    assert not (folder / "step-00000003").is_symlink()
    write(folder, 4, keep_last=2)
    assert names(folder) == ["step-00000003", "step-00000004"]
    assert {path.name: (path / MANIFEST).read_text() for path in moved.iterdir()} == {
        name: name for name in ("step-00000001", "step-00000002", "step-00000003")
    }


def test_what_cannot_be_read_is_an_error_and_not_absent(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    with unreadable(tmp_path), pytest.raises(CheckpointError, match=r"cannot be (listed|read): Permission denied\.$"):
        latest(tmp_path)
    newest = tmp_path / "step-00000002"
    with unreadable(newest):
        with pytest.raises(CheckpointError) as raised:
            latest(tmp_path)
        assert str(raised.value) == f"{newest / MANIFEST} cannot be read: Permission denied."
        assert directory.checkpoints_at(tmp_path) == [newest, tmp_path / "step-00000001"]
    with unreadable(tmp_path / "step-00000001"):
        assert latest(tmp_path) == newest
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file cannot be listed: Not a directory\.$"):
        latest(tmp_path / "file")


def test_retention_goes_on_beside_an_unreadable_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    tmp_path.chmod(0o777)
    with unreadable(tmp_path / "step-00000002"):
        assert list(directory.candidates(tmp_path)) == [1, 2, 3]
    write(tmp_path, 4, keep_last=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


@pytest.mark.multiprocess
def test_a_partial_checkpoint_of_another_process_is_not_removed(tmp_path: Path) -> None:
    writing = PartialCheckpoint(tmp_path, 1)
    script = (
        "import sys; from pathlib import Path\n"
        "from composable_fsdp.errors import CheckpointError\n"
        "from tests._internals import PartialCheckpoint\n"
        "try: PartialCheckpoint(Path(sys.argv[1]), 2)\n"
        "except CheckpointError as error: print(error)\n"
    )
    assert f"another process is writing to {tmp_path}. Wait for it" in run_program(script, tmp_path).stdout
    assert names(tmp_path) == ["step-00000001.partial"]
    writing.abandon()
    writing.abandon()
    assert names(tmp_path) == []
    write(tmp_path, 2)
    assert names(tmp_path) == ["step-00000002"]
