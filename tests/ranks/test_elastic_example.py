"""``examples/elastic_text.py`` under torchrun while ranks are killed, and its data loading."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.forked_python import forked_python
from tests.helpers.torchrun import ROOT, torchrun

SMALL = ("--layers", "1", "--dim", "64", "--heads", "2", "--hidden", "96", "--batch", "2", "--seq", "32")
STEPS, SAVE_EVERY, KILL_EVERY, KILLS = 14, 3, 4, 2


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


@pytest.fixture
def interruptions(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("text.interruptions")


def test_a_reader_resumes_where_another_stopped(interruptions: Any) -> None:
    text = importlib.import_module("text.data").Text(1, torch.arange(200, dtype=torch.uint8))

    def reader() -> Any:
        return interruptions.Reader(text, seed=1, rank=1, world_size=2, batch=3, seq=10)

    first = reader()
    for _ in range(5):  # into the second epoch: a rank has 10 windows
        first.next()
    position, state = first.position, torch.get_rng_state()
    expected = first.next()
    second = reader()
    second.position = position
    torch.set_rng_state(state)
    found = second.next()
    assert torch.equal(found.inputs, expected.inputs)
    assert torch.equal(found.targets, expected.targets)


def test_planned_kills_are_equal_on_every_rank_and_as_frequent_as_requested(interruptions: Any) -> None:
    planned = [interruptions.planned_kill(0, attempt, 100, 12, 4) for attempt in range(400)]
    assert planned == [interruptions.planned_kill(0, attempt, 100, 12, 4) for attempt in range(400)]
    assert {kill.rank for kill in planned} == {0, 1, 2, 3}
    assert sum(kill.step - 100 for kill in planned) / len(planned) == pytest.approx(12, abs=1)
    assert interruptions.planned_kill(0, 0, 100, 0, 4) is None
