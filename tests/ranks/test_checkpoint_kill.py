"""Processes that are killed at each call of a save leave complete checkpoints, and those that exit complete theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from composable_fsdp.checkpoint import load
from tests.helpers.fresh_process import run_module, run_program


@pytest.mark.behaviour("F-12", "H-05")
def test_saves_killed_at_each_call_leave_a_complete_checkpoint(tmp_path: Path) -> None:
    done = run_module("tests.helpers.kill_at_calls", tmp_path)
    assert done.returncode == 0, done.stderr
    calls = json.loads(done.stdout)
    assert calls.keys() == {"save", "save_safetensors"}
    for found in calls.values():
        wanted = {"open", "write", "fsync", "os.mkdir", "os.rename", "os.remove"}
        assert wanted <= found.keys(), "no calls were found: the test tries nothing"


@pytest.mark.behaviour("F-12")
def test_the_exit_of_the_interpreter_waits_for_a_save(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from torch import nn\n"
        "from composable_fsdp.checkpoint import save\n"
        "save(sys.argv[1], nn.Linear(1000, 1000), step=3, asynchronous=True)"
    )
    assert run_program(script, tmp_path).returncode == 0
    assert load(tmp_path, nn.Linear(1000, 1000)) == {}
