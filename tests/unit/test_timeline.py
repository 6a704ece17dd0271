"""Timelines of recorded events: lanes, Chrome traces, pictures, the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import fully_shard, trace
from composable_fsdp.diagnostics import write_timeline
from composable_fsdp.diagnostics.timeline import Lanes, draw_step, performed, straggler
from composable_fsdp.trace import Operation, TraceEvent
from tests._internals import Event, Hook, merged, write_chrome_trace, write_rank
from tests._internals import dry_run as s
from tests.helpers.command import run_command


def event(operation: str, group: str, begin: float, end: float, nbytes: int = 0) -> TraceEvent:
    return TraceEvent(Operation(operation), group, nbytes, "", begin, end, nbytes)


STEP = (
    event("unshard", "a", 1.0, 1.1, 100),
    event("unshard", "b", 1.2, 1.3, 300),
    event("wait", "a", 1.3, 2.0),
    event("reshard", "a", 3.0, 3.0),
    event("wait", "b", 3.0, 3.5),
    event("forward", "root", 1.0, 5.0),
    event("reduce", "b", 6.0, 6.1, 300),
    event("reduced", "b", 7.0, 8.0),
    event("backward", "root", 5.5, 8.0),
)


def lanes_of(lanes: Lanes) -> dict[str, list[tuple[str, float, float]]]:
    return {
        name: [(each.name, round(each.begin, 6), round(each.end, 6)) for each in lanes.lane(name)]
        for name in dict.fromkeys(each.lane for each in lanes.slices)
    }


def test_events_become_lanes_of_passes_computation_collectives_and_waits() -> None:
    assert lanes_of(performed(STEP)) == {
        "passes": [("forward root", 1.0, 5.0), ("backward root", 5.5, 8.0)],
        "compute": [("between groups", 1.0, 1.3), ("a", 2.0, 3.0), ("b", 3.5, 5.0), ("between groups", 5.5, 7.0)],
        "gather": [("gather a", 1.0, 2.0), ("gather b", 2.0, 3.5)],
        "reduce": [("reduce b", 6.0, 8.0)],
        "waits": [("wait a", 1.3, 2.0), ("wait b", 3.0, 3.5), ("reduced b", 7.0, 8.0)],
    }


def test_groups_that_share_a_launch_are_one_slice() -> None:
    fused = (
        event("unshard", "a", 1.0, 1.1, 100),
        event("unshard", "b", 1.0, 1.1, 300),
        event("wait", "a", 1.2, 2.0),
        event("wait", "b", 2.5, 2.5),
    )
    (both,) = performed(fused).lane("gather")
    assert (both.name, both.end, both.bytes) == ("gather a, b", 2.0, 400)


def test_a_recording_may_begin_in_the_middle_of_a_step() -> None:
    partial = (event("reduce", "b", 4.0, 4.1, 300), event("backward", "root", 3.0, 4.5))  # the sum is not set yet
    lanes = performed([*STEP[:3], *partial, *STEP[3:]])
    assert [(each.name, each.begin) for each in lanes.lane("reduce")] == [("reduce b", 6.0)]


def test_the_summary_is_of_training_steps() -> None:
    evaluation = event("forward", "root", 9.0, 9.5)
    found = performed([*STEP, evaluation], "rank 3").summary()
    assert found == {
        "title": "rank 3",
        "steps": 1,
        "seconds": 7.0,
        "passes_seconds": 7.0,
        "between_seconds": 0.0,
        "exposed_seconds": pytest.approx(2.2),
    }
    assert performed([]).summary()["seconds"] == 0.0


def steps_of(title: str, *, passes: float, between: float, waits: float, number: int = 3, last: float = 0.0) -> Lanes:
    events, begin = list[TraceEvent](), 100.0
    for step in range(number):
        end = begin + passes + (last if step == number - 1 else 0.0)
        events += [
            event("unshard", "a", begin, begin, 8),
            event("wait", "a", begin, begin + waits),
            event("forward", "root", begin, begin + waits),
            event("backward", "root", begin + waits, end),
        ]
        begin = end + between
    return performed(events, title)


def test_a_step_lasts_from_forward_to_forward_with_what_is_between() -> None:
    found = steps_of("rank 0", passes=0.25, between=0.5, waits=0.125, last=9.0).summary()
    assert (found["seconds"], found["passes_seconds"], found["between_seconds"]) == (0.75, 0.25, 0.5)
    assert found["exposed_seconds"] == 0.125


@pytest.mark.parametrize(
    ("own", "others", "text"),
    [
        ((0.5, 0.5, 0.0), (0.9, 0.1, 0.4), "rank 0 waits 400 ms a step for rank 9, which is late between its steps"),
        ((0.8, 0.2, 0.1), (0.8, 0.2, 0.4), "rank 0 waits 300 ms a step for rank 9, which is late in its passes"),
        ((0.5, 0.5, 0.0), (0.5, 0.5, 0.0), ""),
        ((0.8, 0.2, 0.4), (0.8, 0.2, 0.41), ""),  # both wait for data as long as each other
    ],
)
def test_the_rank_that_others_wait_for_is_named(own, others: tuple[float, float, float], text: str) -> None:
    late, *waiting = [
        steps_of(title, passes=passes, between=between, waits=waits)
        for title, (passes, between, waits) in (("rank 9", own), ("rank 0", others), ("rank 1", others))
    ]
    assert straggler([waiting[0].summary(), late.summary()]) == text
    assert straggler([late.summary()]) == straggler([]) == ""
    several = straggler([*(each.summary() for each in waiting), late.summary()])
    assert several == text.replace("waits", "and 1 more rank wait")


def test_the_step_of_median_time_is_drawn_and_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[plot]'")
    lanes = steps_of("rank 0", passes=0.25, between=0.25, waits=0.125, number=4, last=9.0)
    path = tmp_path / "t.svg"
    draw_step(path, [lanes])
    drawn = path.read_text()
    assert "<!-- rank 0, step 0 of 4: 500.0 ms, 25% exposed -->" in drawn


def test_the_lanes_of_a_chrome_trace_do_not_overlap(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_chrome_trace(path, [performed(STEP), performed(STEP, "rank 1")])
    events = json.loads(path.read_text())["traceEvents"]
    processes = [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"]
    assert processes == [(0, "rank 0"), (1, "rank 1")]
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1]
    assert names == ["passes", "compute", "gather", "reduce", "waits"]
    (b,) = [e for e in events if e["ph"] == "X" and (e["pid"], e["name"]) == (1, "gather b")]
    assert (b["ts"], b["dur"], b["args"]["bytes"]) == (1e6, 1.5e6, 300)
    for process in (0, 1):
        for lane in names:
            spans = [e for e in events if e["ph"] == "X" and (e["pid"], e["cat"]) == (process, lane)]
            assert spans, lane
            assert all(a["ts"] + a["dur"] <= b["ts"] + 0.01 for a, b in pairwise(spans)), lane


def test_a_picture_of_overlapping_slices_has_few_texts(tmp_path: Path, monkeypatch) -> None:
    """A damaged file may have any number of waits and passes in a step; each text took 0.5 ms."""
    axes = pytest.importorskip("matplotlib.axes").Axes
    made: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        plain = getattr(axes, name)

        def call(*arguments: Any, **options: Any) -> Any:
            made.append(name)
            return plain(*arguments, **options)

        return call

    monkeypatch.setattr(axes, "text", counted("text"))
    waits = [event("wait", "a", 1.0, 5.0 + number / 1000) for number in range(100)]
    passes = [event("backward", "", 6.0, 7.0 + number / 1000) for number in range(100)]
    draw_step(tmp_path / "step.png", [performed([event("forward", "", 0.0, 6.0), *waits, *passes])])
    assert len(made) < 6, "one for each lane"


def test_a_picture_is_drawn_without_the_settings_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ``matplotlibrc`` in the current folder may have been sent, and latex runs what its preamble says."""
    matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[plot]'")
    monkeypatch.setenv("PATH", str(tmp_path))  # has no latex: it cannot be run without an error
    with matplotlib.rc_context({"text.usetex": True, "savefig.format": "pdf"}):
        write_timeline(STEP, tmp_path / "t.svg")
        assert matplotlib.rcParams["text.usetex"], "settings of the program are kept"
    assert "<svg" in (tmp_path / "t.svg").read_text()


def test_notebooks_show_reports_as_they_are_printed() -> None:
    schedule = s.Schedule((s.Step(Event(Hook.PRE_FORWARD, "a"), (s.Action("wait", ("a",)), s.Action("free", ("a",)))),))
    assert repr(schedule) == str(schedule) == "pre-forward a | wait a; free a"


def test_an_environment_variable_records_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, at_exit = tmp_path / "new" / "folder", list[Callable[[], None]]()
    monkeypatch.setenv("COMPOSABLE_FSDP_TIMELINE", str(folder))
    monkeypatch.setattr("atexit.register", at_exit.append)
    monkeypatch.setattr(trace, "listeners", [])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = fully_shard(nn.Linear(4, 4))
    fully_shard(nn.Linear(4, 4))
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
    dist.destroy_process_group()
    assert not folder.exists()
    (write,) = at_exit
    write()
    (lanes,) = merged(folder)
    assert lanes.title == "rank 0"
    assert len(lanes.steps) == 2
    assert {each.lane for each in lanes.slices} >= {"passes", "compute"}


def write_dump(folder: Path, rank: int) -> None:
    """Write the file of a rank whose counter of time is ahead by 10 seconds for each rank before it."""
    ahead = 10.0 * rank
    events = [replace(each, begin=each.begin + ahead, end=each.end + ahead) for each in STEP]
    write_rank(folder, rank, performed(events, ahead=999.0 - ahead))


def test_the_command_merges_all_ranks(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[plot]'")
    empty = run_command("timeline", tmp_path)
    assert (empty.exit_code, empty.stderr) == (
        2,
        f"error: there is no timeline in {tmp_path}. Set COMPOSABLE_FSDP_TIMELINE={tmp_path} for a run; ranks write "
        "when they end.\n",
    )
    for rank in range(2):
        write_dump(tmp_path, rank)
    done = run_command("timeline", tmp_path, "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["title"] for row in found["processes"]] == ["rank 0", "rank 1"]
    assert found["files"] == [str(tmp_path / name) for name in ("timeline.json", "timeline.png")]
    processes = merged(tmp_path)
    assert processes[0].steps == processes[1].steps
    assert processes[0].steps[0][:3] == pytest.approx((1000.0, 1007.0, 1007.0))
    shown = run_command("timeline", tmp_path)
    assert "rank 1" in shown.stdout
    assert "7000.00" in shown.stdout
    assert f"wrote {tmp_path / 'timeline.png'}" in shown.stdout
    (tmp_path / "rank-00001.json").write_text("{}")
    damaged = run_command("timeline", tmp_path)
    assert (damaged.exit_code, f"error: {tmp_path / 'rank-00001.json'} cannot be read" in damaged.stderr) == (2, True)
