"""``examples/elastic_text.py`` under torchrun while ranks are killed, and its data loading."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.forked_python import forked_python
from tests.helpers.torchrun import torchrun

SMALL = ("--layers", "1", "--dim", "64", "--heads", "2", "--hidden", "96", "--batch", "2", "--seq", "32")
STEPS, SAVE_EVERY, KILL_EVERY, KILLS = 8, 3, 4, 1


@pytest.mark.behaviour("H-05", "F-12")
def test_a_run_with_killed_ranks_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    restarts = ("--max-restarts", str(KILLS), "--monitor-interval", "0.1")
    often = ("--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--kill-every", str(KILL_EVERY))
    flags = (*SMALL, *often, "--validation-batches", "1", "--out", str(tmp_path / "out"))
    with forked_python(tmp_path) as environment:
        said = torchrun("examples/elastic_text.py", *flags, launcher=restarts, environment=environment)
    begun = [int(step) for step in re.findall(r"attempt \d begins after step (\d+)", said)]
    assert len(begun) == KILLS + 1
    assert all(step % SAVE_EVERY == 0 for step in begun)
    assert begun[-1] > 0
    assert f"restarts: {KILLS}; " in said
    assert len(re.findall(r"rank \d is killed in step \d+", said)) == KILLS
    assert f"losses of all {STEPS} steps, and parameters: the same bits" in said
