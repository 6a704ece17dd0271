"""The report of ``make gpu``: sections that fail in any way leave what others have found, and so does a cut-off run."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
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


@pytest.fixture(name="of_a_step")
def _of_a_step(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu_profile")


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
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment(BENCHMARKS), capture_output=True, text=True, check=True
    )
    seconds, count = map(float, found.stdout.split()[-2:])
    assert seconds <= 12 * 60 - 10
    assert count
