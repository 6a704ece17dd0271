"""Runs programs under torchrun on two ranks, from the root of the repository."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[2]


def torchrun(
    program: str | Path,
    *flags: str,
    launcher: tuple[str, ...] = (),
    timeout: float = 200,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Run ``program``, check that its exit code is 0, and return its stdout and stderr. ``program``: the path of the
    program, relative to the root. ``flags``: the arguments of the program. ``launcher``: the arguments of torchrun,
    such as ``("--max-restarts", "2")``. ``timeout``: the seconds after which all processes of the program are killed.
    ``environment``: variables in addition to those of this process. ``PYTHON_EXEC`` is the interpreter of all."""
    done = finished(program, *flags, launcher=launcher, timeout=timeout, environment=environment)
    assert done.returncode == 0, done.stdout
    return done.stdout


def finished(
    program: str | Path,
    *flags: str,
    launcher: tuple[str, ...] = (),
    timeout: float = 200,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:
    """Run a program that may fail. The result's ``stdout`` includes stderr."""
    python = environment.get("PYTHON_EXEC", sys.executable)
    start = (python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *launcher)
    command = [*start, str(program), *flags]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that a timeout also kills the ranks
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, output)
