"""Runs the processes of one attempt of ``soak.py``: reads their events, and continues or ends stopped processes."""

from __future__ import annotations

import heapq
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from report import SHARED_MEMORY
from soak_rank import Settings

__all__ = ["Event", "Job"]

STARTING, QUIET = 300.0, 30.0
"""The seconds without an event of any rank after which a job counts as hanging.

The first value is for the start, which imports torch. The second is added to twice the timeout of the process group.
"""
ENDING = 20.0
"""The seconds beyond that timeout in which all ranks must end after one has ended."""


@dataclass(frozen=True)
class Event:
    """An event reported by a rank or observed by the driver. ``at`` is on the clock that all processes share."""

    rank: int
    name: str
    at: float
    values: Mapping[str, Any]


class Job:
    """All ranks of one attempt.

    Args:
        settings: the settings of the attempt.
        transport: the value of ``COMPOSABLE_FSDP_SHARED_MEMORY``; empty leaves it unset.
    """

    def __init__(self, settings: Settings, transport: str) -> None:
        self.settings = settings
        self.problems: list[str] = []
        """Problems with the processes: hangs and unplanned ends."""
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._logs = [Path(settings.folder) / f"attempt-{settings.attempt}-rank-{r}.log" for r in range(settings.ranks)]
        self._processes = [self._start(rank, transport) for rank in range(settings.ranks)]
        self._resume: list[tuple[float, int]] = []

    def _start(self, rank: int, transport: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.settings.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here, so that it does not end with a killed rank
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            SHARED_MEMORY: transport or "1",
        }
        script = [sys.executable, str(Path(__file__).with_name("soak_rank.py")), self.settings.encoded()]
        with self._logs[rank].open("wb") as log:
            return subprocess.Popen(script, env=environment, stdout=subprocess.PIPE, stderr=log, bufsize=0)

    def events(self) -> Iterator[Event]:
        """Yield all events of ranks, then ``"ended"`` with the exit status of each. Afterwards no process is left."""
        quiet, ending = QUIET + 2 * self.settings.timeout, ENDING + self.settings.timeout
        deadline = time.monotonic() + STARTING
        try:
            with selectors.DefaultSelector() as selector:
                for rank, process in enumerate(self._processes):
                    selector.register(process.stdout, selectors.EVENT_READ, rank)
                some_ended = False
                while selector.get_map():
                    self._continue()
                    if time.monotonic() > deadline:
                        self._note_hang()
                        self._kill()
                        break
                    for key, _ in selector.select(0.1):
                        line = key.fileobj.readline()
                        if not line:
                            selector.unregister(key.fileobj)
                            deadline = deadline if some_ended else time.monotonic() + ending
                            some_ended = True
                            continue
                        deadline = deadline if some_ended else time.monotonic() + quiet
                        yield self._event(key.data, json.loads(line))
            for rank, process in enumerate(self._processes):
                yield Event(rank, "ended", time.monotonic(), {"status": self._status(process)})
        finally:
            self.end()

    def _event(self, rank: int, values: dict[str, Any]) -> Event:
        event = Event(rank, values.pop("event"), values.pop("at"), values)
        if event.name == "stops":
            heapq.heappush(self._resume, (event.at + event.values["seconds"], rank))
        return event

    def _continue(self) -> None:
        while self._resume and self._resume[0][0] <= time.monotonic():
            _, rank = heapq.heappop(self._resume)
            self._processes[rank].send_signal(signal.SIGCONT)

    def _status(self, process: subprocess.Popen[bytes]) -> int:
        """The output of the process has ended, so the process should end too."""
        try:
            return process.wait(ENDING)
        except subprocess.TimeoutExpired:
            self._note_hang()
            process.kill()
            return process.wait()

    def _note_hang(self) -> None:
        alive = [rank for rank, process in enumerate(self._processes) if process.poll() is None]
        for rank in alive:
            self._processes[rank].send_signal(signal.SIGCONT)
            self._processes[rank].send_signal(signal.SIGUSR1)  # from faulthandler
        time.sleep(1.0)
        self.problems.append(f"hang: ranks {alive} are still there\n{self.logs(alive)}")

    def logs(self, ranks: list[int]) -> str:
        """Return the last lines that ``ranks`` wrote to their error output."""
        return "\n".join(f"--- rank {rank}\n{self._logs[rank].read_text()[-6000:]}" for rank in ranks)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def end(self) -> None:
        """End all processes."""
        self._kill()
        for process in self._processes:
            process.wait()
            process.stdout.close()
