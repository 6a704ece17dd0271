"""safetensors files that replace older ones, and saves that are killed on the way."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable

import pytest
import torch

from composable_fsdp.checkpoint import load_safetensors, save_safetensors
from composable_fsdp.errors import CheckpointError
from tests._internals import Replacement, StoredTensors
from tests.helpers.small_model import assert_alike, filled

pytest.importorskip("safetensors", reason="needs safetensors: pip install '.[checkpoint]'")


class Killed(BaseException):
    """Nothing after it is done, as after a kill."""


class Fuse:
    """Lets so many calls that change the file system happen, and none after."""

    CALLS = ("replace", "unlink", "mkdir", "rmdir", "pwrite", "fsync", "posix_fallocate")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
        self.left = calls
        monkeypatch.setattr(Replacement, "abandon", lambda self: None)
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, call: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **kwargs: object) -> object:
            if not self.left:
                raise Killed
            self.left -= 1
            return call(*args, **kwargs)

        return counted


@pytest.mark.behaviour("F-12")
@pytest.mark.parametrize(("before", "after"), [(10**9, 10**9), (10**9, 60), (60, 10**9), (60, 60), (60, 100)])
def test_a_save_that_is_killed_anywhere_leaves_the_old_checkpoint_or_the_new_one(tmp_path, before, after) -> None:
    old, new = filled(1), filled(2)
    outcomes = []
    for calls in range(1000):
        folder = tmp_path / str(calls)
        save_safetensors(old, folder, max_file_bytes=before)
        (folder / "config.json").write_text("{}")
        with pytest.MonkeyPatch.context() as patch:
            fuse = Fuse(patch, calls)
            with contextlib.suppress(Killed):
                save_safetensors(new, folder, max_file_bytes=after)
        found = filled(3)
        load_safetensors(found, folder)
        outcomes.append("new" if torch.equal(found.embed.weight, new.embed.weight) else "old")
        assert_alike(found, new if outcomes[-1] == "new" else old)
        save_safetensors(old, folder, max_file_bytes=before)
        load_safetensors(found, folder)
        assert_alike(found, old)
        names = {path.name for path in folder.iterdir()}
        current = StoredTensors.at(folder)
        assert names == {"config.json", current.path.name} | {s.file.name for s in current.tensors.values()}
        if fuse.left:
            break
    assert outcomes == sorted(outcomes, reverse=True)
    assert {*outcomes} == {"old", "new"}


@pytest.mark.behaviour("F-12")
@pytest.mark.parametrize("limit", [60, 10**9])
def test_a_first_save_that_is_killed_leaves_nothing_that_looks_like_a_checkpoint(tmp_path, limit: int) -> None:
    new, complete = filled(2), 0
    for calls in range(1000):
        with pytest.MonkeyPatch.context() as patch:
            fuse = Fuse(patch, calls)
            with contextlib.suppress(Killed):
                save_safetensors(new, tmp_path / str(calls), max_file_bytes=limit)
        found = filled(3)
        try:
            load_safetensors(found, tmp_path / str(calls))
        except CheckpointError as error:
            assert not complete
            assert re.search(r"is missing|has none|has only parts of one", str(error))  # noqa: PT017
            assert_alike(found, filled(3))
        else:
            complete += 1
            assert_alike(found, new)
        if fuse.left:
            break
    assert complete > 1
