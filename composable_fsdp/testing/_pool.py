"""The worker processes of one world size: started once, called often, killed together."""

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
"""Seconds that the others get after a first rank failed: enough to fail too, if the error is everybody's."""

_STACKS_TIMEOUT = 2.0
"""Seconds for all signal handlers to write their stacks. They need milliseconds."""

_START_TIMEOUT = 120.0
"""Seconds for a template to import torch, and for workers to connect. The import takes 4 s on an idle core; busy
machines have many ranks per core.
"""

_TEMPLATES = 2
"""For each environment: neighbouring ranks differ in what is random in a process, hashes of text above all."""

_BOOT = (
    "import json, sys; requests = int(sys.argv.pop()); sys.path[:] = json.loads(sys.argv.pop()); "
    "from composable_fsdp.testing._worker import main; from composable_fsdp.testing._template import serve; "
    "serve(requests, main)"
)


@dataclass(frozen=True, slots=True)
class Died:
    """The process ended. ``exit_code`` is negative for a signal; ``stacks`` is faulthandler's text of a crash."""

    exit_code: int
    stacks: str


@dataclass(frozen=True, slots=True)
class Stuck:
    """The process had not answered when the call was given up, after ``seconds``; ``stacks`` is faulthandler's text."""

    seconds: float
    stacks: str


Outcome = Ready | Returned | Raised | Died | Stuck


class RankPool:
    """``size`` processes with a gloo process group over the loopback interface, and ``environment`` besides their
    parent's. Final.

    Invariant: between calls every worker waits for the next one. Whoever sees anything else than ``Returned`` from all
    of them must ``kill`` the pool, since a failed collective leaves ranks out of step.
    """

    def __init__(self, size: int, environment: Mapping[str, str]) -> None:
        self.size = size
        # The system chooses the port and the server is this process, so concurrent runs have nothing to race for.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[_Worker] = []
        self._ready: list[Outcome] = []
        whole = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": _loopback_interface(), **environment}
        templates = [_template(number, environment, whole) for number in range(min(size, _TEMPLATES))]
        try:
            for rank in range(size):
                template = templates[rank % _TEMPLATES]
                self._workers.append(_Worker(rank, size, self._store.port, template, whole))
        except BaseException:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        """Whether all processes run."""
        return not any(worker.process.ended for worker in self._workers)

    def wait_until_ready(self) -> list[Outcome]:
        """``Ready`` from every rank, or what happened instead; asks only once."""
        if not self._ready:
            self._ready = self._collect(_START_TIMEOUT)
        return self._ready

    def run(self, job: bytes, timeout: float, lost: Collection[int] = ()) -> list[Outcome]:
        """What became of a pickled ``Job`` on every rank, after ``timeout`` seconds and some for stacks at most.

        Ranks that are to be ``lost`` are not waited for, and how they end does not hurry the others.
        """
        call = Call(tuple(sys.path), os.getcwd(), job)
        for worker in self._workers:
            worker.send(call)
        return self._collect(timeout, lost)

    def kill(self) -> None:
        """Ends all processes and those that they started, and waits until they are gone."""
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
        with suppress(BrokenPipeError, ConnectionResetError):  # it died just now, which receive() will find out
            self.connection.send(call)

    def receive(self) -> Outcome:
        """The answer of a worker that answered or ended."""
        with suppress(EOFError, OSError):
            if self.connection.poll():
                return cast(Outcome, self.connection.recv())
        self.kill()  # changes no exit code: a process that closed its pipe is on its way out
        return Died(self.process.wait(), self.stacks())

    def ask_for_stacks(self) -> None:
        if not self.process.ended:
            os.kill(self.process.pid, signal.SIGUSR1)

    def stacks(self) -> str:
        """What faulthandler has written so far."""
        size = os.fstat(self._dump.fileno()).st_size
        return os.pread(self._dump.fileno(), size, 0).decode(errors="replace")

    def kill(self) -> None:
        """Ends the process and those that it started, unless it was collected."""
        self.process.kill()

    def close(self) -> None:
        self.process.wait()
        self.connection.close()
        self._dump.close()


_templates: dict[tuple[int, frozenset[tuple[str, str]]], Template] = {}
"""By number, and by what the environment of their processes has besides that of this process."""


def _template(number: int, besides: Mapping[str, str], environment: Mapping[str, str]) -> Template:
    key = (number, frozenset(besides.items()))
    if key in _templates and not _templates[key].alive:
        _templates.pop(key).end()
    if key not in _templates:
        _templates[key] = Template(_BOOT, environment, _START_TIMEOUT)
    return _templates[key]


def end_templates() -> None:
    """Ends the processes from which workers are forked; the next pool starts others."""
    while _templates:
        _templates.popitem()[1].end()


def _answered(workers: list[_Worker], timeout: float) -> Iterator[_Worker]:
    """Those that answered or died, after a fraction of a second at most."""
    ready = wait([worker.connection for worker in workers], max(0.0, min(timeout, 0.2)))
    for worker in workers:
        # A process that the worker forked may hold the pipe open, so the end of the worker itself counts too.
        if worker.connection in ready or worker.process.ended:
            yield worker


def _stacks(workers: Sequence[_Worker]) -> list[str]:
    """Asks running workers where they are. One that cannot even run a signal handler gives an empty text."""
    for worker in workers:
        worker.ask_for_stacks()
    deadline = time.monotonic() + _STACKS_TIMEOUT
    before, now = [""] * len(workers), [worker.stacks() for worker in workers]
    while time.monotonic() < deadline and (now != before or not all(now)):
        time.sleep(0.02)
        before, now = now, [worker.stacks() for worker in workers]
    return now


def _loopback_interface() -> str:
    """``lo`` on Linux, ``lo0`` on macOS."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
