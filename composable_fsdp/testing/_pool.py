"""The worker processes of one world size: started once, called many times, killed together."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import BinaryIO, cast

import torch.distributed as dist

from composable_fsdp.testing._messages import Call, Raised, Ready, Returned
from composable_fsdp.testing._template import Template

__all__ = ["Died", "Outcome", "RankPool", "Stuck", "end_templates"]

_GRACE = 1.0
"""Seconds that the other ranks get after a first one failed: enough to fail too, if they have the same error."""

_STACKS_TIMEOUT = 2.0
"""Seconds for all signal handlers to write their stacks. They take milliseconds."""

_START_TIMEOUT = 120.0
"""Seconds for a template to import torch, and for workers to connect, also with many ranks per core (idle: 4 s)."""

_TEMPLATES = 2
"""Templates per environment. Adjacent ranks then differ in per-process randomness, such as hashes of ``str``."""

_BOOT = (
    "import json, sys; requests = int(sys.argv.pop()); sys.path[:] = json.loads(sys.argv.pop()); "
    "from composable_fsdp.testing._worker import main; from composable_fsdp.testing._template import serve; "
    "serve(requests, main)"
)


@dataclass(frozen=True, slots=True)
class Died:
    """The process ended, with a negative ``exit_code`` for a signal. ``stacks`` is faulthandler's text of a crash."""

    exit_code: int
    stacks: str


@dataclass(frozen=True, slots=True)
class Stuck:
    """The process had not answered after ``seconds``, when the call was given up. ``stacks`` is faulthandler's text."""

    seconds: float
    stacks: str


Outcome = Ready | Returned | Raised | Died | Stuck


class RankPool:
    """``size`` processes with a gloo process group over the loopback interface. Final.

    They have ``environment`` in addition to their parent's. Invariant: between calls every worker waits for the next
    one. After any outcome but ``Returned`` the caller must ``kill`` the pool: a failed collective leaves ranks out of
    step.
    """

    def __init__(self, size: int, environment: Mapping[str, str]) -> None:
        self.size = size
        # The system chooses the port and this process is the server, so concurrent runs cannot race for a port.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[_Worker] = []
        self._ready: list[Outcome] = []
        combined = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": _loopback_interface(), **environment}
        templates = [_template(number, environment, combined) for number in range(min(size, _TEMPLATES))]
        try:
            for rank in range(size):
                template = templates[rank % _TEMPLATES]
                self._workers.append(_Worker(rank, size, self._store.port, template, combined))
        except BaseException:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        """True if all processes run."""
        return not any(worker.process.ended for worker in self._workers)

    def wait_until_ready(self) -> list[Outcome]:
        """Return ``Ready`` for every rank, or its other outcome. Only the first call waits."""
        if not self._ready:
            self._ready = self._collect(_START_TIMEOUT)
        return self._ready

    def run(self, job: bytes, timeout: float, lost: Collection[int] = ()) -> list[Outcome]:
        """Run a pickled ``Job`` on every rank, and return the outcomes after ``timeout`` seconds plus time for stacks.

        Ranks in ``lost`` are not waited for, and their end does not shorten the time of the others.
        """
        call = Call(tuple(sys.path), os.getcwd(), job)
        for worker in self._workers:
            worker.send(call)
        return self._collect(timeout, lost)

    def kill(self) -> None:
        """Kill all processes and their children, and wait until they have ended."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.close()

    def _collect(self, timeout: float, lost: Collection[int] = ()) -> list[Outcome]:
        begin = time.monotonic()
        deadline = begin + timeout
        outcomes: dict[_Worker, Outcome] = {}
        kept = [worker for rank, worker in enumerate(self._workers) if rank not in lost]
        while not outcomes.keys() >= set(kept) and time.monotonic() < deadline:
            waiting = [worker for worker in self._workers if worker not in outcomes]
            for worker in _answered(waiting, deadline - time.monotonic()):
                outcomes[worker] = outcome = worker.receive()
                if worker in kept and isinstance(outcome, (Raised, Died)):
                    deadline = min(deadline, time.monotonic() + _GRACE)
        stuck = [worker for worker in self._workers if worker not in outcomes]
        seconds = time.monotonic() - begin
        for worker, stacks in zip(stuck, _stacks(stuck), strict=True):
            outcomes[worker] = Stuck(seconds, stacks)
        return [outcomes[worker] for worker in self._workers]


class _Worker:
    """One process, the caller's end of its pipe, and the file for its stacks."""

    def __init__(self, rank: int, size: int, port: int, template: Template, environment: Mapping[str, str]) -> None:
        self.connection, theirs = Pipe()
        self._dump = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115  # lives as long as the process
        arguments = {"rank": rank, "world_size": size, "port": port}
        try:
            with theirs:
                self.process = template.fork(arguments, [theirs.fileno(), self._dump.fileno()], environment)
        except BaseException:
            self.connection.close()
            self._dump.close()
            raise

    def send(self, call: Call) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it has just died, which receive() will find
            self.connection.send(call)

    def receive(self) -> Outcome:
        """Return the answer of a worker that answered or ended."""
        with suppress(EOFError, OSError):
            if self.connection.poll():
                return cast(Outcome, self.connection.recv())
        self.kill()  # does not change the exit code: a process that closed its pipe is exiting
        return Died(self.process.wait(), self.stacks())

    def ask_for_stacks(self) -> None:
        if not self.process.ended:
            os.kill(self.process.pid, signal.SIGUSR1)

    def stacks(self) -> str:
        """Return what faulthandler has written so far."""
        size = os.fstat(self._dump.fileno()).st_size
        return os.pread(self._dump.fileno(), size, 0).decode(errors="replace")

    def kill(self) -> None:
        """Kill the process and its children, unless it was collected."""
        self.process.kill()

    def close(self) -> None:
        self.process.wait()
        self.connection.close()
        self._dump.close()


_templates: dict[tuple[int, frozenset[tuple[str, str]]], Template] = {}
"""Templates by number, and by the variables that their processes have in addition to this process's environment."""


def _template(number: int, extra: Mapping[str, str], environment: Mapping[str, str]) -> Template:
    key = (number, frozenset(extra.items()))
    if key in _templates and not _templates[key].alive:
        _templates.pop(key).end()
    if key not in _templates:
        _templates[key] = Template(_BOOT, environment, _START_TIMEOUT)
    return _templates[key]


def end_templates() -> None:
    """End the processes from which workers are forked. The next pool starts new ones."""
    while _templates:
        _templates.popitem()[1].end()


def _answered(workers: list[_Worker], timeout: float) -> Iterator[_Worker]:
    """Yield the workers that answered or died within a fraction of a second."""
    ready = wait([worker.connection for worker in workers], max(0.0, min(timeout, 0.2)))
    for worker in workers:
        # A child of the worker may keep the pipe open, so the end of the worker itself counts too.
        if worker.connection in ready or worker.process.ended:
            yield worker


def _stacks(workers: Sequence[_Worker]) -> list[str]:
    """Ask running workers for their stacks. The text is empty for a worker that cannot run a signal handler."""
    for worker in workers:
        worker.ask_for_stacks()
    deadline = time.monotonic() + _STACKS_TIMEOUT
    before, now = [""] * len(workers), [worker.stacks() for worker in workers]
    while time.monotonic() < deadline and (now != before or not all(now)):
        time.sleep(0.02)
        before, now = now, [worker.stacks() for worker in workers]
    return now


def _loopback_interface() -> str:
    """Return ``lo`` on Linux, ``lo0`` on macOS."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
