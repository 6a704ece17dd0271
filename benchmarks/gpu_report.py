"""Checks the library on this machine's GPUs, beside torch's FSDP2, and writes a report; ``make gpu`` runs it.

    python benchmarks/gpu_report.py                      # all sections, on CUDA, in 12 minutes
    python benchmarks/gpu_report.py --device simulated   # the same sections without a GPU
    python benchmarks/gpu_report.py --only training,offload

Sections come in the order of what they tell. Each is a process with a time limit, so that one that fails, hangs or
crashes does not stop the others. The report is written after each of them, so that a run that is cut off leaves all
sections before: the tables and pictures of each, those of an unfinished one too, or why it could not run. It ends with
what failed. The exit status is 1 if anything failed. Where there are fewer GPUs than ranks, ranks share them
(``tests/gpu/sharing.py``). ``--device simulated`` replaces the GPU by simulated devices on a CPU: it shows that the
sections run, and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_result import UNFINISHED, CannotRun, Result
from tables import table

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Outcome:
    """How a section ended: ``"passed"``, ``"failed"`` or ``"could not run"``."""

    name: str
    title: str
    state: str
    reason: str
    seconds: float
    result: dict[str, Any]

    def markdown(self) -> str:
        reason = f": {self.reason}" if self.reason and "\n" not in self.reason else ""
        parts = [f"## {self.name}", f"{self.title}\n\n**{self.state}**{reason} ({self.seconds:.0f} s)"]
        if "\n" in self.reason:
            parts.append(f"```text\n{self.reason.strip()}\n```")
        for each in self.result.get("tables", []):
            parts += [each["title"], table(each["rows"], each["columns"])]
        parts += self.result.get("notes", [])
        parts += [f"![{self.name}]({picture})" for picture in self.result.get("pictures", [])]
        return "\n\n".join(parts)


SLOWER = {"cuda": 1, "simulated": 4}
"""The multiple of their limits that sections get: two busy cores stand for a GPU and its host."""


@dataclass(frozen=True)
class Run:
    """A run of sections, and its report.

    Args:
        module: the module that has ``SECTIONS``, ``find_target`` and ``machine``.
        target: the devices.
        folder: the folder of logs, pictures and results of sections. The report is beside it.
    """

    module: Any
    target: Any
    folder: Path

    @property
    def report(self) -> Path:
        return self.folder.with_suffix(".md")

    def start(self, name: str, log: Any) -> subprocess.Popen[bytes]:
        """Start a section in a process of its own, which ends with this one."""
        command = [sys.executable, __file__, "--device", self.target.device, "--sections", self.module.__name__]
        environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"} | os.environ
        paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        return subprocess.Popen(
            [*command, "--section", name, "--out", str(self.folder)],
            cwd=ROOT,
            env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def outcome(self, name: str, seconds: float) -> Outcome:
        """Run a section for at most ``seconds``."""
        begin, section = time.monotonic(), self.module.SECTIONS[name]
        output, log = self.folder / f"{name}.json", self.folder / f"{name}.log"
        output.unlink(missing_ok=True)
        with log.open("w") as file, self.start(name, file) as process:
            try:
                process.wait(seconds)
                how = f"exit status {process.returncode}"
            except subprocess.TimeoutExpired:
                how = f"not done after {seconds:.0f} s"
            finally:
                if process.poll() is None:  # its ranks end with it
                    os.killpg(process.pid, signal.SIGKILL)
        found = json.loads(output.read_text()) if output.exists() else {"state": UNFINISHED, "result": {}}
        if found["state"] == UNFINISHED:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            found |= {"state": "failed", "reason": f"{how}. The last lines of its output:\n{last}"}
        took = time.monotonic() - begin
        return Outcome(name, section.title, found["state"], found["reason"], took, found["result"])

    def perform(self, name: str) -> None:
        """Run a section in this process, and write how it ended. Its tables are written as it adds them."""
        threading.Thread(target=end_with_driver, daemon=True).start()
        result = Result(self.folder, self.folder / f"{name}.json")
        result.write(UNFINISHED)
        state, reason = "passed", ""
        try:
            self.module.SECTIONS[name].run(self.target, result)
            if result.failures:
                state, reason = "failed", "\n".join(["", *result.failures])
        except CannotRun as error:
            state, reason = "could not run", str(error)
        except Exception:  # the report has it, and the exit status of the report is 1
            state, reason = "failed", traceback.format_exc()[-3000:]
        result.write(state, reason)

    def write(self, outcomes: list[Outcome], missing: list[str], seconds: float) -> None:
        """Write the report: of the sections that have run, and of those that are to come."""
        failed = [outcome.name for outcome in outcomes if outcome.state == "failed"]
        kind = (
            "" if self.target.device == "cuda" else " **No GPU took part: this run shows only that the sections run.**"
        )
        summary = [{"section": o.name, "result": o.state, "seconds": round(o.seconds)} for o in outcomes]
        summary += [{"section": name, "result": "has not run"} for name in missing]
        ending = "Nothing failed." if not failed else f"Failed: {', '.join(failed)}."
        head = [
            f"# composable_fsdp on {self.target.name}",
            f"{datetime.date.today()}, made by `make gpu` in {seconds:.0f} s.{kind}",
            table([{"": key, " ": value} for key, value in self.module.machine().items()], ["", " "]),
            table(summary, ["section", "result", "seconds"]),
        ]
        parts = [*head, *(outcome.markdown() for outcome in outcomes), "## What failed", ending]
        new = self.folder / "report.new"
        new.write_text("\n\n".join(parts) + "\n")
        new.replace(self.report)


def end_with_driver() -> None:
    """End this process and its children once the driver's end of its standard input is closed."""
    os.read(sys.stdin.fileno(), 1)  # not by the buffer, whose lock would abort the exit of the interpreter
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "simulated"], default="cuda")
    parser.add_argument("--only", help="names of sections, separated by commas")
    parser.add_argument("--minutes", type=float, default=12, help="time limit of all sections")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the report")
    parser.add_argument("--sections", default="gpu_sections", help=argparse.SUPPRESS)
    parser.add_argument("--section", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    module = importlib.import_module(arguments.sections)
    target = module.find_target(arguments.device)
    if arguments.section:
        Run(module, target, arguments.out).perform(arguments.section)
        return 0
    if target.device == "cuda" and not target.count:
        print("This machine has no CUDA device that torch can use. Without one: --device simulated")
        return 1
    name = f"{datetime.date.today()}-{re.sub(r'[^A-Za-z0-9]+', '-', target.name).strip('-').lower()}"
    run = Run(module, target, arguments.out / name)
    run.folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    end = begin + 60 * arguments.minutes - 10
    names = arguments.only.split(",") if arguments.only else list(module.SECTIONS)
    outcomes: list[Outcome] = []
    for place, each in enumerate(names):
        run.write(outcomes, names[place:], time.monotonic() - begin)
        left = end - time.monotonic()
        print(f"{each} ...", flush=True)
        if left < 5:
            reason = "no time was left for it; allow more by --minutes"
            outcomes.append(Outcome(each, module.SECTIONS[each].title, "failed", reason, 0.0, {}))
        else:
            outcomes.append(run.outcome(each, min(left, SLOWER[target.device] * module.SECTIONS[each].seconds)))
        print(f"{each}: {outcomes[-1].state} {outcomes[-1].reason.strip().splitlines()[-1:]}", flush=True)
    run.write(outcomes, [], time.monotonic() - begin)
    print(f"\nwritten: {run.report}")
    failed = [outcome.name for outcome in outcomes if outcome.state == "failed"]
    print(f"failed: {', '.join(failed)}" if failed else "nothing failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
