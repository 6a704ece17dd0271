"""Checks the library on this machine's GPUs, beside torch's FSDP2, and writes a report; ``make gpu`` runs it.

    python benchmarks/gpu_report.py                      # all sections, on CUDA
    python benchmarks/gpu_report.py --device simulated   # the same sections without a GPU
    python benchmarks/gpu_report.py --only parity,memory

Each section is a process with a time limit, so that one that fails, hangs or crashes does not stop the others. The
report has the tables and pictures of each, or why it could not run, and ends with what failed. The exit status is 1 if
anything failed. Where there are fewer GPUs than ranks, ranks share them (``tests/gpu/sharing.py``). ``--device
simulated`` replaces the GPU by simulated devices on a CPU: it shows that the sections run, and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_sections import SECTIONS, CannotRun, Result, Target
from report import machine
from tables import table

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Outcome:
    """How a section ended: ``"passed"``, ``"failed"`` or ``"could not run"``."""

    name: str
    state: str
    reason: str
    seconds: float
    result: dict[str, Any] | None = None

    def markdown(self) -> str:
        reason = f": {self.reason}" if self.reason and "\n" not in self.reason else ""
        parts = [f"## {self.name}", f"{SECTIONS[self.name].title}\n\n**{self.state}**{reason} ({self.seconds:.0f} s)"]
        if "\n" in self.reason:
            parts.append(f"```text\n{self.reason.strip()}\n```")
        for each in (self.result or {}).get("tables", []):
            parts += [each["title"], table(each["rows"], each["columns"])]
        parts += (self.result or {}).get("notes", [])
        parts += [f"![{self.name}]({picture})" for picture in (self.result or {}).get("pictures", [])]
        return "\n\n".join(parts)


def run_section(name: str, target: Target, folder: Path, seconds: float) -> Outcome:
    """Run a section in a process of its own, for at most ``seconds``."""
    begin, output = time.monotonic(), folder / f"{name}.json"
    output.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--device", target.device, "--section", name, "--out", str(folder)]
    environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"} | os.environ
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:  # its ranks are in its session
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    took = time.monotonic() - begin
    if output.exists():
        found = json.loads(output.read_text())
        return Outcome(name, found["state"], found["reason"], took, found["result"])
    last = "\n".join((folder / f"{name}.log").read_text(errors="replace").splitlines()[-15:])
    why = f"not done after {seconds:.0f} s" if status is None else f"exit status {status}"
    return Outcome(name, "failed", f"{why}. The last lines of its output:\n{last}", took)


def perform_section(name: str, target: Target, folder: Path) -> None:
    """Run a section in this process, and write how it ended."""
    result = Result(folder)
    state, reason = "passed", ""
    try:
        SECTIONS[name].run(target, result)
        if result.failures:
            state, reason = "failed", "\n".join(["", *result.failures])
    except CannotRun as error:
        state, reason = "could not run", str(error)
    except Exception:  # the report has it, and the exit status of the report is 1
        state, reason = "failed", traceback.format_exc()[-3000:]
    found = {"state": state, "reason": reason, "result": result.content()}
    (folder / f"{name}.json").write_text(json.dumps(found))


def render(target: Target, outcomes: list[Outcome], seconds: float) -> str:
    """Return the report as Markdown."""
    failed = [outcome.name for outcome in outcomes if outcome.state == "failed"]
    kind = "" if target.device == "cuda" else " **No GPU took part: this run shows only that the sections run.**"
    summary = [{"section": o.name, "result": o.state, "seconds": round(o.seconds)} for o in outcomes]
    ending = "Nothing failed." if not failed else f"Failed: {', '.join(failed)}."
    head = [
        f"# composable_fsdp on {target.name}",
        f"{datetime.date.today()}, made by `make gpu` in {seconds:.0f} s.{kind}",
        table([{"": key, " ": value} for key, value in machine().items()], ["", " "]),
        table(summary, ["section", "result", "seconds"]),
    ]
    return "\n\n".join([*head, *(outcome.markdown() for outcome in outcomes), "## What failed", ending]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "simulated"], default="cuda")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--minutes", type=float, default=30, help="time limit of all sections")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the report")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    target = Target.find(arguments.device)
    if arguments.section:
        perform_section(arguments.section, target, arguments.out)
        return 0
    if target.device == "cuda" and not target.count:
        print("This machine has no CUDA device that torch can use. Without one: --device simulated")
        return 1
    name = f"{datetime.date.today()}-{re.sub(r'[^A-Za-z0-9]+', '-', target.name).strip('-').lower()}"
    folder = arguments.out / name
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    end = begin + 60 * arguments.minutes - 10
    outcomes: list[Outcome] = []
    for each in arguments.only.split(","):
        left = end - time.monotonic()
        print(f"{each} ...", flush=True)
        if left < 5:
            outcomes.append(Outcome(each, "failed", "no time was left for it; allow more by --minutes", 0.0))
        else:
            outcomes.append(run_section(each, target, folder, min(left, SECTIONS[each].seconds)))
        print(f"{each}: {outcomes[-1].state} {outcomes[-1].reason.strip().splitlines()[-1:]}", flush=True)
    path = arguments.out / f"{name}.md"
    path.write_text(render(target, outcomes, time.monotonic() - begin))
    print(f"\nwritten: {path}")
    failed = [outcome.name for outcome in outcomes if outcome.state == "failed"]
    print(f"failed: {', '.join(failed)}" if failed else "nothing failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
