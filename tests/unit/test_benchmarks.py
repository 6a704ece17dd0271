"""The tools of the benchmarks: simulations, the model of an allocator, tables of results, and the report of a GPU."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.helpers.fresh_process import run_program

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def _import_benchmark_scripts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield


def _module(name: str) -> Any:
    """Return a fixture: a module of the benchmarks, which are scripts in one folder and not a package."""
    return pytest.fixture(lambda: importlib.import_module(name))


sim, network, allocators = map(_module, ("sim.device", "sim.network", "sim.allocator"))
tables, results, of_a_step = map(_module, ("tables", "results_table", "gpu_profile"))


def test_a_stream_waits_only_for_work_before_the_event(sim: ModuleType) -> None:
    device = sim.Device(flops=1.0, bandwidth=1.0)
    first, second = sim.Stream(device), sim.Stream(device)
    first.run(10.0)
    event = first.record_event()
    first.run(10.0)
    second.wait_event(event)
    second.run(1.0)
    assert (first.end, second.end) == (20.0, 11.0)


def test_copies_on_two_streams_take_turns_on_their_link(sim: ModuleType) -> None:
    device = sim.Device(flops=1.0, bandwidth=1.0, log=[])
    streams = [sim.Stream(device) for _ in range(3)]
    for stream, link in zip(streams, ("to the device", "to the device", "to the host"), strict=True):
        stream.run(10.0, "copy", link)
    device.work_on_host(5.0, "update")
    streams[1].synchronize()
    spans = [(span.place, span.begin, span.end, span.what) for span in device.log]
    copies = [("stream 1", 0, 10, "copy"), ("stream 2", 10, 20, "copy"), ("stream 3", 0, 10, "copy")]
    assert spans == [*copies, ("host", 0, 5, "update"), ("host", 5, 20, sim.WAIT)]


def said_by(program: str) -> str:
    """Return the output of a program beside the benchmarks. It begins in a process that has imported torch."""
    done = run_program(f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); {program}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_offloaded_step_copies_and_waits_no_longer_than_fsdp2s() -> None:
    """In a process of its own, which gives torch's PrivateUse1 a name."""
    program = "import json, offload_order; print(json.dumps(offload_order.measure()[0]))"
    times = {(row["model"], row["library"]): row for row in json.loads(said_by(program))}
    for model in {model for model, _ in times}:
        ours, theirs = times[model, "ours"], times[model, "fsdp2"]
        assert ours["step ms"] < 1.005 * theirs["step ms"]
        assert ours["HtoD ms"] <= theirs["HtoD ms"]
        assert ours["DtoH ms"] == pytest.approx(theirs["DtoH ms"], rel=0.01)


def test_costs_are_operations_for_products_bytes_for_others_and_zero_for_views(sim: ModuleType) -> None:
    device = sim.Device(flops=100.0, bandwidth=10.0)
    a, b = torch.ones(4, 8), torch.ones(8, 2)
    with sim.Charging(device):
        torch.mm(a, b)
    assert device.finish() == pytest.approx(2 * 4 * 8 * 2 / 100)
    with sim.Charging(device):
        a.view(-1).detach().t()
        torch.empty(100)
    assert device.finish() == 0.0
    with sim.Charging(device):
        a.neg()
    assert device.finish() == pytest.approx(2 * a.nbytes / 10)


@pytest.mark.parametrize(("shared", "expected"), [(False, 70.0), (True, 120.0)])
def test_collectives_of_one_process_group_share_bandwidth(sim, network, shared: bool, expected: float) -> None:
    wires = network.Network(sim.Device(flops=1.0, bandwidth=1e9), bandwidth=10.0, latency=10.0, shared=shared)
    one, other = network.SimulatedGroup(wires, 0, 2), network.SimulatedGroup(wires, 0, 2)
    full = torch.empty(200, dtype=torch.uint8)
    one.all_gather_single(full, full[:100]).wait()
    assert wires.device.current.end == 20.0
    one.reduce_scatter_single(full[:100], full)
    one.allreduce([full])
    other.all_gather_single(full.repeat(4), full)
    assert wires.finish() == expected


def test_memory_events_are_exact() -> None:
    memory = importlib.import_module("memory")

    def action() -> None:
        kept = torch.empty(1000)
        with torch.profiler.record_function(memory.STEP):
            kept.neg()
            more = torch.empty(10)
        del more

    assert memory.Timeline.of(action).held(memory.STEP) == (4000, 8000, 4040)


def test_large_groups_on_streams_take_about_the_memory_of_fsdp2() -> None:
    memory, models = importlib.import_module("memory"), importlib.import_module("models")
    case = models.Case(
        "", lambda: models.Chain([models.FusedBlock(4096, 14336, 1024) for _ in range(2)]), models._features(512, 4096)
    )
    row = memory.on_streams("large", case, bf16=True)
    assert row["idle, ours/fsdp2"] == pytest.approx(1, abs=0.01)
    assert row["peak, ours/fsdp2"] < 1.01


def test_a_few_blocks_expose_no_more_than_those_of_fsdp2(monkeypatch: pytest.MonkeyPatch) -> None:
    exposure: Any = importlib.import_module("exposure")
    monkeypatch.setattr(exposure, "LAYERS", 4)
    wire = exposure.ShmSocket(gbit=400.0, shared=True)
    names = "ours, 16-bit gradients", "ours", "fsdp2"
    ((narrow,), (default,), (peer,)) = (exposure.steps(exposure.VARIANTS[name], 64, [wire]) for name in names)
    one_gather = (exposure.floor(64, 400.0) - 0.04) / 3 + 0.02  # gathers are bf16, reductions fp32: a third
    assert narrow["exposed ms"] <= 2 * one_gather + 0.2
    assert default["exposed ms"] <= 1.02 * peer["exposed ms"], "a step has FSDP2's shape"
    assert peer["exposed ms"] > 3 * one_gather


def test_a_recorded_step_takes_the_times_of_another_network(sim: ModuleType, network: ModuleType) -> None:
    device = sim.Device(flops=1.0, bandwidth=1.0)
    link = network.Network(device, bandwidth=10.0)

    def step() -> float:
        transfer = link.transfer(object(), 100)
        device.current.run(5.0)
        device.current.wait_until(lambda: transfer.end)
        device.current.run(5.0)
        return float(link.finish())

    with device.recorded() as work:
        assert step() == 15.0
    assert link.repeat(work) == 15.0
    link.latency, link.bandwidth = 20.0, 1.0
    assert link.repeat(work) == step() == 125.0


def test_a_small_sweep_of_networks_is_not_slower_than_fsdp2() -> None:
    """With shards of odd sizes."""
    sweep = importlib.import_module("schedule_sweep")
    (row,) = sweep.sweep("8 blocks of 4096, batch 2", 500, [sweep.Cell(2000, 1600)])
    assert row["latency us"] == 2000
    assert row["bound ms"] < row["ours ms"] < row["fsdp2 ms"]
    assert row["ours peak MB"] < 1.02 * row["fsdp2 peak MB"]


MB = 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "reserved"), [(1, 2 * MB), (MB, 2 * MB), (MB + 1, 20 * MB), (10 * MB, 10 * MB), (15 * MB - 1, 16 * MB)]
)
def test_a_first_request_reserves_a_segment_by_its_size(allocators: Any, nbytes: int, reserved: int) -> None:
    allocator = allocators.Allocator()
    block = allocator.allocate(nbytes, "stream")
    assert allocator.reserved == reserved
    assert block.size >= nbytes
    assert block.size % 512 == 0


@pytest.mark.parametrize("expandable", [False, True])
def test_random_requests_never_overlap_and_end_with_nothing_allocated(allocators: Any, expandable: bool) -> None:
    allocator, numbers, blocks = allocators.Allocator(expandable=expandable), random.Random(0), list[Any]()
    for _ in range(1000):
        if blocks and numbers.random() < 0.5:
            allocator.free(blocks.pop(numbers.randrange(len(blocks))))
        else:
            blocks.append(allocator.allocate(int(2 ** numbers.uniform(0, 26)), numbers.choice("ab")))
        assert allocator.allocated == sum(block.size for block in blocks) <= allocator.reserved
    for block in blocks:
        allocator.free(block)
    assert allocator.allocated == 0
    free = [block for pool in allocator._free.values() for block in pool]
    assert sum(block.size for block in free) == allocator.reserved
    if expandable:
        assert len(free) == len(allocator._free), "each segment is one free block again"


def test_recorded_allocations_are_played_as_they_were(allocators: Any) -> None:
    reserved_memory = importlib.import_module("reserved_memory")
    recorder, draw = reserved_memory.Recorder(), random.Random(0)
    direct, played = allocators.Allocator(), allocators.Allocator()
    pairs: list[tuple[int, Any]] = []
    for _ in range(300):
        if pairs and draw.random() < 0.4:
            number, block = pairs.pop(draw.randrange(len(pairs)))
            recorder.free(number)
            direct.free(block)
        else:
            nbytes, stream = draw.randrange(1, 30 * MB), draw.choice("ab")
            pairs.append((recorder.allocate(nbytes, stream), direct.allocate(nbytes, stream)))
    events, blocks = recorder.take(), dict[int, Any]()
    reserved_memory.play(events, played, blocks)
    assert (played.reserved, played.allocated) == (direct.reserved, direct.allocated)
    assert {number for number, *_ in reserved_memory.in_use(events)} == blocks.keys() == {n for n, _ in pairs}


DOCUMENT = {
    "name": "step time",
    "date": "2026-01-01T10:00:00+00:00",
    "command": "benchmarks/step_time.py",
    "settings": {"ranks": 2},
    "machine": {"cpus": 2},
    "columns": ["case", "ratio"],
    "rows": [{"case": "gpt", "ratio": 0.5}],
    "file": "a.json",
}


def test_the_interval_covers_the_true_median_at_its_confidence(tables: ModuleType) -> None:
    draw = random.Random(1)
    intervals = [tables.spread([draw.gauss(1.0, 0.1) for _ in range(25)]) for _ in range(30)]
    assert 26 <= sum(interval["low"] <= 1.0 <= interval["high"] for interval in intervals) <= 30


def test_ratios_are_of_samples_taken_side_by_side(tables: ModuleType) -> None:
    assert tables.ratios([1.0, 20.0, 3.0], [2.0, 40.0, 6.0])["low"] == 0.5
    with pytest.raises(ValueError, match="shorter"):
        tables.ratios([1.0, 2.0], [1.0])


def test_a_table_shows_intervals_three_digits_and_dashes(tables: ModuleType) -> None:
    rows = [{"a": {"median": 0.5, "low": 0.4001, "high": 0.6}, "b": 1234.5}, {"a": "text", "b": 7}, {"a": None}]
    assert tables.table(rows, ["a", "b"]).splitlines() == [
        "| a | b |",
        "| --- | --- |",
        "| 0.5 [0.4, 0.6] | 1234 |",
        "| text | 7 |",
        "| – | – |",
    ]


def test_the_page_names_command_file_and_machine(results: ModuleType) -> None:
    page = results.page([DOCUMENT])
    assert "## Step time: ranks 2\n\n| case | ratio |\n| --- | --- |\n| gpt | 0.5 |\n" in page
    assert "`benchmarks/step_time.py`, 2026-01-01T10:00:00+00:00, [a.json](results/a.json); cpus 2." in page


ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
NAME = "2026-11-21-convergence"


@pytest.mark.behaviour("E-10")
def test_int8_both_ways_with_error_feedback_ended_within_a_percent_of_fp32() -> None:
    data = json.loads((RESULTS / f"{NAME}.json").read_text())
    steps = data["settings"]["steps"]
    assert steps >= 300
    finals = {(run["variant"], run["seed"]): run["validation"][str(steps)] for run in data["runs"]}
    seeds = [seed for variant, seed in finals if variant == "int8-ef"]
    assert len(seeds) >= 3
    for seed in seeds:
        assert finals["int8-ef", seed] == pytest.approx(finals["fp32", seed], rel=0.01)


def test_the_documentation_has_the_table_of_the_results() -> None:
    page = (RESULTS / f"{NAME}.md").read_text()
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert len(table) > 3
    assert "\n".join(table) in (ROOT / "docs" / "extensions.md").read_text()


PLANTED = """
import os, signal, time
from types import SimpleNamespace
from gpu_result import CannotRun, Section

def found(target, result):
    result.add("Found", [{"what": "of the good section"}])

def hang(target, result):
    result.add("Found", [{"what": "before it hangs", "process": os.getpid()}])
    time.sleep(600)

def kill(target, result):
    result.add("Found", [{"what": "before it is killed"}])
    print("its last line", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

def fail(target, result):
    raise ValueError("a planted error")

def differ(target, result):
    result.failures.append("a planted difference")

def refuse(target, result):
    raise CannotRun("a planted reason")

def find_target(device):
    return SimpleNamespace(device="cuda", name="planted", count=1)

def machine():
    return {"cpus": 1}

FUNCTIONS = (found, hang, kill, fail, differ, refuse)
SECTIONS = {each.__name__: Section("Planted.", each, 1, 10 if each is hang else 60) for each in FUNCTIONS}
"""


@pytest.fixture(name="command")
def _command(tmp_path: Path) -> list[str]:
    (tmp_path / "planted.py").write_text(PLANTED)
    script = [sys.executable, str(BENCHMARKS / "gpu_report.py")]
    return [*script, "--sections", "planted", "--out", str(tmp_path), "--minutes", "5"]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(BENCHMARKS), str(BENCHMARKS.parent)])}


def report(folder: Path) -> str:
    return next((path.read_text() for path in folder.glob("*.md")), "")


def test_the_report_has_what_each_section_found_before_it_failed(command: list[str], tmp_path: Path) -> None:
    run = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=300, check=False)
    text = report(tmp_path)
    assert run.returncode == 1, run.stdout
    results = dict(re.findall(r"^\| (\w+) \| ([a-z ]+) \| \d+ \|$", text, re.MULTILINE))
    assert results["found"] == "passed"
    assert results["refuse"] == "could not run"
    assert [results[name] for name in ("hang", "kill", "fail", "differ")] == ["failed"] * 4
    for found in ("of the good section", "before it hangs", "before it is killed"):
        assert f"| {found} |" in text
    for reason in ("not done after 10 s", "exit status -9", "its last line", "ValueError: a planted error"):
        assert reason in text
    assert "**could not run**: a planted reason" in text
    assert "a planted difference" in text
    assert not next(tmp_path.glob("*/found.log")).read_text(), "the process of a section ends without a word"
    assert text.endswith("Failed: hang, kill, fail, differ.\n")


def test_a_run_that_is_killed_leaves_the_sections_before_and_no_process(command: list[str], tmp_path: Path) -> None:
    run = subprocess.Popen([*command, "--only", "found,differ,hang,fail"], env=environment(tmp_path))
    partial = None
    try:
        deadline = time.monotonic() + 60
        while partial is None and time.monotonic() < deadline:
            time.sleep(0.1)
            partial = next((each for each in tmp_path.glob("*/hang.json") if "before it" in each.read_text()), None)
    finally:
        run.kill()
        run.wait()
    assert partial is not None, "the section has not begun"
    text = report(tmp_path)
    assert "| of the good section |" in text
    assert "a planted difference" in text
    for name in ("hang", "fail"):
        assert f"| {name} | has not run | – |" in text
    process = int(partial.read_text().split('"process": ')[1].split("}")[0])
    deadline = time.monotonic() + 30
    while _is_alive(process) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _is_alive(process), "the section that ran goes on"


def _is_alive(process: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def events(module: ModuleType) -> list[Any]:
    """Return what a profiler lists of an offloaded step, in microseconds."""
    rows = [
        ("host", 0, 10, "cudaLaunchKernel"),
        ("host", 20, 900, "cudaEventSynchronize"),
        ("host", 900, 1000, "optimizer"),
        ("stream 7", 100, 200, "Memcpy HtoD (Pinned -> Device)"),
        ("stream 8", 200, 300, "ncclDevKernel_AllGather_RING_LL"),
        ("stream 9", 200, 260, "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"),
        ("stream 1", 350, 450, "elementwise_kernel"),
        ("stream 1", 440, 500, "gemm"),
        ("stream 7", 700, 800, "Memcpy DtoH (Device -> Pinned)"),
    ]
    return [module.Span(*row) for row in rows]


def test_counts_of_a_profile(of_a_step: ModuleType) -> None:
    assert of_a_step.counts(events(of_a_step), 2) == {
        "profiled step ms": 0.35,
        "idle ms a step": 0.125,
        "longest gap us": 200,
        "kernels": 4,
        "collectives by stream": "stream 8: 1, stream 9: 1",
        "launches": 1,
        "copies HtoD": 1,
        "copies DtoH": 1,
        "copies DtoD": 0,
        "host waits": 1,
        "longest call": "cudaEventSynchronize, 0.9 ms",
    }


def test_a_ledger_has_the_begin_and_end_of_each_kind_of_work(of_a_step: ModuleType) -> None:
    rows = {row["work"]: (row["count"], row["begin ms"], row["end ms"]) for row in of_a_step.ledger(events(of_a_step))}
    assert rows == {
        "waits of the host": (1, 0.02, 0.9),
        "copies HtoD": (1, 0.1, 0.2),
        "collectives": (2, 0.2, 0.3),
        "kernels": (2, 0.35, 0.5),
        "copies DtoH": (1, 0.7, 0.8),
        "optimizer": (1, 0.9, 1.0),
    }


def test_each_section_has_a_time_and_all_of_them_fit_into_twelve_minutes() -> None:
    program = "from gpu_sections import SECTIONS as s; print(sum(e.expected for e in s.values()), len(s))"
    seconds, count = map(float, said_by(program).split()[-2:])
    assert seconds <= 12 * 60 - 10
    assert count
