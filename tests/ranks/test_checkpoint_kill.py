"""Processes that are killed at random moments of a save leave complete checkpoints behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.behaviour("F-12", "H-05")
def test_killed_saves_leave_the_previous_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.kill_saver", str(tmp_path), "30", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    kills, saves, unfinished = (int(word) for word in done.stdout.replace(",", "").split() if word.isdecimal())
    assert kills == 30
    assert saves >= 30
    assert unfinished > 0, "no kill interrupted a save"
