"""Timelines of training steps on real ranks."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from composable_fsdp.diagnostics import write_timeline
from composable_fsdp.diagnostics.timeline import Lanes, performed, straggler
from composable_fsdp.trace import Recorder
from tests.helpers.faults import build, step
from tests.helpers.run_ranks import run_ranks
from tests.helpers.transports import SOCKETS


def record_steps(folder: Path) -> Lanes:
    model = build()
    step(model)
    with Recorder() as recorder:
        for _ in range(3):
            step(model)
    title = f"rank {dist.get_rank()}"
    write_timeline(recorder, folder / f"{title}.json", title=title)
    return performed(recorder, title)


def record_a_late_rank() -> Lanes:
    model = build()
    step(model)
    with Recorder() as recorder:
        for _ in range(4):
            step(model)
            time.sleep(0.3 * dist.get_rank())
    return performed(recorder, f"rank {dist.get_rank()}")


def test_a_rank_that_is_late_between_its_steps_is_named() -> None:
    both = [lanes.summary() for lanes in run_ranks(record_a_late_rank, 2, environment=SOCKETS)]
    text = straggler(both)
    assert re.fullmatch(r"rank 0 waits \d+ ms a step for rank 1, which is late between its steps", text), both
    assert both[1]["between_seconds"] > 0.3 > both[0]["between_seconds"]
    assert both[0]["seconds"] == pytest.approx(both[1]["seconds"], rel=0.2), "from forward to forward"


def test_ranks_record_the_same_collectives_and_write_them(tmp_path: Path) -> None:
    both = run_ranks(record_steps, 2, tmp_path, environment=SOCKETS)
    found = [[(each.name, each.bytes) for each in lanes.lane("gather")] for lanes in both]
    assert found[0] == found[1]
    assert found[0]
    assert all(nbytes for name, nbytes in found[0] if name != "gather root"), "the root has no parameters"
    for lanes in both:
        assert len(lanes.steps) == 3
        assert all(each.end > each.begin and each.bytes for each in lanes.lane("reduce"))
        events = json.loads((tmp_path / f"{lanes.title}.json").read_text())["traceEvents"]
        assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [lanes.title]
        assert sum(e["name"].startswith("forward") for e in events) == 3
