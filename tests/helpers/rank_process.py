"""The processes of ``run_ranks``: what runs in them, how they are asked, and their failures as one readable error."""

from __future__ import annotations

import faulthandler
import os
import pickle
import random
import re
import signal
import socket
import subprocess
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist

from tests._internals import format_ranks

LOOPBACK = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")  # "lo0" on macOS
VARIABLES = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK}

START_TIMEOUT = 120.0
"""Seconds for processes to import torch and connect, also with many ranks per core (idle: 4 s)."""

_GRACE = 1.0
"""Seconds that the other ranks get after a first one failed: enough to fail too, if they have the same error."""

_STACKS_TIMEOUT = 2.0
"""Seconds for all processes to write their stacks. They take milliseconds."""


class RanksError(AssertionError):
    """A function given to ``run_ranks`` failed. ``failures`` has descriptions by rank, without ranks that returned."""

    def __init__(self, headline: str, failures: Mapping[int, str]) -> None:
        self.failures = dict(failures)
        ranks_by_text: dict[str, list[int]] = {}
        for rank, text in failures.items():
            ranks_by_text.setdefault(text, []).append(rank)
        parts = [f"--- {format_ranks(ranks)}: {text}" for text, ranks in ranks_by_text.items()]
        super().__init__("\n".join([headline, *parts]))


def pickled_job(function: Callable[..., object], args: object, kwargs: object) -> bytes:
    """Pickle a call for :func:`run_job`, with the warning filters: an error in a test is then an error on its ranks."""
    return pickle.dumps((function, args, kwargs, list(warnings.filters)))


class Outcome(NamedTuple):
    """The end of a job on one rank: a pickled result, or the text of a failure. Others may be why a rank is stuck."""

    result: bytes = b""
    failure: str = ""
    is_stuck: bool = False


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A process that runs :func:`main` and leads a process group, the pipe to it, and the file for its stacks."""

    process: subprocess.Popen[bytes]
    connection: Connection[Any, Any]
    stacks: Path

    def kill(self) -> tuple[int, str]:
        """Kill the process and its children, and return its exit code and its stacks."""
        if not self.connection.closed:  # otherwise it was killed, and the id may be another group's
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        code = self.process.wait()
        return code, self.stacks.read_text(errors="replace") if self.stacks.exists() else ""

    def answer(self) -> Outcome:
        """Return the answer of a process that answered or ended."""
        with suppress(EOFError, OSError):
            if self.connection.poll():
                return Outcome(*self.connection.recv())
        code, stacks = self.kill()  # does not change the exit code: a process that closed its pipe is exiting
        name = next((each.name for each in signal.Signals if each == -code), f"signal {-code}")
        how = f"died of {name}" if code < 0 else f"ended with exit code {code}"
        return Outcome(failure=f"{how}\n{stacks}".rstrip())


def ask(ranks: Sequence[RankProcess], job: bytes, timeout: float, lost: Collection[int] = ()) -> list[Outcome]:
    """Run a job on all ranks, and kill those that are stuck after ``timeout`` seconds. Ranks in ``lost`` are not waited
    for, and their end does not shorten the time of the others."""
    begin = time.monotonic()
    for each in ranks:
        with suppress(BrokenPipeError, ConnectionResetError):  # it has just died, which answer() will find
            each.connection.send_bytes(job)
    deadline = begin + timeout
    outcomes: dict[int, Outcome] = {}
    kept = set(range(len(ranks))).difference(lost)
    while not outcomes.keys() >= kept and (left := deadline - time.monotonic()) > 0:
        waiting = [rank for rank in range(len(ranks)) if rank not in outcomes]
        ready = wait([ranks[rank].connection for rank in waiting], min(left, 0.2))
        for rank in waiting:
            # A child of the process may keep the pipe open, so the end of the process itself counts too.
            if ranks[rank].connection in ready or ranks[rank].process.poll() is not None:
                outcomes[rank] = ranks[rank].answer()
                if outcomes[rank].failure and rank in kept:
                    deadline = min(deadline, time.monotonic() + _GRACE)
    stuck = [rank for rank in range(len(ranks)) if rank not in outcomes]
    headline = f"killed after {time.monotonic() - begin:.1f} s, when it was at"
    for rank in stuck:
        with suppress(ProcessLookupError):
            os.killpg(ranks[rank].process.pid, signal.SIGUSR1)  # writes the stacks, and ends the process
    deadline = time.monotonic() + _STACKS_TIMEOUT
    for rank in stuck:
        while ranks[rank].process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        stacks = ranks[rank].kill()[1]
        where = function_stack(stacks) or stacks.rstrip() or "(its stack is not available)"
        outcomes[rank] = Outcome(failure=f"{headline}\n{where}", is_stuck=True)
    return [outcomes[rank] for rank in range(len(ranks))]


def results_of(function: Callable[..., object], outcomes: Sequence[Outcome], lost: Collection[int] = ()) -> list[Any]:
    """Return the results of all ranks but those in ``lost``, or raise the failures."""
    __tracebackhide__ = True
    failures = {rank: each.failure for rank, each in enumerate(outcomes) if each.failure}
    if failures.keys() <= set(lost):
        return [pickle.loads(each.result) for rank, each in enumerate(outcomes) if rank not in lost]
    culprits = [rank for rank in failures if not outcomes[rank].is_stuck]
    what = "failed" if culprits else "did not return in time"
    raise RanksError(f"{_name(function)} {what} on {format_ranks(culprits or failures)} of {len(outcomes)}", failures)


def _name(function: Callable[..., object]) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def function_stack(stacks: str) -> str:
    """Extract the stack of the function that ran from faulthandler's text, formatted as in a traceback. Empty if no
    thread has the frame of :func:`run_job`, which is also missing if a deep stack was truncated."""
    found = re.search(r'((?:  File .*\n)*)  File ".*helpers/rank_process\.py", line \d+ in run_job\n', stacks)
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', found[1] if found else "")
    return "".join(traceback.format_list([(f, int(line), name, None) for f, line, name in reversed(frames)])).rstrip()


def main(rank: int, world_size: int, port: int, pipe: int, stacks: str) -> None:
    """Run jobs until the other end of ``pipe`` is closed. Each begins on all ranks after the one before has ended.
    ``port``: that of the caller's ``TCPStore``. ``stacks``: the file for Python's stacks on SIGUSR1 and on a crash."""
    os.set_inheritable(pipe, False)
    connection: Connection[Any, Any] = Connection(pipe)
    jobs: SimpleQueue[bytes] = SimpleQueue()

    def receive() -> None:
        """Receive in a thread, so that the process ends with its caller even while a function hangs."""
        try:
            while True:
                jobs.put(connection.recv_bytes())
        except (EOFError, OSError):
            os.killpg(os.getpid(), signal.SIGKILL)  # with its children

    threading.Thread(target=receive, daemon=True, name="jobs").start()
    with open(stacks, "w") as file:
        # The handler is in C, so it also writes stacks while the main thread waits in a collective and holds the GIL.
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file, chain=True)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        while True:
            connection.send(run_job(jobs.get()))


def run_job(job: bytes) -> Outcome:
    """Run a pickled job, and return its result or its failure."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    try:
        function, args, kwargs, filters = pickle.loads(job)
        with warnings.catch_warnings():
            warnings.filters = filters
            result = function(*args, **kwargs)
        return Outcome(pickle.dumps(result))
    except BaseException as error:  # exit() and pytest.fail() must reach the caller too
        first_line = f"{type(error).__name__}: {error}".splitlines()[0]
        own_frame = error.__traceback__
        lines = traceback.format_exception(type(error), error, own_frame and own_frame.tb_next)
        return Outcome(failure=f"raised {first_line}\n{''.join(lines).rstrip()}")
