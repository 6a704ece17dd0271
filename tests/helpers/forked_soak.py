"""Runs ``benchmarks/soak.py`` with ranks that are forked from one process, which has imported what they need.

    python -m tests.helpers.forked_soak --quick ...

Each attempt of a soak starts its ranks again, and these spend most of their time in imports. A rank here ends without
the end of the interpreter, which ``tests/ranks/test_end_of_program.py`` shows.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from subprocess import TimeoutExpired
from types import SimpleNamespace
from typing import BinaryIO
from unittest import mock

from tests.helpers.fresh_process import ROOT
from tests.helpers.worker_pool.template import Process, Template

BENCHMARKS = ROOT / "benchmarks"
BOOT = (
    "import json, sys; requests = int(sys.argv.pop()); sys.path[:] = json.loads(sys.argv.pop()); "
    "import torch._dynamo, soak_rank; from tests.helpers.forked_soak import run_rank; "
    "from tests.helpers.worker_pool.template import serve; serve(requests, run_rank)"
)


def run_rank(settings: str, log: str, pipe: int) -> None:
    """Run a rank in a forked process. Its events go to ``pipe``, its errors to the file ``log``."""
    os.dup2(pipe, 1)
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 2)
    sys.argv = ["soak_rank.py", settings]
    import_module("soak_rank").main()


class Rank:
    """What ``soak_job`` uses of ``subprocess.Popen``, for a forked rank."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], stdout: int, stderr: BinaryIO, bufsize: int
    ) -> None:
        read, write = os.pipe()
        self.stdout = os.fdopen(read, "rb", buffering=bufsize)
        self._process: Process = _template().fork({"settings": command[-1], "log": stderr.name}, write, env)
        os.close(write)

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float = 600.0) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise TimeoutExpired("a rank", timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self._process.returncode is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _template() -> Template:
    return Template(BOOT, {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}, 120.0)


def main() -> int:
    sys.path.insert(0, str(BENCHMARKS))
    soak, job = import_module("soak"), import_module("soak_job")
    popen = SimpleNamespace(Popen=Rank, PIPE=job.subprocess.PIPE, TimeoutExpired=TimeoutExpired)
    with mock.patch.object(job, "subprocess", popen):
        found: int = soak.main()
    _template().end()
    return found


if __name__ == "__main__":
    sys.exit(main())
