"""Processes that are killed at random moments of a save, or at each of its calls, leave complete checkpoints behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.fresh_process import run_module


@pytest.mark.behaviour("F-12", "H-05")
def test_killed_saves_leave_the_previous_checkpoint(tmp_path: Path) -> None:
    done = run_module("tests.helpers.kill_saver", tmp_path, "8", "1")
    assert done.returncode == 0, done.stderr
    kills, saves, unfinished = (int(word) for word in done.stdout.replace(",", "").split() if word.isdecimal())
    assert kills == 8
    assert saves >= 8
    assert unfinished > 0, "no kill interrupted a save"


@pytest.mark.behaviour("F-12", "H-05")
def test_saves_killed_at_each_call_leave_a_complete_checkpoint(tmp_path: Path) -> None:
    done = run_module("tests.helpers.kill_at_calls", tmp_path)
    assert done.returncode == 0, done.stderr
    calls = json.loads(done.stdout)
    assert calls.keys() == {"save", "save_safetensors"}
    for found in calls.values():
        wanted = {"open", "write", "fsync", "os.mkdir", "os.rename", "os.remove"}
        assert wanted <= found.keys(), "no calls were found: the test tries nothing"
