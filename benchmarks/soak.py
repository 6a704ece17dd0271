"""Trains for half an hour with a random fault every few seconds, and checks that the result is that without faults.

    OMP_NUM_THREADS=1 python benchmarks/soak.py --minutes 30

Hooks, codecs, allocations and collectives raise on one rank or on all, at random from a seed. Ranks stall for shorter
or longer than the timeout of others, and are killed, also while they save. After an exception all ranks must soon
raise, call ``reset_iter_state`` and repeat the step. After a kill the others must end, and all restart from the newest
checkpoint. Every checkpoint must be bitwise identical to that of a run without faults. Attempts use the transports in
turn: shared memory with shared shards, copies through shared memory, sockets.

The exit status is 1 after a hang, a late or wrong report, or a wrong result.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from report import parser, publish, spread
from soak_job import Event, Job
from soak_rank import GAVE_UP, Settings

TRANSPORTS = {"memory in common": "", "copies": "copy", "sockets": "0"}
LIMIT = 5.0
"""The limit in seconds until all ranks raise, if each rank has a core. If only the timeout reveals a fault, add it."""
MAX_PROBLEMS = 10
"""The number of problems after which the soak stops."""
WARM_UP, SAMPLES = 0.3, 10
"""Of the samples of a rank's life, the share that does not count; and how many must be left."""


@dataclass
class Suffered:
    """A fault as reported by ranks: the time at which it happened, and when each rank raised and continued."""

    name: str
    ends_job: bool
    stall: float = 0.0
    """The duration of a stall in seconds."""
    happened: float = float("inf")
    raised: dict[int, float] = field(default_factory=dict)
    back: dict[int, float] = field(default_factory=dict)

    @property
    def report_seconds(self) -> float:
        """Return the seconds until all remaining ranks had raised, without the duration of a stall."""
        return max(self.raised.values()) - self.happened - self.stall

    @property
    def recovery_seconds(self) -> float:
        """Return the seconds until all ranks continued, without the duration of a stall."""
        return max(self.back.values()) - self.happened - self.stall


@dataclass
class Record:
    """The results of all attempts."""

    reference: dict[tuple[int, int], str] = field(default_factory=dict)
    """The digests of a round without faults, by rank and step."""
    faults: list[Suffered] = field(default_factory=list)
    processes: list[list[Event]] = field(default_factory=list)
    """The ``"saved"`` events of each process."""
    problems: list[str] = field(default_factory=list)
    attempts: int = 0
    compared: int = 0


class Attempt:
    """Collects the events of one job.

    Invariant: all ranks have the same faults in the same order, so the n-th fault is the same on each rank.
    """

    def __init__(self, record: Record, job: Job) -> None:
        self.record, self.job = record, job
        self.is_last = False
        """Return whether the ranks have finished the last round."""
        self._faults: list[Suffered] = []
        self._fault_counts = [0] * job.settings.ranks
        self._saved: dict[int, list[Event]] = defaultdict(list)

    def run(self) -> None:
        status = {}
        for event in self.job.events():
            self._handle(event)
            if event.name == "ended":
                status[event.rank] = event.values["status"]
        self._check_end(status)
        self._check_times()
        self.record.faults += self._faults
        self.record.processes += self._saved.values()
        for problem in self.job.problems:
            self._problem(problem)

    def _handle(self, event: Event) -> None:
        values = event.values
        match event.name:
            case "fault":
                if self._fault_counts[event.rank] == len(self._faults):
                    self._faults.append(Suffered(values["name"], values["ends_job"], values["seconds"]))
                self._fault_counts[event.rank] += 1
            case "happens":
                fault = self._fault_of(event)
                fault.happened = min(fault.happened, event.at)
            case "raises":
                if values["problem"]:
                    self._problem(f"{values['problem']}: rank {event.rank} raised {values['error']}: {values['text']}")
                self._fault_of(event).raised[event.rank] = event.at
            case "goes on":
                self._fault_of(event).back[event.rank] = event.at
            case "saved":
                self._saved[event.rank].append(event)
                self._compare(event)
            case "ends":
                self.is_last = True

    def _fault_of(self, event: Event) -> Suffered:
        count = self._fault_counts[event.rank]
        return self._faults[count - 1] if count else Suffered("no fault", ends_job=False)

    def _compare(self, event: Event) -> None:
        step, digest = event.values["step"], event.values["digest"]
        expected = self.record.reference.get((event.rank, step))
        if expected is not None:
            self.record.compared += 1
            if digest != expected:
                self._problem(f"other bits on rank {event.rank} after step {step} of a round")

    def _check_end(self, status: dict[int, int]) -> None:
        """Check that the processes ended as planned."""
        killed = bool(self._faults) and self._faults[-1].ends_job
        planned = [-signal.SIGKILL, *[GAVE_UP] * (len(status) - 1)] if killed else [0] * len(status)
        if sorted(status.values()) != planned:
            strange = [rank for rank in status if status[rank] not in planned]
            self._problem(f"exit status {status}, where {planned} were to come\n{self.job.logs(strange)}")

    def _check_times(self) -> None:
        slack = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        for fault in self._faults:
            if fault.raised and fault.report_seconds > LIMIT * slack:
                self._problem(f"{fault.name}: {fault.report_seconds:.1f} s passed before all ranks raised")

    def _problem(self, text: str) -> None:
        name = self._faults[-1].name if self._faults else "before the first fault"
        self.record.problems.append(f"attempt {self.job.settings.attempt}, {name}: {text}")
        print(f"PROBLEM: {self.record.problems[-1]}", flush=True)


def soak(settings: Settings, minutes: float) -> Record:
    """Run attempts until ``minutes`` are over and the current round is finished."""
    record = Record()
    folder = Path(settings.folder)
    undisturbed = replace(settings, folder=str(folder / "undisturbed"), fault_every=0)
    disturbed = replace(settings, folder=str(folder / "disturbed"))
    for each in (undisturbed, disturbed):
        (Path(each.folder) / "checkpoints").mkdir(parents=True)
    undisturbed.over.touch()
    reference = Attempt(record, Job(undisturbed, "0"))
    reference.run()
    record.reference = {(e.rank, e.values["step"]): e.values["digest"] for process in record.processes for e in process}
    record.processes, record.compared = [], 0
    end = time.monotonic() + 60 * minutes
    is_last = False
    while not is_last and len(record.problems) < MAX_PROBLEMS:
        begin = time.monotonic()
        transport = list(TRANSPORTS)[record.attempts % len(TRANSPORTS)]
        attempt = Attempt(record, Job(replace(disturbed, attempt=record.attempts), TRANSPORTS[transport]))
        timer = threading.Timer(max(0.0, end - begin), disturbed.over.touch)
        timer.start()
        attempt.run()
        timer.cancel()
        is_last = attempt.is_last
        record.attempts += 1
        print(
            f"attempt {record.attempts}, {transport}, ended after {time.monotonic() - begin:.0f} s; so far "
            f"{len(record.faults)} faults, {len(record.problems)} problems",
            flush=True,
        )
    return record


# -- evaluation


def rows_of(record: Record) -> list[dict[str, Any]]:
    faults: dict[str, list[Suffered]] = defaultdict(list)
    for fault in record.faults:
        faults[fault.name].append(fault)
    rows: list[dict[str, Any]] = []
    for name, same_kind in sorted(faults.items()):
        row: dict[str, Any] = {"what": name, "count": len(same_kind)}
        if report_seconds := [fault.report_seconds for fault in same_kind if fault.raised]:
            row |= {"s until all raise": spread(report_seconds), "longest": max(report_seconds)}
        if recovery_seconds := [fault.recovery_seconds for fault in same_kind if fault.back]:
            row["s until all go on"] = spread(recovery_seconds)
        rows.append(row)
    counted = {
        "all faults": len(record.faults),
        "steps": sum(process[-1].values["steps"] for process in record.processes if process[0].rank == 0),
        "attempts": record.attempts,
        "states of a rank compared with the undisturbed round": record.compared,
        "problems": len(record.problems),
    }
    rows += [{"what": what, "count": count} for what, count in counted.items()]
    for what, values in growth(record.processes).items():
        rows.append({"what": what, "count": len(values), "value": spread(values), "largest": max(values)})
    return rows


def growth(processes: Iterable[list[Event]]) -> dict[str, list[float]]:
    """Return the growth of each process that ran long enough, from its warm state to its end."""
    found: dict[str, list[float]] = defaultdict(list)
    for process in processes:
        samples = process[int(len(process) * WARM_UP) :]
        if len(samples) < SAMPLES:
            continue
        minutes = [sample.at / 60 for sample in samples]
        resident = [sample.values["resident"] / 1024 for sample in samples]
        found["memory of a rank, KiB a minute"].append(statistics.linear_regression(minutes, resident).slope)
        for what in ("open files", "threads"):
            found[f"{what} of a rank, more at the end"].append(samples[-1].values[what] - samples[0].values[what])
    return found


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, default=30)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--steps", type=int, default=400, help="of a round")
    options.add_argument("--save-every", type=int, default=25)
    options.add_argument("--fault-every", type=int, default=15, help="steps from a fault to the next in the mean")
    options.add_argument("--timeout", type=float, default=8, help="of the process group, in seconds")
    arguments = options.parse_args()
    minutes, steps, fault_every = (
        (0.0, 24, 3) if arguments.quick else (arguments.minutes, arguments.steps, arguments.fault_every)
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            seed=arguments.seed,
            attempt=0,
            ranks=arguments.ranks,
            folder=folder,
            steps=steps,
            save_every=arguments.save_every,
            fault_every=fault_every,
            timeout=arguments.timeout,
        )
        record = soak(settings, minutes)
    columns = ["what", "count", "s until all raise", "longest", "s until all go on", "value", "largest"]
    shown = {"ranks": arguments.ranks, "minutes": minutes}
    publish("soak", shown, columns, rows_of(record), arguments.out)
    print("\n".join(record.problems))
    return 1 if record.problems else 0


if __name__ == "__main__":
    sys.exit(main())
