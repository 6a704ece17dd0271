"""A program that calls ``run_ranks`` and is ended by a test, which looks for the ranks afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.helpers import run_ranks as pool


def write_ids_and_wait(file: str) -> None:
    child = subprocess.Popen(["sleep", "600"])
    written = Path(f"{file}.new")
    written.write_text(f"{child.pid} {os.getpid()}")
    written.rename(file)
    time.sleep(600)


def main(folder: str) -> None:
    """Wait for a rank while others are stopped, until a signal ends this program. ``folder``: gets the files
    ``waiting``, with the ids of :func:`write_ids_and_wait`, and ``stopped``, with those of the stopped processes."""
    pool.TEMPLATES = 1  # each takes seconds
    Path(folder, "stopped").write_text(" ".join(map(str, pool.run_ranks(os.getpid, 2))))
    pool.run_ranks(write_ids_and_wait, 1, str(Path(folder, "waiting")))


if __name__ == "__main__":
    from tests.helpers import caller_of_ranks  # ranks cannot import functions of __main__

    caller_of_ranks.main(*sys.argv[1:])
