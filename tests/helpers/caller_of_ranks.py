"""A program that calls ``run_ranks`` and is ended by a test, which looks for the ranks afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from composable_fsdp import testing
from tests.helpers import run_ranks as pool


def write_ids_and_wait(file: str) -> None:
    child = subprocess.Popen(["sleep", "600"])
    written = Path(f"{file}.new")
    written.write_text(f"{child.pid} {os.getpid()}")
    written.rename(file)
    time.sleep(600)


def main(how: str, folder: str) -> None:
    """Run ranks until the end of this program, or until a signal ends it. ``how``: ``"new"`` waits for a rank of the
    public ``run_ranks``, ``"kept"`` for one of the tests' ``run_ranks`` while another is stopped, and ``"end"`` ends
    with ranks that are stopped. ``folder``: gets the file ``waiting`` with the ids of :func:`write_ids_and_wait`, and
    ``stopped`` with those of the processes that are stopped."""
    waiting = str(Path(folder, "waiting"))
    if how == "new":
        testing.run_ranks(write_ids_and_wait, 1, waiting)
    pool.TEMPLATES = 1  # each takes seconds
    Path(folder, "stopped").write_text(" ".join(map(str, pool.run_ranks(os.getpid, 2))))
    if how == "kept":
        pool.run_ranks(write_ids_and_wait, 1, waiting)


if __name__ == "__main__":
    from tests.helpers import caller_of_ranks  # ranks cannot import functions of __main__

    caller_of_ranks.main(*sys.argv[1:])
