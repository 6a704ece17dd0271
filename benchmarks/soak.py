"""Trains for half an hour while something goes wrong every few seconds, and ends where a training without faults does.

    OMP_NUM_THREADS=1 python benchmarks/soak.py --minutes 30

On one rank or on all, hooks, codecs, allocations and collectives raise, at random from a seed; ranks stall, shorter or
longer than others are patient, and are killed, also while they save. After an exception all ranks must raise soon, call
``reset_iter_state`` and take the step again; after a kill the others must end, and all start from the newest
checkpoint. Every checkpoint must have the bits that it has without faults. Attempts take turns in how ranks reach each
other: memory in common, copies through shared memory, sockets.

The exit status is 1 where something hung, told of a fault late or otherwise than planned, or came out otherwise.
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
"""Seconds until all ranks know, of ranks that have a core each; beyond the timeout, where only that tells."""
TOO_MANY = 10
"""Problems, with which it makes no sense to go on."""
WARM_UP, SAMPLES = 0.3, 10
"""Of the samples of a rank's life, the share that does not count; and how many must be left."""


@dataclass
class Suffered:
    """A fault as ranks told of it: when it happened, and when each rank raised and went on."""

    name: str
    ends_job: bool
    stall: float = 0.0
    """Seconds."""
    happened: float = float("inf")
    raised: dict[int, float] = field(default_factory=dict)
    back: dict[int, float] = field(default_factory=dict)

    @property
    def told(self) -> float:
        """Seconds until all ranks that are left had raised, those of a stall not counted."""
        return max(self.raised.values()) - self.happened - self.stall

    @property
    def mended(self) -> float:
        """Seconds until all ranks went on, those of a stall not counted."""
        return max(self.back.values()) - self.happened - self.stall


@dataclass
class Record:
    """What became of all attempts."""

    reference: dict[tuple[int, int], str] = field(default_factory=dict)
    """By rank and step, the digest of an undisturbed round."""
    faults: list[Suffered] = field(default_factory=list)
    lives: list[list[Event]] = field(default_factory=list)
    """The ``"saved"`` events of each process."""
    problems: list[str] = field(default_factory=list)
    attempts: int = 0
    compared: int = 0


class Attempt:
    """What one job tells, as it comes.

    Invariant: all ranks meet the same faults in the same order, so that the n-th one of each is the same.
    """

    def __init__(self, record: Record, job: Job) -> None:
        self.record, self.job = record, job
        self.is_last = False
        """Whether the ranks have come to the end of the last round."""
        self._faults: list[Suffered] = []
        self._met = [0] * job.settings.ranks
        self._saved: dict[int, list[Event]] = defaultdict(list)

    def run(self) -> None:
        status = {}
        for event in self.job.events():
            self._take(event)
            if event.name == "ended":
                status[event.rank] = event.values["status"]
        self._judge_end(status)
        self._judge_times()
        self.record.faults += self._faults
        self.record.lives += self._saved.values()
        for problem in self.job.problems:
            self._problem(problem)

    def _take(self, event: Event) -> None:
        values = event.values
        match event.name:
            case "fault":
                if self._met[event.rank] == len(self._faults):
                    self._faults.append(Suffered(values["name"], values["ends_job"], values["seconds"]))
                self._met[event.rank] += 1
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
        met = self._met[event.rank]
        return self._faults[met - 1] if met else Suffered("no fault", ends_job=False)

    def _compare(self, event: Event) -> None:
        step, digest = event.values["step"], event.values["digest"]
        expected = self.record.reference.get((event.rank, step))
        if expected is not None:
            self.record.compared += 1
            if digest != expected:
                self._problem(f"other bits on rank {event.rank} after step {step} of a round")

    def _judge_end(self, status: dict[int, int]) -> None:
        """Whether the processes ended as planned."""
        killed = bool(self._faults) and self._faults[-1].ends_job
        planned = [-signal.SIGKILL, *[GAVE_UP] * (len(status) - 1)] if killed else [0] * len(status)
        if sorted(status.values()) != planned:
            strange = [rank for rank in status if status[rank] not in planned]
            self._problem(f"exit status {status}, where {planned} were to come\n{self.job.logs(strange)}")

    def _judge_times(self) -> None:
        slack = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        for fault in self._faults:
            if fault.raised and fault.told > LIMIT * slack:
                self._problem(f"{fault.name}: {fault.told:.1f} s passed before all ranks raised")

    def _problem(self, text: str) -> None:
        name = self._faults[-1].name if self._faults else "before the first fault"
        self.record.problems.append(f"attempt {self.job.settings.attempt}, {name}: {text}")
        print(f"PROBLEM: {self.record.problems[-1]}", flush=True)


def soak(settings: Settings, minutes: float) -> Record:
    """Rounds of attempts until ``minutes`` are over and the round that is then under way is done."""
    record = Record()
    folder = Path(settings.folder)
    undisturbed = replace(settings, folder=str(folder / "undisturbed"), fault_every=0)
    disturbed = replace(settings, folder=str(folder / "disturbed"))
    for each in (undisturbed, disturbed):
        (Path(each.folder) / "checkpoints").mkdir(parents=True)
    undisturbed.over.touch()
    reference = Attempt(record, Job(undisturbed, "0"))
    reference.run()
    record.reference = {(e.rank, e.values["step"]): e.values["digest"] for life in record.lives for e in life}
    record.lives, record.compared = [], 0
    end = time.monotonic() + 60 * minutes
    is_last = False
    while not is_last and len(record.problems) < TOO_MANY:
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


# -- what is made of it


def rows_of(record: Record) -> list[dict[str, Any]]:
    faults: dict[str, list[Suffered]] = defaultdict(list)
    for fault in record.faults:
        faults[fault.name].append(fault)
    rows: list[dict[str, Any]] = []
    for name, alike in sorted(faults.items()):
        row: dict[str, Any] = {"what": name, "count": len(alike)}
        if told := [fault.told for fault in alike if fault.raised]:
            row |= {"s until all raise": spread(told), "longest": max(told)}
        if mended := [fault.mended for fault in alike if fault.back]:
            row["s until all go on"] = spread(mended)
        rows.append(row)
    counted = {
        "all faults": len(record.faults),
        "steps": sum(life[-1].values["steps"] for life in record.lives if life[0].rank == 0),
        "attempts": record.attempts,
        "states of a rank compared with the undisturbed round": record.compared,
        "problems": len(record.problems),
    }
    rows += [{"what": what, "count": count} for what, count in counted.items()]
    for what, values in growth(record.lives).items():
        rows.append({"what": what, "count": len(values), "value": spread(values), "largest": max(values)})
    return rows


def growth(lives: Iterable[list[Event]]) -> dict[str, list[float]]:
    """What each process that lived for long enough has more at the end of its life than once it was warm."""
    found: dict[str, list[float]] = defaultdict(list)
    for life in lives:
        samples = life[int(len(life) * WARM_UP) :]
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
        (0.0, 40, 3) if arguments.quick else (arguments.minutes, arguments.steps, arguments.fault_every)
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
